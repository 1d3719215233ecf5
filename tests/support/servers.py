"""Both servers of the protocol, for tests that each server must pass."""

from typing import TypeAlias

import grpc
import pytest

from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.server import Server


class HastyGrpcServer(GrpcServer):
    """A GrpcServer that closes fast: it does not notice that a client has left, and would wait."""

    def close(self, wait_s: float = 0.05) -> None:
        super().close(wait_s)


class GeneralClient:
    """An environment's end that uses the general gRPC runtime, as Unity does."""

    def __init__(self, port: int, _method: str = METHOD, **options: int):
        unlimited = {"max_receive_message_length": -1, "max_send_message_length": -1}
        # With a pool of its own, each client has its own connection.
        options = {**unlimited, "use_local_subchannel_pool": 1, **options}
        pairs = [(f"grpc.{name}", value) for name, value in options.items()]
        self._channel = grpc.insecure_channel(f"localhost:{port}", options=pairs)

    def start(self, data: bytes, method: str = METHOD, *, waits: bool = False) -> grpc.Future:
        return self._channel.unary_unary(method).future(data, timeout=20, wait_for_ready=waits)

    def call(self, data: bytes) -> bytes:
        return self.start(data, waits=True).result()

    def refusal(self, data: bytes, method: str = METHOD) -> grpc.StatusCode:
        return self.start(data, method).exception().code()

    def close(self) -> None:
        self._channel.close()


AnyServer: TypeAlias = Server | GrpcServer
both_servers = pytest.mark.parametrize("kind", [Server, HastyGrpcServer])
