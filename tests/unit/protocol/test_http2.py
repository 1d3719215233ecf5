"""Our server against conforming and malformed HTTP/2, frame by frame (RFC 9113)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pipeline.errors import UnityCommunicatorStoppedException, UnityTimeOutException
from pipeline.protocol import frames
from pipeline.protocol.frames import frame
from pipeline.protocol.generated.messages import UnityMessageProto
from pipeline.protocol.http2 import PREFACE
from pipeline.protocol.server import Server

PRIORITY, PUSH_PROMISE, CONTINUATION, UNKNOWN = 2, 5, 9, 0xEE
PRIORITY_FLAG = 0x20
HEADERS, DATA, SETTINGS, WINDOW_UPDATE = 1, 0, 4, 8
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
BLOCK = b"\x82 whatever a header block may hold, Huffman codes and table updates \x3f\xe1\x1f"


def no_check() -> None:
    """There is no process to watch."""


def message(size: int = 0) -> bytes:
    out = UnityMessageProto(header={"status": 200})
    out.unity_output.rl_output.side_channel = bytes(size)
    return out.SerializeToString()


def prefixed(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


def settings(**values: int) -> bytes:
    names = {"table": 1, "push": 2, "streams": 3, "window": 4, "frame": 5, "unknown": 0xF0F0}
    return frame(4, 0, 0, b"".join(struct.pack(">HI", names[k], v) for k, v in values.items()))


def update(stream: int, credit: int) -> bytes:
    return frame(8, 0, stream, struct.pack(">I", credit))


def call(stream: int, data: bytes) -> bytes:
    """The plainest conforming call."""
    head = frame(HEADERS, END_HEADERS, stream, BLOCK)
    return head + frame(DATA, END_STREAM, stream, prefixed(data))


@dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class RawClient:
    """Sends bytes, and cuts what comes back into frames."""

    def __init__(self, port: int, first: bytes | None = None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(PREFACE + settings() if first is None else first)
        self._file = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def frames(self) -> Iterator[Frame]:
        while head := self._file.read(9):
            high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
            yield Frame(kind, flags, stream, self._file.read(high << 16 | low))

    def until(self, kind: int, stream: int = 0, flags: int = 0) -> Frame:
        for one in self.frames():
            if (one.kind, one.stream) == (kind, stream) and one.flags & flags == flags:
                return one
        raise AssertionError(f"no frame of kind {kind}")

    def answer(self, stream: int) -> bytes:
        """The message of an answer that ends as gRPC wants."""
        body = b""
        for one in self.frames():
            if one.stream == stream and one.kind == DATA:
                assert len(one.payload) <= 16384
                body += one.payload
            elif one.stream == stream and one.flags & END_STREAM:
                assert one.kind == HEADERS
                assert one.payload.endswith(b"grpc-status\x010")
                break
        assert body[:1] == b"\0"
        assert int.from_bytes(body[1:5], "big") == len(body) - 5
        return body[5:]

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@pytest.fixture
def server():
    with Server() as one:
        yield one
        # Nobody is left to be told about the end.
        one._connections, left = [], one._connections
        for connection in left:
            connection.socket.close()


@pytest.fixture
def client(server):
    one = RawClient(server.port)
    yield one
    one.close()


def served(server: Server, client: RawClient, stream: int, size: int) -> None:
    """The call on `stream` arrives whole and is answered."""
    assert server.receive(10, no_check).unity_output.rl_output.side_channel == bytes(size)
    server.reply(message(7))
    assert client.answer(stream) == message(7)


def halves(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


BODY = prefixed(message(300))
FIRST, SECOND = halves(BODY)
CONFORMING = {
    "plain": call(1, message(300)),
    "padded data": frame(HEADERS, END_HEADERS, 1, BLOCK)
    + frame(DATA, PADDED, 1, b"\x05" + FIRST + bytes(5))
    + frame(DATA, PADDED, 1, b"\x00" + SECOND)
    + frame(DATA, PADDED | END_STREAM, 1, b"\x03" + bytes(3)),
    "empty data": frame(HEADERS, END_HEADERS, 1, BLOCK)
    + frame(DATA, 0, 1)
    + frame(DATA, 0, 1, BODY)
    + frame(DATA, END_STREAM, 1),
    "one byte at a time": frame(HEADERS, END_HEADERS, 1, BLOCK)
    + b"".join(frame(DATA, 0, 1, bytes([one])) for one in BODY)
    + frame(DATA, END_STREAM, 1),
    "padded headers with priority": frame(
        HEADERS,
        END_HEADERS | PADDED | PRIORITY_FLAG,
        1,
        b"\x04" + struct.pack(">IB", 1 << 31, 200) + BLOCK + bytes(4),
    )
    + frame(DATA, END_STREAM, 1, BODY),
    "continuation": frame(HEADERS, 0, 1, BLOCK[:9])
    + frame(CONTINUATION, 0, 1, BLOCK[9:20])
    + frame(CONTINUATION, END_HEADERS, 1, BLOCK[20:])
    + frame(DATA, END_STREAM, 1, BODY),
    "trailers": frame(HEADERS, END_HEADERS, 1, BLOCK)
    + frame(DATA, 0, 1, BODY)
    + frame(HEADERS, END_STREAM, 1, BLOCK[:5])
    + frame(CONTINUATION, END_HEADERS, 1, BLOCK[5:]),
    "priority frames": frame(PRIORITY, 0, 5, struct.pack(">IB", 0, 9))
    + call(1, message(300))
    + frame(PRIORITY, 0, 1, struct.pack(">IB", 5, 9)),
    "unknown frames and flags": frame(UNKNOWN, 0xFF, 0, b"news")
    + frame(HEADERS, END_HEADERS | 0xD2, 1, BLOCK)
    + frame(UNKNOWN, 0, 1, b"")
    + frame(DATA, END_STREAM | 0xF6, 1, BODY),
    "reserved bit": frame(HEADERS, END_HEADERS, 1 | 1 << 31, BLOCK)
    + frame(DATA, END_STREAM, 1 | 1 << 31, BODY),
    "settings of every kind": settings(
        table=0, push=0, streams=1, window=70000, frame=20000, unknown=9
    )
    + settings()
    + call(1, message(300)),
    "goaway of a client that makes its last call": call(1, message(300))
    + frame(frames.GOAWAY, 0, 0, bytes(8) + b"bye"),
    "another stream cancelled": frame(HEADERS, END_HEADERS, 1, BLOCK)
    + frame(HEADERS, END_HEADERS, 3, BLOCK)
    + frame(frames.RST_STREAM, 0, 3, struct.pack(">I", 8))
    + frame(DATA, END_STREAM, 1, BODY),
    "updates of streams that are not open": update(1, 10) + update(9, 10) + call(1, message(300)),
}


@pytest.mark.parametrize("sent", CONFORMING.values(), ids=CONFORMING.keys())
def test_every_conforming_call_is_served(server, client, sent):
    client.send(sent)
    served(server, client, 1, 300)


@pytest.mark.parametrize("sent", CONFORMING.values(), ids=CONFORMING.keys())
def test_frames_may_be_cut_anywhere_by_the_network(server, sent):
    data = PREFACE + settings() + sent
    client = RawClient(server.port, first=b"")
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for k in range(0, len(data), 41):
        client.send(data[k : k + 41])
        server._wait(1.0)
    served(server, client, 1, 300)
    client.close()


def test_ping_is_answered_with_its_payload_and_settings_are_acknowledged(server, client):
    client.send(frame(frames.PING, 0xFE, 0, b"12345678"))  # all flags but ACK mean nothing
    client.send(frame(frames.PING, frames.ACK, 0, b"not asked"[:8]))
    client.send(call(1, message()))
    assert server.receive(10, no_check)
    assert client.until(SETTINGS, flags=frames.ACK).payload == b""
    assert client.until(frames.PING, flags=frames.ACK).payload == b"12345678"


def test_answer_waits_for_the_windows_of_stream_and_connection(server, client):
    data = message(200_000)
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, data)
        assert len(client.until(DATA, 1).payload) == 10
        client.send(update(1, 90))
        assert len(client.until(DATA, 1).payload) == 90
        client.send(settings(window=0))  # makes the stream's window negative by 10
        client.send(update(1, 15))
        assert len(client.until(DATA, 1).payload) == 5
        client.send(settings(window=2**20))
        got = 105
        while got < 65535:
            got += len(client.until(DATA, 1).payload)
        assert got == 65535  # the connection's window is used up
        assert not replied.done()
        client.send(update(0, 2**20))
        while got < len(data) + 5:
            got += len(client.until(DATA, 1).payload)
        replied.result(30)
    assert client.until(HEADERS, 1, END_STREAM)


def test_window_credit_before_the_answer_counts_and_is_forgotten_after_it(server, client):
    data = message(50_000)
    client.send(settings(window=0), call(1, message()), update(1, 60_000))
    server.receive(10, no_check)
    server.reply(data)
    assert client.answer(1) == data
    client.send(update(1, 1000), call(3, message(1)), update(3, 60_000))
    served(server, client, 3, 1)
    assert server._connections[0]._stream_credit == {}


def test_cancelled_call_takes_no_answer_and_the_next_is_served(server, client):
    cancel = frame(frames.RST_STREAM, 0, 1, struct.pack(">I", 8))
    client.send(call(1, message(5)))
    server.receive(10, no_check)
    client.send(cancel, call(3, message(6)))
    with server._lock:
        while not server._connections[0].messages:
            server._wait(1.0)
    server.reply(message(1))
    served(server, client, 3, 6)
    assert server._connections[0]._unanswered == set()


def test_call_that_is_cancelled_while_it_waits_is_not_delivered(server, client):
    cancel = frame(frames.RST_STREAM, 0, 1, struct.pack(">I", 8))
    client.send(call(1, message(5)) + cancel + call(3, message(6)))
    served(server, client, 3, 6)


def test_call_cancelled_while_its_answer_waits_for_the_window_is_given_up(server, client):
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, message(1000))
        client.until(DATA, 1)
        client.send(frame(frames.RST_STREAM, 0, 1, struct.pack(">I", 8)))
        replied.result(30)
    client.send(settings(window=65535), call(3, message(9)))
    served(server, client, 3, 9)


@pytest.mark.parametrize(
    "body",
    [b"", b"\1" + BODY[1:], BODY[:-1], BODY + b"x", BODY + BODY],
    ids=["nothing", "compressed", "short", "long", "two messages"],
)
def test_call_that_is_not_one_plain_message_is_refused_and_the_next_served(server, client, body):
    client.send(frame(HEADERS, END_HEADERS, 1, BLOCK), frame(DATA, END_STREAM, 1, body))
    client.send(call(3, message(2)))
    assert server.receive(10, no_check).header.status == 200
    refusal = client.until(HEADERS, 1, END_STREAM).payload
    assert b"grpc-status\x0212" in refusal
    assert b"PIPELINE_TRANSPORT=grpc" in refusal
    server.reply(message(1))
    assert client.answer(3) == message(1)


MALFORMED = {
    "DATA on stream 0": (frame(DATA, 0, 0, b"x"), 1),
    "HEADERS on stream 0": (frame(HEADERS, END_HEADERS, 0, BLOCK), 1),
    "HEADERS on an even stream": (frame(HEADERS, END_HEADERS, 2, BLOCK), 1),
    "padding beyond the frame": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, PADDED, 1, b"\x05abc"),
        1,
    ),
    "padding without a length": (
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, PADDED, 1),
        1,
    ),
    "PING of 7 bytes": (frame(frames.PING, 0, 0, bytes(7)), 6),
    "PING on a stream": (frame(frames.PING, 0, 1, bytes(8)), 1),
    "SETTINGS of 5 bytes": (frame(SETTINGS, 0, 0, bytes(5)), 6),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), 1),
    "SETTINGS acknowledged with values": (frame(SETTINGS, frames.ACK, 0, bytes(6)), 6),
    "window too large": (settings(window=2**31), 3),
    "frame too small": (settings(frame=16383), 1),
    "frame too large": (settings(frame=2**24), 1),
    "WINDOW_UPDATE of 3 bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), 6),
    "WINDOW_UPDATE by nothing": (update(0, 0), 1),
    "WINDOW_UPDATE beyond the limit": (update(0, 2**31 - 1), 3),
    "RST_STREAM of 3 bytes": (frame(frames.RST_STREAM, 0, 1, bytes(3)), 6),
    "RST_STREAM on stream 0": (frame(frames.RST_STREAM, 0, 0, bytes(4)), 1),
    "GOAWAY of 7 bytes": (frame(frames.GOAWAY, 0, 0, bytes(7)), 6),
}


@pytest.mark.parametrize(("sent", "code"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frame_ends_its_connection_with_the_reason_and_no_other(
    server, client, sent, code, caplog
):
    other = RawClient(server.port)
    client.send(sent)
    with server._lock:
        while "cut off" not in caplog.text:
            server._wait(1.0)
    assert struct.unpack(">I", client.until(frames.GOAWAY).payload[4:8]) == (code,)
    assert list(client.frames()) == []  # closed
    other.send(call(1, message(4)))
    served(server, other, 1, 4)
    other.close()


def test_client_that_vanishes_within_a_frame_is_reported(server, client, monkeypatch):
    monkeypatch.setattr("pipeline.protocol.server.LOST_S", 0.1)
    client.send(call(1, message()))
    served(server, client, 1, 0)
    client.send(call(3, message(1000))[:500])
    client.close()
    with pytest.raises(UnityCommunicatorStoppedException, match="closed its connection"):
        server.receive(10, no_check)


def test_client_is_greeted_and_its_ping_answered_while_no_one_waits(server):
    client = RawClient(server.port)
    assert client.until(SETTINGS)
    client.send(frame(frames.PING, 0, 0, b"anybody?"), call(1, message(3)))
    assert client.until(frames.PING, flags=frames.ACK).payload == b"anybody?"
    served(server, client, 1, 3)
    client.close()


def test_stranger_without_the_preface_is_cut_off(server):
    client = RawClient(server.port, first=b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(UnityTimeOutException):
        server.receive(0.3, no_check)
    assert all(one.kind in (SETTINGS, WINDOW_UPDATE) for one in client.frames())
    client.close()
