"""Both servers of the protocol, for tests of what they have in common."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.server import Server


class HastyGrpcServer(GrpcServer):
    """It cannot see that a client has left, and would wait a second for its next call."""

    def close(self, wait_s: float = 0.05) -> None:
        super().close(wait_s)


AnyServer: TypeAlias = Server | GrpcServer
both_servers = pytest.mark.parametrize("kind", [Server, HastyGrpcServer])
