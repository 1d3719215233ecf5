"""Hostile peers cost bounded memory and time, and do not stop the conversation."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from http2_peer import (
    BLOCK,
    RawClient,
    call,
    cancel,
    message,
    no_check,
    opening,
    served,
    settings,
    update,
)

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
from pipeline.wire.transport import calls, http2
from pipeline.wire.transport import frames as f
from pipeline.wire.transport import server as server_module
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.http2 import PREFACE, Channel
from pipeline.wire.transport.server import BACKLOG, MAX_CALLS, IncomingConnection, Server

PINGS = 3000 * f.frame(f.PING, 0, 0, bytes(8))


@pytest.fixture
def server(monkeypatch):
    """A server whose sockets buffer few bytes for peers that do not read."""
    accept = server_module.accepted_from

    def narrow(listener: socket.socket, limit: int) -> Iterator[socket.socket]:
        for accepted in accept(listener, limit):
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            yield accepted

    monkeypatch.setattr(server_module, "accepted_from", narrow)
    with Server() as narrow_server:
        yield narrow_server


def answered(server: Server, client: RawClient, stream: int) -> None:
    """Make one call of the environment, and check its answer."""
    client.send(call(stream, message()))
    served(server, client, stream)


@contextlib.contextmanager
def endlessly(client: RawClient, data: bytes) -> Iterator[threading.Event]:
    """Send `data` again and again, without reading, until the connection ends."""
    stop, ended = threading.Event(), threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                client.send(data)
        ended.set()

    thread = threading.Thread(target=send)
    thread.start()
    yield ended
    stop.set()
    with contextlib.suppress(OSError):
        client.socket.shutdown(socket.SHUT_RDWR)
    thread.join()
    client.close()


def test_all_waiting_connections_are_accepted_in_one_iteration_of_the_server(server):
    clients = [RawClient(server.port) for _ in range(5)]
    with server._lock:
        server._wait(5.0)
    for client in clients:
        assert client.until(f.SETTINGS)
        client.close()


def test_silent_connections_do_not_prevent_the_environment_from_connecting(server, monkeypatch):
    monkeypatch.setattr(server_module, "_CANDIDATE_LIMIT_S", 0.1)
    monkeypatch.setattr(server_module, "_KEEPER_INTERVAL_S", 0.05)
    silent = [RawClient(server.port) for _ in range(20)]
    client = RawClient(server.port)
    answered(server, client, 1)
    for peer in [*silent, client]:
        peer.close()


def test_connection_that_breaks_the_rules_of_http2_is_closed_at_once(monkeypatch):
    monkeypatch.setattr(server_module, "_KEEPER_INTERVAL_S", 1000.0)
    with Server() as server, ThreadPoolExecutor(1) as pool:
        received = pool.submit(server.receive, 60, no_check)
        client, other = RawClient(server.port), RawClient(server.port)
        client.socket.settimeout(20)
        client.until(f.SETTINGS)
        client.send(f.frame(f.PING, 0, 0))
        assert client.end() == 6
        other.send(call(1, message()))
        received.result()
        for peer in (client, other):
            peer.close()


def test_connection_without_an_http2_preface_is_closed_after_a_time_limit(server, monkeypatch):
    monkeypatch.setattr(server_module, "_PREFACE_S", 0.2)
    slow, idle = RawClient(server.port, first=PREFACE[:5]), RawClient(server.port)
    assert slow.end() is not None
    answered(server, idle, 1)
    slow.close()
    idle.close()


@pytest.mark.parametrize(
    "data",
    [PINGS, 3000 * settings(window=70000), 500 * f.frame(f.PING, 0, 0, bytes(8)) + opening(2)],
    ids=["PING", "SETTINGS", "PING and a broken frame"],
)
def test_peer_that_does_not_read_its_answers_is_disconnected_without_delaying_other_peers(
    server, data
):
    client = RawClient(server.port)
    with endlessly(RawClient(server.port), data) as ended, ThreadPoolExecutor(1) as pool:
        future = pool.submit(served, server, client, 1, 1)
        assert ended.wait(20)
        client.send(call(1, message(1)))
        future.result()
    client.close()


@pytest.mark.parametrize("data", [PINGS, 3000 * f.frame(0xEE, 0, 0)], ids=["PING", "unknown"])
def test_receive_times_out_and_calls_its_check_callback_during_a_flood_of_frames(server, data):
    def times_out(server: Server) -> None:
        checks = []
        with pytest.raises(UnityTimeOutException):
            server.receive(0.5, lambda: checks.append(1))
        assert checks

    client = RawClient(server.port)
    answered(server, client, 1)
    with endlessly(client, 3000 * f.frame(0xEE, 0, 0)):
        times_out(server)
    with Server() as other, ThreadPoolExecutor(2) as pool:
        one, two = (RawClient(other.port) for _ in range(2))
        with endlessly(one, data), endlessly(two, data):
            for reader in (one, two):
                pool.submit(list, reader.frames())
            times_out(other)


def test_lost_connection_is_reported_during_a_flood_of_frames(server, monkeypatch):
    monkeypatch.setattr(calls, "LOST_S", 0.1)
    client = RawClient(server.port)
    answered(server, client, 1)
    client.close()
    with (
        endlessly(RawClient(server.port), 3000 * f.frame(0xEE, 0, 0)),
        pytest.raises(UnityCommunicatorStoppedException, match="closed its connection"),
    ):
        server.receive(20, no_check)


def test_flood_of_connections_during_a_conversation_is_accepted_in_small_groups_and_not_read(
    monkeypatch,
):
    """Bytes of other clients are not read, and few clients are accepted at a time."""
    monkeypatch.setattr(server_module, "_KEEPER_INTERVAL_S", 0.05)
    accept, read = server_module.accepted_from, IncomingConnection.read
    looks, strangers, readers = [], [], set()

    def counted(listener: socket.socket, limit: int) -> Iterator[socket.socket]:
        looks.append(time.monotonic())
        assert limit <= BACKLOG
        for accepted in accept(listener, limit):
            strangers.append(accepted)
            yield accepted

    def noted(self: IncomingConnection) -> bool:
        readers.add(id(self))
        return read(self)

    stop = threading.Event()

    def flood(port: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                sock.sendall(PREFACE + settings() + PINGS + call(1, message(10)))
                sock.close()

    def converse(port: int) -> int:
        channel, n = Channel(port, METHOD), 0
        while channel.call(message(n)) == message(n):
            n += 1
        channel.close()
        return n

    server = Server()
    with ThreadPoolExecutor(5) as pool:
        environment = pool.submit(converse, server.port)
        assert server.receive(20, no_check)
        server.reply(message(0))
        monkeypatch.setattr(server_module, "accepted_from", counted)
        monkeypatch.setattr(IncomingConnection, "read", noted)
        floods = [pool.submit(flood, server.port) for _ in range(4)]
        start, n = time.monotonic(), 1
        while len(strangers) < 100 or n < 200:
            assert time.monotonic() - start < 60
            received = server.receive(20, no_check).unity_output.rl_output.side_channel
            assert received == bytes(n)
            server.reply(message(n))
            n += 1
        elapsed = time.monotonic() - start
        stop.set()
        for future in floods:
            future.result()
        server.close()
        assert environment.result() == n
    assert len(readers) == 1
    # Per period, the waiting thread and the keeper thread each check two listeners.
    assert len(looks) <= 2 * 2 * (elapsed / 0.05 + 2)


def test_close_is_quick_although_the_peer_reads_nothing():
    with ThreadPoolExecutor(1) as pool:
        server = Server()
        client = RawClient(server.port)
        client.send(settings(window=2**31 - 1), update(0, 2**30), call(1, message()))
        server.receive(20, no_check)
        with pytest.raises(UnityCommunicationException, match="does not read"):
            server.reply(message(20_000_000), 0.1)
        client.send(call(3, message()))
        server.receive(20, no_check)
        silent = [RawClient(server.port) for _ in range(5)]
        pool.submit(server.close, 0.2).result(10)
        for peer in [*silent, client]:
            peer.close()


def test_each_call_beyond_the_announced_maximum_is_refused_and_later_calls_are_served(server):
    client = RawClient(server.port)
    answered(server, client, 1)
    last = 3 + 2 * MAX_CALLS
    client.send(*(opening(stream) for stream in range(3, last, 2)))
    client.send(opening(last), f.frame(f.DATA, 0, last, b"x"))
    client.send(f.frame(f.DATA, 0, last, b"y"), f.frame(f.DATA, f.END_STREAM, last, b"z"))
    client.send(opening(last + 2, BLOCK, f.END_STREAM), cancel(3))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(served, server, client, last + 4, 5)
        for stream in (last, last + 2):
            assert client.until(f.RST_STREAM, stream).payload == struct.pack(">I", 7)
        client.send(call(last + 4, message(5)))
        future.result()
    client.close()


def test_call_above_the_size_limit_ends_the_connection_of_the_environment(server, monkeypatch):
    monkeypatch.setattr(http2, "MAX_CALL_BYTES", 100_000)
    monkeypatch.setattr(calls, "LOST_S", 0.1)
    client = RawClient(server.port)
    answered(server, client, 1)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(server.receive, 20, no_check)
        client.send(f.frame(f.HEADERS, f.END_HEADERS, 3, BLOCK))
        client.send(*(f.frame(f.DATA, 0, 3, bytes(10_000)) for _ in range(11)))
        assert client.end() == 11
        assert isinstance(lost.exception(20), UnityCommunicatorStoppedException)
    client.close()
