"""A connection reads what has arrived and sends what its peer takes, however little that is."""

from __future__ import annotations

import select
import socket
import struct

import pytest
from http2_peer import call, cancel, cut, message, opening, settings, update

from pipeline.errors import UnityCommunicationException
from pipeline.protocol import frames, incoming
from pipeline.protocol.calls import METHOD
from pipeline.protocol.http2 import PREFACE
from pipeline.protocol.incoming import MAX_CALLS, IncomingConnection


class Socket:
    """Sends at most `most` bytes at a time where that is set, and nothing every other time."""

    def __init__(self, real):
        self._real = real
        self.most = None
        self.looks = []
        self._n_sent = 0

    def __getattr__(self, name):
        return getattr(self._real, name)

    def recv(self, size):
        self.looks.append(size)
        return self._real.recv(size)

    def send(self, data):
        if self.most is None:
            return self._real.send(data)
        self._n_sent += 1
        if self._n_sent % 2:
            raise BlockingIOError
        return self._real.send(bytes(data[: self.most]))


@pytest.fixture
def pair():
    """A peer's socket, and the connection at the called end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    with peer, called:
        peer.setblocking(False)

        yield peer, IncomingConnection(Socket(called), METHOD)


def sent(peer, connection, data):
    """Send, and wait until it is there."""
    peer.sendall(data)
    assert select.select([connection.socket], [], [], 20)[0]


def gone_away(peer):
    """Code and words of the GOAWAY at the end of what the connection has sent."""
    assert select.select([peer], [], [], 20)[0]
    payload = next(f.payload for f in cut(peer.recv(1 << 16)) if f.kind == frames.GOAWAY)
    return struct.unpack(">I", payload[4:8])[0], payload[8:].decode()


def test_the_first_bytes_may_come_one_at_a_time(pair):
    peer, connection = pair
    for byte in PREFACE + settings():
        assert connection.read() is True  # there is nothing
        sent(peer, connection, bytes([byte]))
        assert connection.read() is True
    assert connection.is_greeted
    assert not connection.failure


@pytest.mark.parametrize("at", [0, 5, len(PREFACE) - 1])
def test_another_preface_is_seen_at_its_first_other_byte(pair, at):
    peer, connection = pair
    for byte in PREFACE[:at]:
        sent(peer, connection, bytes([byte]))
        assert connection.read() is True
    sent(peer, connection, b"\x00")
    assert connection.read() is False
    assert connection.failure == "something else than HTTP/2"


def test_why_a_connection_ends_is_said_in_words(pair):
    peer, connection = pair
    sent(peer, connection, PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)))
    assert connection.read() is False
    assert connection.failure == "a PING frame where SETTINGS is due"
    assert gone_away(peer) == (frames.PROTOCOL_ERROR, connection.failure)


def test_a_stranger_is_read_16_kilobytes_at_a_look_and_the_environment_256(pair):
    peer, connection = pair
    sent(peer, connection, PREFACE + settings())
    connection.read()
    connection.trust()
    connection.read()
    assert connection.socket.looks == [1 << 14, 1 << 18]


@pytest.mark.parametrize("most", [None, 1000, 20_001])
def test_an_answer_arrives_whole_however_little_is_taken_at_a_time(pair, most):
    peer, connection = pair
    sent(peer, connection, PREFACE + settings() + call(1, message()))
    while not connection.messages:
        assert connection.read() is True
    answer = bytes(range(250)) * 240  # more than a frame, and less than the window
    connection.socket.most = most
    connection.respond(1, answer, 20.0)
    peer.setblocking(True)
    received = []
    content = b""
    while (
        not received
        or received[-1].flags & frames.END_STREAM == 0
        or received[-1].kind != frames.HEADERS
    ):
        content += peer.recv(1 << 20)
        received = list(cut(content))
    assert {part.stream for part in received} == {0, 1}
    body = b"".join(part.payload for part in received if part.kind == frames.DATA)
    assert body[5:] == answer
    assert received[-1].kind == frames.HEADERS


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        (settings(), "took only 65535 of a message's 16777221 bytes"),
        (settings(window=1 << 25) + update(0, 1 << 25), "does not read its answer"),
    ],
)
def test_a_peer_that_takes_no_more_is_waited_for_no_longer_than_the_limit(pair, windows, told):
    peer, connection = pair
    sent(peer, connection, PREFACE + windows + call(1, message()))
    while not connection.messages:
        assert connection.read() is True
    with pytest.raises(UnityCommunicationException, match=told):
        connection.respond(1, bytes(1 << 24), 0.05)


def test_calls_that_are_refused_and_taken_back_are_forgotten(pair, monkeypatch):
    monkeypatch.setattr(incoming, "_MAX_REFUSED", 3)
    peer, connection = pair
    sent(
        peer,
        connection,
        PREFACE + settings() + b"".join(opening(2 * n + 1) for n in range(MAX_CALLS)),
    )
    for n in range(MAX_CALLS, MAX_CALLS + 10):
        sent(peer, connection, opening(2 * n + 1) + cancel(2 * n + 1))
        assert connection.read() is True
        peer.recv(1 << 16)
    assert not connection.failure
    for n in range(20, 24):
        sent(peer, connection, opening(2 * n + 1))
        connection.read()
    assert connection.failure == "more calls than are allowed"
