"""The server's reaction to frames of a client, legal and illegal ones (RFC 9113)."""

import contextlib
import select
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hpack import Encoder
from http2_peer import (
    BLOCK,
    FIELDS,
    TRAILERS,
    RawClient,
    block,
    call,
    cancel,
    cut,
    message,
    no_check,
    opening,
    prefixed,
    served,
    settings,
    update,
)

from pipeline.errors import UnityCommunicationException
from pipeline.wire.transport import frames as f
from pipeline.wire.transport import http2
from pipeline.wire.transport import server as server_module
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import frame
from pipeline.wire.transport.http2 import PREFACE
from pipeline.wire.transport.server import MAX_CALLS, IncomingConnection, Server

UNKNOWN = 0xEE
CALL_BYTES = 1 << 22
"""Largest call in bytes until the peer is known to be the environment."""
GREETING = PREFACE + settings()
EMPTY_TABLE = b"\x20"
"""HPACK's command that sets the size of the dynamic table to 0 (RFC 7541, section 6.3)."""


def data(payload: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return frame(f.DATA, flags, stream, payload)


def padded(payload: bytes, n: int, flags: int = 0) -> bytes:
    return data(bytes([n]) + payload + bytes(n), f.PADDED | flags)


def more_headers(payload: bytes, flags: int = 0, stream: int = 1) -> bytes:
    return frame(f.CONTINUATION, flags, stream, payload)


def fields(*extra: tuple[str, str], first: bool = False, **changed: str | None) -> bytes:
    """Return HEADERS of a call with `extra` fields first or last, and changed pseudo-headers."""
    plain = {**dict(FIELDS), **{f":{name}": value for name, value in changed.items()}}
    pairs = [(name, value) for name, value in plain.items() if value is not None]
    return opening(1, block(*extra, *pairs) if first else block(*pairs, *extra))


END, ENDS = f.END_STREAM, f.END_HEADERS
OPEN, HALF = opening(1), frame(f.HEADERS, 0, 1, BLOCK[:9])
REFUSED_CALL = call(1, b"")  # its message is not a greeting
BODY, LARGE = prefixed(message(300)), prefixed(message(1 << 18))
LAST = data(BODY, END)
SHARES = {
    "one frame": [LARGE],
    "two": [LARGE[:100_000], LARGE[100_000:]],
    "a small one first": [LARGE[:3], LARGE[3:]],
    "the prefix first": [LARGE[:5], LARGE[5:]],
    "a small one last": [LARGE[:-7], LARGE[-7:]],
    "an empty one between": [LARGE[:90_000], b"", LARGE[90_000:]],
}
NO_MESSAGES = {
    "nothing": b"",
    "a compressed message": b"\1" + BODY[1:],
    "a short message": BODY[:-1],
    "a long message": BODY + b"x",
    "two messages": BODY + BODY,
    "a large one, short": LARGE[:-1],
    "a large one, long": LARGE + b"x",
    "a large one, compressed": b"\1" + LARGE[1:],
    "half of a large one": LARGE[:100_000],
    "two large messages": LARGE + LARGE,
}
MOST = CALL_BYTES - len(prefixed(message(1 << 21))) + (1 << 21)

ROWS = {
    ("served", 300): {
        "plain": call(1, message(300)),
        "padded data": OPEN + padded(BODY[:150], 5) + padded(BODY[150:], 0) + padded(b"", 3, END),
        "empty data": OPEN + data() + data(BODY) + data(b"", END),
        "one byte at a time":
            OPEN + b"".join(data(bytes([byte])) for byte in BODY) + data(b"", END),
        "padded headers with priority":
            opening(1, b"\x04" + struct.pack(">IB", 1 << 31, 200) + BLOCK + bytes(4),
                    f.PADDED | f.WITH_PRIORITY) + LAST,
        "continuation": HALF + more_headers(BLOCK[9:20]) + more_headers(BLOCK[20:], ENDS) + LAST,
        "16384 bytes of headers":
            frame(f.HEADERS, 0, 1, EMPTY_TABLE * 5000)
            + more_headers(EMPTY_TABLE * (11384 - len(BLOCK))) + more_headers(BLOCK, ENDS) + LAST,
        "trailers":
            OPEN + data(BODY) + frame(f.HEADERS, END, 1, TRAILERS[:5])
            + more_headers(TRAILERS[5:], ENDS),
        "padded trailers":
            OPEN + data(BODY) + opening(1, b"\x02" + TRAILERS + bytes(2), END | f.PADDED),
        "priority frames":
            frame(f.PRIORITY, 0, 5, struct.pack(">IB", 0, 9)) + call(1, message(300))
            + frame(f.PRIORITY, 0, 1, struct.pack(">IB", 5, 9)),
        "unknown frames and flags":
            frame(UNKNOWN, 0xFF, 0, b"news") + opening(1, BLOCK, 0xD2) + frame(UNKNOWN, 0, 1)
            + data(BODY, END | 0xF6),
        "reserved bit": opening(1 | 1 << 31) + data(BODY, END, 1 | 1 << 31),
        "settings of every kind":
            settings(table=0, push=0, streams=1, window=70000, frame=20000, unknown=9) + settings()
            + call(1, message(300)),
        "goaway of a client that makes its last call":
            call(1, message(300)) + frame(f.GOAWAY, 0, 0, bytes(8) + b"bye"),
        "another stream cancelled": OPEN + opening(3) + cancel(3) + LAST,
        "settings acknowledged": frame(f.SETTINGS, f.ACK, 0) + call(1, message(300)),
    },
    ("served", 1 << 18): {
        f"a large call in {name}, {word}": OPEN
        + b"".join(padded(share, 2) if word else data(share) for share in shares)
        + data(b"", END)
        for name, shares in SHARES.items()
        for word in ("", "padded")
    },
    ("served", MOST): {"a first call of 4 megabytes": call(1, message(MOST))},
    ("refused", 12): {
        name: OPEN + data(body[:90_000]) + data(body[90_000:], END)
        for name, body in NO_MESSAGES.items()
    },
    # Frames that break the RFC without harm; docs/reference/protocol.md gives the reasons.
    ("passed over", 0): {
        "PRIORITY that depends on itself": frame(f.PRIORITY, 0, 1, struct.pack(">IB", 1, 9)),
        "HEADERS that depend on themselves":
            opening(1, struct.pack(">IB", 1, 9) + BLOCK, END | f.WITH_PRIORITY),
        "RST_STREAM twice": OPEN + cancel(1) + cancel(1),
        "WINDOW_UPDATE after RST_STREAM": OPEN + cancel(1) + update(1, 10),
        "SETTINGS acknowledged twice": 2 * frame(f.SETTINGS, f.ACK, 0),
        "PING acknowledged that was not sent": frame(f.PING, f.ACK, 0, bytes(8)),
        "a setting of another protocol": frame(f.SETTINGS, 0, 0, struct.pack(">HI", 8, 2)),
        "a length of the content that is not its": fields(("content-length", "1")) + cancel(1),
        "a host that is not the authority": fields(("host", "elsewhere")) + cancel(1),
        "CONNECT with a path": fields(method="CONNECT") + data(b"", END),
        "a call that is cancelled while it waits": call(1, message(6)) + cancel(1),
        "a prefix of gigabytes": OPEN + data(b"\0\x7f\xff\xff\xff" + bytes(100_000)),
    },
    ("cut", f.PROTOCOL_ERROR): {
        "DATA on stream 0": data(b"x", 0, 0),
        "HEADERS on stream 0": opening(0),
        "PRIORITY on stream 0": frame(f.PRIORITY, 0, 0, bytes(5)),
        "RST_STREAM on stream 0": cancel(0),
        "CONTINUATION on stream 0": HALF + more_headers(b"", ENDS, 0),
        "SETTINGS on a stream": frame(f.SETTINGS, 0, 1),
        "PING on a stream": frame(f.PING, 0, 1, bytes(8)),
        "GOAWAY on a stream": frame(f.GOAWAY, 0, 1, bytes(8)),
        "PUSH_PROMISE": frame(f.PUSH_PROMISE, ENDS, 1, bytes(4) + BLOCK),
        "DATA with padding beyond the frame": OPEN + data(b"\3ab", f.PADDED),
        "DATA with padding without a length": OPEN + data(b"", f.PADDED),
        "HEADERS with padding beyond the frame": opening(1, b"\xff" + BLOCK, f.PADDED),
        "push of 2": settings(push=2),
        "frame too small": settings(frame=16383),
        "frame too large": settings(frame=2**24),
        "WINDOW_UPDATE of the connection by 0": update(0, 0),
        "WINDOW_UPDATE of a stream by 0": OPEN + update(1, 0),
        "DATA before HEADERS": LAST,
        "RST_STREAM before HEADERS": cancel(1),
        "WINDOW_UPDATE before HEADERS": update(1, 10),
        "WINDOW_UPDATE of a stream of ours": call(3, b"") + update(2, 10),
        "HEADERS on an even stream": opening(2),
        "HEADERS again without the end": OPEN + opening(1, TRAILERS),
        "CONTINUATION without HEADERS": OPEN + more_headers(b"", ENDS),
        "CONTINUATION on another stream": HALF + more_headers(BLOCK[9:], ENDS, 3),
        "DATA within headers": HALF + data(b"x"),
        "PING within headers": HALF + frame(f.PING, 0, 0, bytes(8)),
        "a frame of an unknown type within headers": HALF + frame(UNKNOWN, 0, 1),
        "headers without path": fields(path=None),
        "headers without method": fields(method=None),
        "headers without scheme": fields(scheme=None),
        "a pseudo-header after others": fields((":authority", "again")),
        "a pseudo-header twice": fields((":path", METHOD), first=True),
        "a pseudo-header of answers": fields((":status", "200"), first=True),
        "a header with capitals": fields(("Checksum", "1")),
        "a header without name": fields(("", "1")),
        "a header with a line break": fields(("checksum", "1\r\nx: 2")),
        "a header with blanks around": fields(("checksum", " 1")),
        "a header of HTTP/1's connections": fields(("connection", "close")),
        "te that is not trailers": fields(("te", "gzip")),
        "trailers with a pseudo-header": OPEN + opening(1, block((":path", "/")), END),
    },
    ("cut", f.FRAME_SIZE_ERROR): {
        "PRIORITY of 4 bytes": frame(f.PRIORITY, 0, 1, bytes(4)),
        "RST_STREAM of 3 bytes": OPEN + frame(f.RST_STREAM, 0, 1, bytes(3)),
        "SETTINGS of 5 bytes": frame(f.SETTINGS, 0, 0, bytes(5)),
        "SETTINGS acknowledged with values": frame(f.SETTINGS, f.ACK, 0, bytes(6)),
        "PING of 7 bytes": frame(f.PING, 0, 0, bytes(7)),
        "GOAWAY of 7 bytes": frame(f.GOAWAY, 0, 0, bytes(7)),
        "WINDOW_UPDATE of 3 bytes": frame(f.WINDOW_UPDATE, 0, 0, bytes(3)),
        "HEADERS that end in their priority": opening(1, bytes(4), f.WITH_PRIORITY),
    },
    ("cut", f.FLOW_CONTROL_ERROR): {
        "window too large": settings(window=2**31),
        "window too large for an open stream":
            settings(window=0) + OPEN + update(1, 2**31 - 1) + settings(window=1),
        "WINDOW_UPDATE of the connection beyond the limit": update(0, 2**31 - 1),
        "WINDOW_UPDATE of a stream beyond the limit": OPEN + update(1, 2**31 - 1),
        "WINDOW_UPDATE twice beyond the limit": OPEN + 2 * update(1, 2**30),
    },
    ("cut", f.STREAM_CLOSED): {
        "HEADERS on a stream that was passed over": opening(3) + opening(1),
        "HEADERS after the end": REFUSED_CALL + opening(1, TRAILERS, END),
        "DATA after the end": REFUSED_CALL + data(b"x"),
        "DATA after RST_STREAM": OPEN + cancel(1) + data(b"x"),
        "HEADERS after RST_STREAM": OPEN + cancel(1) + opening(1, BLOCK, END),
    },
    ("cut", f.COMPRESSION_ERROR): {
        "headers that end within a field": opening(1, BLOCK[:-3]),
        "headers with an entry that is not in the table": opening(1, b"\xfe"),
        "headers with wrong Huffman codes": opening(1, b"\x44\x84\xff\xff\xff\xff"),
        "a header table larger than allowed": opening(1, b"\x3f\xe2\x1f" + BLOCK),
        "a number without end in headers": opening(1, b"\xff" + b"\x80" * 12 + b"\1"),
        "headers that unpack to more than 16 kB":
            opening(1, block(("x", "y" * 3000)) + b"\xbe" * 9),
    },
    ("cut", f.ENHANCE_YOUR_CALM): {
        "16 kB of headers in one frame": opening(1, bytes(16385)),
        "16 kB of headers in several frames": HALF + 2 * more_headers(bytes(9000)),
        "SETTINGS of 16 kB": frame(f.SETTINGS, 0, 0, bytes(6 * 2731)),
        "an unknown frame of 16 kB": frame(UNKNOWN, 0, 0, bytes(16385)),
        "a large frame announced": OPEN + f.head(f.DATA, 0, 1, CALL_BYTES + 1),
        "a large call in one frame": OPEN + data(bytes(CALL_BYTES + 1)),
        "a large call in many frames": OPEN + (CALL_BYTES // 16000 + 1) * data(bytes(16000)),
        "a large call of padding": OPEN + (CALL_BYTES // 256 + 1) * padded(b"", 255),
        "a large call of another method":
            fields(path="/other") + (CALL_BYTES // 16000 + 1) * data(bytes(16000)),
        "thousands of calls without end":
            b"".join(opening(2 * number + 1) for number in range(MAX_CALLS + 1001)),
    },
    # Bytes in place of the client's preface and SETTINGS.
    ("cut at once", f.PROTOCOL_ERROR): {
        "PING before SETTINGS": PREFACE + frame(f.PING, 0, 0, bytes(8)),
        "HEADERS before SETTINGS": PREFACE + OPEN,
        "SETTINGS that acknowledge ours first": PREFACE + frame(f.SETTINGS, f.ACK, 0),
    },
    ("cut at once", None): {
        "another version's preface": PREFACE.replace(b"2.0", b"3.0"),
        "another first byte": b"\0",
        "another last byte": PREFACE[:-1] + b"\0",
        "a request of HTTP/1": b"GET / HTTP/1.1\r\n\r\n",
        "a greeting of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    },
}  # fmt: skip
TABLE = [
    pytest.param(sent, what, value, id=f"{name}: {what}")
    for (what, value), rows in ROWS.items()
    for name, sent in rows.items()
]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as new_server:
        yield new_server


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    with contextlib.closing(RawClient(server.port)) as raw_client:
        yield raw_client


@pytest.mark.parametrize(("sent", "what", "value"), TABLE)
def test_frames_are_served_ignored_or_refused_without_affecting_other_connections(
    server, caplog, sent, what, value
):
    client, other = RawClient(server.port, first=b""), RawClient(server.port)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(client), contextlib.closing(other):
        sent = sent if what == "cut at once" else GREETING + sent
        if what == "served":
            pool.submit(client.send, sent)
            served(server, client, 1, value)
        elif what in ("refused", "passed over"):
            pool.submit(client.send, sent, call(3, message(5)))
            received = server.receive(20, no_check)
            assert received.unity_output.rl_output.side_channel == bytes(5)
            if what == "refused":
                status, text = client.failure(1)
                assert status == value
                assert "PIPELINE_TRANSPORT=grpc" in text
            server.reply(message(7))
            assert client.answer(3) == message(7)
        else:
            conversation = pool.submit(served, server, other, 1, 4)
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the server closes the connection early
                client.send(sent)
            reasons = [reply.payload[4:] for reply in client.frames() if reply.kind == f.GOAWAY]
            other.send(call(1, message(4)))
            conversation.result()
            expected = [] if value is None else [value]
            assert [int.from_bytes(reason[:4], "big") for reason in reasons] == expected
            words = reasons[0][4:].decode() if reasons else "something else than HTTP/2"
            assert f"is closed because the peer sent {words}" in caplog.text


@pytest.mark.parametrize("sent", ROWS["served", 300].values(), ids=ROWS["served", 300])
def test_frames_may_be_split_anywhere_by_the_network(server, sent):
    with contextlib.closing(RawClient(server.port, first=b"")) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pieces = [*(GREETING[k : k + 1] for k in range(40)), GREETING[40:]]
        pieces += [sent[k : k + 41] for k in range(0, len(sent), 41)]
        for piece in filter(None, pieces):
            client.send(piece)
            server._wait(1.0)
        served(server, client, 1, 300)


def test_ping_is_answered_with_the_same_payload_and_settings_are_acknowledged(server, client):
    client.send(frame(f.PING, 0xFE, 0, b"12345678"))  # all flags but ACK are ignored
    client.send(frame(f.PING, f.ACK, 0, b"not asked"[:8]))
    client.send(call(1, message()))
    assert server.receive(10, no_check)
    assert client.until(f.SETTINGS, flags=f.ACK).payload == b""
    assert client.until(f.PING, flags=f.ACK).payload == b"12345678"


def test_answer_is_sent_only_as_far_as_the_flow_control_windows_of_stream_and_connection_allow(
    server, client
):
    answer = message(200_000)
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, answer)
        assert len(client.until(f.DATA, 1).payload) == 10
        client.send(update(1, 90))
        assert len(client.until(f.DATA, 1).payload) == 90
        client.send(settings(window=0))  # makes the stream's window negative by 10
        client.send(update(1, 15))
        assert len(client.until(f.DATA, 1).payload) == 5
        client.send(settings(window=2**20))
        n_received = 105
        while n_received < 65535:
            n_received += len(client.until(f.DATA, 1).payload)
        assert n_received == 65535  # the initial window of the connection
        assert not replied.done()
        client.send(update(0, 2**20))
        while n_received < len(answer) + 5:
            n_received += len(client.until(f.DATA, 1).payload)
        replied.result(30)
    assert client.until(f.HEADERS, 1, END)


def test_window_update_counts_before_the_answer_is_sent_and_is_ignored_afterwards(server, client):
    answer = message(50_000)
    client.send(settings(window=0), call(1, message()), update(1, 60_000))
    server.receive(10, no_check)
    server.reply(answer)
    assert client.answer(1) == answer
    client.send(update(1, 1000), call(3, message(1)), update(3, 60_000))
    served(server, client, 3, 1)
    assert server._owner._streams == {}


def test_connection_window_is_increased_by_the_bytes_received_since_the_last_increase(
    server, client, monkeypatch
):
    monkeypatch.setattr(http2, "_RENEW_BYTES", 10_000)
    credits = []
    for stream in (1, 3, 5, 7):
        client.send(call(stream, message(6000)))
        server.receive(10, no_check)
        server.reply(message())
        for answer in client.frames():
            if answer.kind == f.WINDOW_UPDATE and stream > 1:  # 1: the server's greeting
                credits.append(f.increment(answer.payload, 0))
            if answer.flags & END and answer.kind == f.HEADERS:
                break
    assert credits == [2 * len(prefixed(message(6000)))] * 2


def test_cancelled_call_gets_no_answer_and_the_next_call_is_served(server, client):
    client.send(call(1, message(5)))
    server.receive(10, no_check)
    client.send(cancel(1), call(3, message(6)))
    with server._lock:
        while not server._owner.messages:
            server._wait(1.0)
    server.reply(message(1))
    served(server, client, 3, 6)
    assert server._owner._streams == {}


def test_answer_that_waits_for_the_window_is_dropped_if_the_call_is_cancelled(server, client):
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, message(1000))
        client.until(f.DATA, 1)
        client.send(cancel(1))
        replied.result(30)
    client.send(settings(window=65535), call(3, message(9)))
    served(server, client, 3, 9)


class Socket:
    """A socket that, if `most` is set, sends at most `most` bytes, and none at every other call."""

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

    def send(self, content):
        if self.most is None:
            return self._real.send(content)
        self._n_sent += 1
        if self._n_sent % 2:
            raise BlockingIOError
        return self._real.send(bytes(content[: self.most]))


@pytest.fixture
def connection():
    """A connection on which a client has sent its preface, and the client's socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    with ours, theirs:
        pair = IncomingConnection(Socket(ours), METHOD), theirs
        read(pair, GREETING)
        yield pair


def read(connection: tuple[IncomingConnection, socket.socket], *parts: bytes) -> list[int]:
    """Send frames of the client; return the streams of the calls that wait for an answer."""
    ours, theirs = connection
    theirs.sendall(b"".join(parts))
    select.select([ours.socket], [], [], 10)
    ours.read()
    assert ours.failure == ""
    return [stream for stream, _ in ours.messages]


@pytest.mark.parametrize("of_trailers", [False, True])
def test_headers_of_a_refused_call_update_the_dynamic_table_of_hpack(
    connection, of_trailers, monkeypatch
):
    monkeypatch.setattr(server_module, "MAX_CALLS", 1)
    encoder = Encoder()
    read(connection, opening(1, encoder.encode(FIELDS)))
    if of_trailers:
        refused = opening(3, encoder.encode(FIELDS))
        refused += opening(3, encoder.encode([("x", "y")]), END)
    else:
        refused = opening(3, encoder.encode([*FIELDS, ("x", "y")]), END)
    assert read(connection, refused, cancel(1)) == []
    assert read(connection, call(5, message(5), encoder.encode(FIELDS))) == [5]


def test_cancelled_call_is_forgotten_and_other_calls_still_wait(connection):
    calls = [call(stream, message(stream)) for stream in (1, 3, 5)]
    assert read(connection, *calls, cancel(3)) == [1, 5]


def test_refused_calls_count_against_the_limit_only_until_they_end(connection, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CALLS", 1)
    monkeypatch.setattr(server_module, "_MAX_REFUSED", 1)
    over = cancel(3), data(b"x", END, 5), opening(7, TRAILERS, END)
    for stream, ending in zip((3, 5, 7), over, strict=True):
        read(connection, OPEN if stream == 3 else b"", opening(stream), ending)
    assert read(connection, opening(9)) == []


def test_each_of_two_consecutive_answers_uses_the_stream_and_window_of_its_own_call(connection):
    ours, theirs = connection
    read(connection, settings(window=4), call(1, message(1)), call(3, message(3)), update(3, 1000))
    with pytest.raises(UnityCommunicationException, match="only 4 of a message's 8 bytes"):
        ours.respond(1, b"one", 0.0)
    ours.respond(3, b"three", 1.0)
    sent = [(x.stream, x.payload) for x in cut(theirs.recv(1 << 16)) if x.kind == f.DATA]
    assert sent == [(1, prefixed(b"one")[:4]), (3, prefixed(b"three"))]


def test_one_read_takes_at_most_16_kib_from_unknown_clients_and_256_kib_from_environments(
    connection,
):
    ours, _ = connection
    ours.trust()
    assert ours.read() is True  # no bytes have arrived
    assert ours.socket.looks == [1 << 14, 1 << 18]


@pytest.mark.parametrize("most", [None, 1000, 20_001])
def test_answer_arrives_complete_through_a_socket_that_accepts_few_bytes_at_a_time(
    connection, most
):
    ours, theirs = connection
    assert read(connection, call(1, message())) == [1]
    answer = bytes(range(250)) * 240  # longer than a frame, shorter than the window
    ours.socket.most = most
    ours.respond(1, answer, 20.0)
    received, content = [], b""
    while not received or (received[-1].kind, received[-1].flags & END) != (f.HEADERS, END):
        content += theirs.recv(1 << 20)
        received = list(cut(content))
    assert {part.stream for part in received} == {0, 1}
    assert b"".join(x.payload for x in received if x.kind == f.DATA) == prefixed(answer)


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        (settings(), "took only 65535 of a message's 16777221 bytes"),
        (settings(window=1 << 25) + update(0, 1 << 25), "does not read our answer"),
    ],
)
def test_answer_to_a_peer_that_stops_reading_fails_after_the_time_limit(connection, windows, told):
    assert read(connection, windows, call(1, message())) == [1]
    with pytest.raises(UnityCommunicationException, match=told):
        connection[0].respond(1, bytes(1 << 24), 0.05)
