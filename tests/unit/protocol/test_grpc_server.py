"""The server on gRPC's own runtime: where it listens, and how long it takes to close."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from http2_peer import message, no_check

from pipeline.protocol.calls import METHOD
from pipeline.protocol.channel import Channel
from pipeline.protocol.generated.messages import UnityMessageProto
from pipeline.protocol.grpc_server import GrpcServer


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


def test_a_host_that_is_named_is_the_only_address():
    with GrpcServer(host="127.0.0.1") as server:
        assert reachable("127.0.0.1", server.port)
        assert not reachable("::1", server.port)


def test_a_port_that_older_runtimes_cannot_bind_is_in_use(monkeypatch):
    ends = []
    runtime = SimpleNamespace(add_insecure_port=lambda _address: 0, stop=ends.append)
    monkeypatch.setattr(grpc, "server", lambda *_, **__: runtime)
    with pytest.raises(OSError, match="port 5004 cannot be bound"):
        GrpcServer(port=5004)
    assert ends == [None]


@pytest.mark.parametrize("has_called", [False, True])
def test_nothing_is_waited_for_where_no_call_can_come(has_called):
    server = GrpcServer()
    with ThreadPoolExecutor(1) as pool:
        answer = None
        if has_called:
            end = Channel(server.port, METHOD)
            answer = pool.submit(end.call, message())
            server.receive(20, no_check)
        began = time.monotonic()
        server.close(60.0)
        assert time.monotonic() - began < 40
        if answer is not None:
            assert UnityMessageProto.FromString(answer.result(20)).header.status == 400
            end.close()
