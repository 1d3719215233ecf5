from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
from pipeline.protocol.generated.messages import UnityMessageProto
from pipeline.protocol.http2 import Channel
from pipeline.protocol.server import METHOD, Server

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def message(size: int = 0, status: int = 200) -> bytes:
    out = UnityMessageProto(header={"status": status})
    out.unity_output.rl_output.side_channel = bytes(size)
    return out.SerializeToString()


def no_check() -> None:
    """There is no process to watch."""


class GeneralClient:
    """The environment's end with the general gRPC runtime, as Unity has it."""

    def __init__(self, port: int, _method: str):
        self._channel = grpc.insecure_channel(f"localhost:{port}", options=UNLIMITED)
        self._call = self._channel.unary_unary(METHOD)

    def call(self, data: bytes) -> bytes:
        return self._call(data, wait_for_ready=True, timeout=20)

    def close(self) -> None:
        self._channel.close()


@pytest.mark.parametrize("client", [Channel, GeneralClient])
@pytest.mark.parametrize("size", [0, 100, 70_000, 6_000_000])
def test_messages_of_every_size_arrive_whole_both_ways(client, size):
    with Server() as server, ThreadPoolExecutor(1) as pool:
        end = client(server.port, METHOD)
        for k in range(3):
            answer = pool.submit(end.call, message(size + k))
            got = server.receive(20, no_check)
            assert len(got.unity_output.rl_output.side_channel) == size + k
            server.reply(message(size + 2 * k))
            assert answer.result(20) == message(size + 2 * k)
        end.close()


def test_many_exchanges_do_not_exhaust_the_flow_control_windows():
    with Server() as server, ThreadPoolExecutor(1) as pool:
        end = GeneralClient(server.port, METHOD)

        def converse() -> None:
            for _ in range(60):
                end.call(message(500_000))

        done = pool.submit(converse)
        for _ in range(60):
            server.receive(20, no_check)
            server.reply(message(100_000))
        done.result(20)
        end.close()


def test_channel_speaks_to_the_general_grpc_server():
    handler = grpc.unary_unary_rpc_method_handler(lambda data, _: data[::-1])
    service, method = METHOD.strip("/").split("/")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(
            pool,
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            options=UNLIMITED,
        )
        port = server.add_insecure_port("localhost:0")
        server.start()
        channel = Channel(port, METHOD)
        for size in (0, 10, 70_000, 5_000_000):
            data = (bytes(range(256)) * (size // 256 + 1))[:size]
            assert channel.call(data) == data[::-1]
        server.stop(0).wait()
        with pytest.raises(ConnectionError):
            channel.call(b"any one there?")
        channel.close()


def test_close_answers_the_pending_call_with_status_400():
    with ThreadPoolExecutor(1) as pool:
        server = Server()
        end = GeneralClient(server.port, METHOD)
        answer = pool.submit(end.call, message())
        server.receive(20, no_check)
        server.close()
        assert UnityMessageProto.FromString(answer.result(20)).header.status == 400
        end.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()


def test_no_call_within_the_time_out_is_an_error_and_the_check_was_made():
    checks = []
    with Server() as server, pytest.raises(UnityTimeOutException, match=r"Behavior Type.*Default"):
        server.receive(0.3, lambda: checks.append(1))
    assert checks


def test_environment_that_breaks_the_connection_is_reported(monkeypatch):
    monkeypatch.setattr("pipeline.protocol.server._LOST_S", 0.1)
    with Server() as server, ThreadPoolExecutor(1) as pool:
        end = Channel(server.port, METHOD)
        answer = pool.submit(end.call, message())
        server.receive(20, no_check)
        server.reply(message())
        answer.result(20)
        end.close()
        with pytest.raises(UnityCommunicatorStoppedException, match="closed its connection"):
            server.receive(20, no_check)


def test_strangers_do_not_disturb():
    with Server() as server, ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            end = Channel(server.port, METHOD)
            answer = pool.submit(end.call, message(5))
            assert server.receive(20, no_check).header.status == 200
            server.reply(message(6))
            assert answer.result(20) == message(6)
        end.close()


def test_bytes_that_are_no_message_are_refused():
    with Server() as server, ThreadPoolExecutor(1) as pool:
        end = Channel(server.port, METHOD)
        answer = pool.submit(end.call, b"\xff\xff\xff")
        with pytest.raises(UnityCommunicationException, match="3 bytes that are not a message"):
            server.receive(20, no_check)
        server.close()
        assert UnityMessageProto.FromString(answer.result(20)).header.status == 400
        end.close()


def test_listens_on_loopback_only_and_starts_no_thread():
    before = threading.active_count()
    with Server() as server:
        addresses = {listener.getsockname()[0] for listener in server._listeners}
        assert addresses <= {"127.0.0.1", "::1"}
        assert threading.active_count() == before
