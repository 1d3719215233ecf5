from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import grpc
import psutil
import pytest
from http2_peer import RawClient, call, message, no_check, settings, update
from servers import AnyServer, GeneralClient, HastyGrpcServer, both_servers

from pipeline.errors import (
    SettingsError,
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
from pipeline.wire.codec.generated.messages import UnityMessageProto
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import ACK, HEADERS, PING
from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.http2 import Channel, Connection
from pipeline.wire.transport.server import IncomingConnection, Server, open_server


def greet(server: AnyServer, end: Channel | GeneralClient) -> None:
    """Let `end` send a greeting, so that it becomes the environment."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(end.call, message())
        server.receive(20, no_check)
        server.reply(message())
        answer.result(20)


def _until(seen: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < deadline, "not seen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def conversation(
    kind: type[AnyServer], client: type[Channel | GeneralClient] = GeneralClient
) -> Iterator[tuple[AnyServer, Channel | GeneralClient, Callable[[bytes], Future[bytes]]]]:
    """Yield a server, its environment, and a function that makes a call in another thread."""
    with ThreadPoolExecutor(2) as pool, kind() as server:
        end = client(server.port, METHOD)
        greet(server, end)
        yield server, end, lambda data: pool.submit(end.call, data)
        end.close()


@both_servers
@pytest.mark.parametrize("client", [Channel, GeneralClient])
@pytest.mark.parametrize("size", [0, 100, 70_000, 6_000_000])
def test_messages_of_every_size_arrive_complete_in_both_directions(kind, client, size):
    with conversation(kind, client) as (server, _, call_later):
        for k in range(3):
            answer = call_later(message(size + k))
            received = server.receive(20, no_check)
            assert len(received.unity_output.rl_output.side_channel) == size + k
            server.reply(message(size + 2 * k))
            assert answer.result(20) == message(size + 2 * k)


def test_channel_can_call_a_server_of_the_grpc_package():
    handler = grpc.unary_unary_rpc_method_handler(lambda data, _: data[::-1])
    service, method = METHOD.strip("/").split("/")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(
            pool,
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
            options=[("grpc.max_receive_message_length", -1)],
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


def is_end(answer: Future[bytes]) -> bool:
    return UnityMessageProto.FromString(answer.result(20)).header.status == 400


@both_servers
@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (message(), contextlib.nullcontext()),
        (message(status=400), pytest.raises(UnityCommunicatorStoppedException, match="has exited")),
        (b"\xff\xff\xff", pytest.raises(UnityCommunicationException, match="3 bytes that are not")),
    ],
)
def test_close_answers_the_pending_call_with_status_400(kind, sent, refused):
    with conversation(kind) as (server, _, call_later):
        answer = call_later(sent)
        with refused:
            server.receive(20, no_check)
        server.close()
        assert is_end(answer)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()


@pytest.mark.parametrize("has_called", [False, True])
def test_close_does_not_wait_for_a_call_that_cannot_come(has_called):
    server = GrpcServer()
    with ThreadPoolExecutor(1) as pool, contextlib.closing(Channel(server.port, METHOD)) as end:
        if has_called:
            answer = pool.submit(end.call, message())
            server.receive(20, no_check)
        began = time.monotonic()
        server.close(60.0)
        assert time.monotonic() - began < 40
        assert not has_called or is_end(answer)


@both_servers
def test_greeting_that_was_found_by_an_earlier_check_is_returned_by_receive(kind):
    with ThreadPoolExecutor(1) as pool, kind() as server:
        assert not server.is_called(0.05)
        end = GeneralClient(server.port, METHOD)
        pool.submit(end.call, message())
        _until(lambda: server.is_called(1))
        assert server.is_called(0)
        server.receive(20, lambda: pytest.fail("it is there already, so that nobody is looked for"))
        server.close()
        end.close()


@both_servers
def test_receive_raises_after_the_time_out_and_calls_its_check_callback_while_waiting(kind):
    checks = []
    pattern = r"\(0\.3 s\)(.|\n)*Behavior Type.*Default"
    with kind() as server, pytest.raises(UnityTimeOutException, match=pattern):
        server.receive(0.3, lambda: checks.append(1))
    assert checks


@both_servers
def test_server_takes_the_port_on_both_loopback_addresses_and_frees_it_at_close(kind):
    with kind() as server:
        port = server.port
        for address in ("127.0.0.1", "::1") if socket.has_ipv6 else ("127.0.0.1",):
            socket.create_connection((address, port)).close()
        with pytest.raises(OSError, match=r"in use|bind"):
            kind(port)
    socket.create_server(("127.0.0.1", port)).close()


def test_port_that_an_older_grpc_runtime_cannot_bind_is_reported_as_an_os_error(monkeypatch):
    ends = []
    runtime = SimpleNamespace(add_insecure_port=lambda _address: 0, stop=ends.append)
    monkeypatch.setattr(grpc, "server", lambda *_, **__: runtime)
    with pytest.raises(OSError, match="port 5004 cannot be bound"):
        GrpcServer(port=5004)
    assert ends == [None]


@both_servers
def test_server_listens_on_loopback_only(kind):
    with kind() as server:
        listening = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
        }
    # The general runtime may bind 127.0.0.1 as an IPv6 address.
    plain = {ip.removeprefix("::ffff:") for ip in listening}
    assert plain
    assert plain <= {"127.0.0.1", "::1"}


@both_servers
def test_threads_of_a_server_end_when_the_server_is_closed(kind):
    before = set(threading.enumerate())
    server = kind()
    server.close()
    server.close()
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)


@both_servers
def test_call_during_close_is_answered_with_the_status_code_that_stops_the_environment(kind):
    with conversation(kind) as (server, end, _), ThreadPoolExecutor(1) as pool:
        closed = pool.submit(server.close, 10)
        assert UnityMessageProto.FromString(end.call(message())).header.status == 400
        closed.result(20)


@both_servers
def test_after_release_the_next_environment_has_a_new_conversation(kind):
    with ThreadPoolExecutor(1) as pool, kind() as server:
        for n in (1, 2, 3):
            stray = Channel(server.port, METHOD)
            refused = pool.submit(
                stray.call, UnityMessageProto(header={"status": 200}).SerializeToString()
            )
            _until(lambda refused=refused: server.is_called(0.02) or refused.done())
            assert not server.is_called(0)
            with pytest.raises(ConnectionError):
                refused.result(20)
            stray.close()
            end = Channel(server.port, METHOD)
            for size in (n, 10 * n):
                answer = pool.submit(end.call, message(size))
                received = server.receive(20, no_check)
                assert len(received.unity_output.rl_output.side_channel) == size
                if size == n:
                    server.reply(message(100 * n))
                    assert answer.result(20) == message(100 * n)
            server.release(0.05)
            assert is_end(answer)
            assert not server.has_greeted
            with pytest.raises(UnityCommunicationException, match="still at work"):
                server.reply(message())
            end.close()


@both_servers
def test_next_environment_after_release_is_not_reported_as_lost(kind, monkeypatch):
    monkeypatch.setattr("pipeline.wire.transport.calls.LOST_S", 0.05)
    with ThreadPoolExecutor(1) as pool, kind() as server:
        end = Channel(server.port, METHOD)
        greet(server, end)
        answer = pool.submit(end.call, message())
        server.receive(20, no_check)
        end._connection.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError):
            answer.result(20)
        if kind is HastyGrpcServer:
            _until(lambda: server._lost_at is not None)
        server.reply(message())
        with pytest.raises(UnityCommunicatorStoppedException, match="closed its connection"):
            server.receive(20, no_check)
        server.release(0.05)
        with pytest.raises(UnityTimeOutException):  # no longer reported as lost
            server.receive(0.3, no_check)
        end.close()


def test_close_waits_until_the_environment_has_read_the_answer():
    with ThreadPoolExecutor(1) as pool:
        server = Server()
        client = RawClient(server.port)
        client.send(settings(window=0), call(1, message()))
        server.receive(20, no_check)
        closed = pool.submit(server.close, 20)
        client.until(HEADERS, 1)  # the message follows when there is a window
        client.send(update(1, 1000))
        assert UnityMessageProto.FromString(client.answer(1)).header.status == 400
        client.close()
        closed.result(20)


def test_close_waits_no_longer_than_the_given_limit(monkeypatch):
    limits = []
    monkeypatch.setattr(IncomingConnection, "respond", lambda *values: limits.append(values[-1]))
    with Server() as server:
        client = RawClient(server.port)
        client.send(call(1, message()))
        server.receive(20, no_check)
        server.close(0.0)
    assert limits == [0.0]
    client.close()


@both_servers
def test_call_that_arrives_while_no_thread_waits_is_received_later(kind, monkeypatch):
    """gRPC's client gives up a connection if the server does not send SETTINGS in time."""
    with kind() as server, ThreadPoolExecutor(1) as pool:
        channel = grpc.insecure_channel(f"localhost:{server.port}")
        grpc.channel_ready_future(channel).result(20)  # the server has sent SETTINGS
        answer = pool.submit(channel.unary_unary(METHOD), message(3), timeout=20)
        assert server.receive(20, no_check).header.status == 200
        server.reply(message(4))
        assert answer.result(20) == message(4)
        channel.close()


@both_servers
def test_twenty_megabytes_pass_both_ways_while_the_client_probes_the_bandwidth(kind, monkeypatch):
    pings, handle = [], Connection._handle

    def watch(self, kind_, flags, stream, payload):
        pings.append(kind_ == PING and not flags & ACK)
        handle(self, kind_, flags, stream, payload)

    monkeypatch.setattr(Connection, "_handle", watch)
    data = bytes(range(256)) * (20_000_000 // 256)
    out = UnityMessageProto.FromString(message())
    out.unity_output.rl_output.side_channel = data
    big = out.SerializeToString()
    probing = partial(GeneralClient, http2_bdp_probe=1)
    with conversation(kind, probing) as (server, _, call_later):
        for _ in range(2):
            answer = call_later(big)
            assert server.receive(20, no_check).unity_output.rl_output.side_channel == data
            server.reply(big)
            assert answer.result(20) == big
    assert kind is not Server or any(pings)


def test_environment_variable_chooses_the_transport_and_an_argument_has_precedence(monkeypatch):
    monkeypatch.delenv("PIPELINE_TRANSPORT", raising=False)
    with open_server() as server:
        assert isinstance(server, Server)
    monkeypatch.setenv("PIPELINE_TRANSPORT", "grpc")
    with open_server() as server, open_server(transport="sockets") as other:
        assert isinstance(server, GrpcServer)
        assert isinstance(other, Server)
    monkeypatch.setenv("PIPELINE_TRANSPORT", "tcp")
    with pytest.raises(SettingsError, match=r"PIPELINE_TRANSPORT: 'tcp' .*\['sockets', 'grpc'\]"):
        open_server()
    with pytest.raises(SettingsError, match=r"^transport: 'udp'"):
        open_server(transport="udp")
