"""Both servers of the protocol, for tests that each server must pass."""

from typing import TypeAlias

import pytest

from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.server import Server


class HastyGrpcServer(GrpcServer):
    """A GrpcServer that closes fast: it does not notice that a client has left, and would wait."""

    def close(self, wait_s: float = 0.05) -> None:
        super().close(wait_s)


AnyServer: TypeAlias = Server | GrpcServer
both_servers = pytest.mark.parametrize("kind", [Server, HastyGrpcServer])
