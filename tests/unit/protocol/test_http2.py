"""Our server against conforming and malformed HTTP/2, frame by frame (RFC 9113)."""

from __future__ import annotations

import select
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hpack import Encoder
from http2_peer import (
    BLOCK,
    FIELDS,
    TRAILERS,
    RawClient,
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
from pipeline.protocol import frames as f
from pipeline.protocol import http2, incoming
from pipeline.protocol.calls import METHOD
from pipeline.protocol.frames import frame
from pipeline.protocol.http2 import PREFACE
from pipeline.protocol.incoming import IncomingConnection
from pipeline.protocol.server import Server

UNKNOWN = 0xEE
EMPTY_TABLE = 0x20
"""A change of the table of fields, to no size (RFC 7541, 6.3)."""


@pytest.fixture
def server():
    with Server() as new_server:
        yield new_server


@pytest.fixture
def client(server):
    raw_client = RawClient(server.port)
    yield raw_client
    raw_client.close()


def halves(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


BODY = prefixed(message(300))
FIRST, SECOND = halves(BODY)
CONFORMING = {
    "plain": call(1, message(300)),
    "padded data": opening(1)
    + frame(f.DATA, f.PADDED, 1, b"\x05" + FIRST + bytes(5))
    + frame(f.DATA, f.PADDED, 1, b"\x00" + SECOND)
    + frame(f.DATA, f.PADDED | f.END_STREAM, 1, b"\x03" + bytes(3)),
    "empty data": opening(1)
    + frame(f.DATA, 0, 1)
    + frame(f.DATA, 0, 1, BODY)
    + frame(f.DATA, f.END_STREAM, 1),
    "one byte at a time": opening(1)
    + b"".join(frame(f.DATA, 0, 1, bytes([byte])) for byte in BODY)
    + frame(f.DATA, f.END_STREAM, 1),
    "padded headers with priority": frame(
        f.HEADERS,
        f.END_HEADERS | f.PADDED | f.WITH_PRIORITY,
        1,
        b"\x04" + struct.pack(">IB", 1 << 31, 200) + BLOCK + bytes(4),
    )
    + frame(f.DATA, f.END_STREAM, 1, BODY),
    "continuation": frame(f.HEADERS, 0, 1, BLOCK[:9])
    + frame(f.CONTINUATION, 0, 1, BLOCK[9:20])
    + frame(f.CONTINUATION, f.END_HEADERS, 1, BLOCK[20:])
    + frame(f.DATA, f.END_STREAM, 1, BODY),
    "16384 bytes of headers": frame(f.HEADERS, 0, 1, bytes([EMPTY_TABLE]) * 5000)
    + frame(f.CONTINUATION, 0, 1, bytes([EMPTY_TABLE]) * (11384 - len(BLOCK)))
    + frame(f.CONTINUATION, f.END_HEADERS, 1, BLOCK)
    + frame(f.DATA, f.END_STREAM, 1, BODY),
    "trailers": opening(1)
    + frame(f.DATA, 0, 1, BODY)
    + frame(f.HEADERS, f.END_STREAM, 1, TRAILERS[:5])
    + frame(f.CONTINUATION, f.END_HEADERS, 1, TRAILERS[5:]),
    "padded trailers": opening(1)
    + frame(f.DATA, 0, 1, BODY)
    + frame(f.HEADERS, f.END_STREAM | f.END_HEADERS | f.PADDED, 1, b"\x02" + TRAILERS + bytes(2)),
    "priority frames": frame(f.PRIORITY, 0, 5, struct.pack(">IB", 0, 9))
    + call(1, message(300))
    + frame(f.PRIORITY, 0, 1, struct.pack(">IB", 5, 9)),
    "unknown frames and flags": frame(UNKNOWN, 0xFF, 0, b"news")
    + frame(f.HEADERS, f.END_HEADERS | 0xD2, 1, BLOCK)
    + frame(UNKNOWN, 0, 1, b"")
    + frame(f.DATA, f.END_STREAM | 0xF6, 1, BODY),
    "reserved bit": frame(f.HEADERS, f.END_HEADERS, 1 | 1 << 31, BLOCK)
    + frame(f.DATA, f.END_STREAM, 1 | 1 << 31, BODY),
    "settings of every kind": settings(
        table=0, push=0, streams=1, window=70000, frame=20000, unknown=9
    )
    + settings()
    + call(1, message(300)),
    "goaway of a client that makes its last call": call(1, message(300))
    + frame(f.GOAWAY, 0, 0, bytes(8) + b"bye"),
    "another stream cancelled": opening(1)
    + opening(3)
    + cancel(3)
    + frame(f.DATA, f.END_STREAM, 1, BODY),
    "settings acknowledged": frame(f.SETTINGS, f.ACK, 0) + call(1, message(300)),
}


conforming = pytest.mark.parametrize("sent", CONFORMING.values(), ids=CONFORMING.keys())


@conforming
def test_every_conforming_call_is_served(server, client, sent):
    client.send(sent)
    served(server, client, 1, 300)


@conforming
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
    client.send(frame(f.PING, 0xFE, 0, b"12345678"))  # all flags but ACK mean nothing
    client.send(frame(f.PING, f.ACK, 0, b"not asked"[:8]))
    client.send(call(1, message()))
    assert server.receive(10, no_check)
    assert client.until(f.SETTINGS, flags=f.ACK).payload == b""
    assert client.until(f.PING, flags=f.ACK).payload == b"12345678"


def test_answer_waits_for_the_windows_of_stream_and_connection(server, client):
    data = message(200_000)
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, data)
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
        assert n_received == 65535  # the connection's window is used up
        assert not replied.done()
        client.send(update(0, 2**20))
        while n_received < len(data) + 5:
            n_received += len(client.until(f.DATA, 1).payload)
        replied.result(30)
    assert client.until(f.HEADERS, 1, f.END_STREAM)


def test_window_credit_before_the_answer_counts_and_is_forgotten_after_it(server, client):
    data = message(50_000)
    client.send(settings(window=0), call(1, message()), update(1, 60_000))
    server.receive(10, no_check)
    server.reply(data)
    assert client.answer(1) == data
    client.send(update(1, 1000), call(3, message(1)), update(3, 60_000))
    served(server, client, 3, 1)
    assert server._owner._streams == {}


def test_the_window_of_the_connection_is_renewed_by_what_came_since_the_last_time(
    server, client, monkeypatch
):
    monkeypatch.setattr(http2, "_RENEW_BYTES", 10_000)
    credits = []
    for stream in (1, 3, 5, 7):
        client.send(call(stream, message(6000)))
        server.receive(10, no_check)
        server.reply(message())
        for answer in client.frames():
            if answer.kind == f.WINDOW_UPDATE and stream > 1:  # before that it is the greeting's
                credits.append(f.increment(answer.payload, 0))
            if answer.flags & f.END_STREAM and answer.kind == f.HEADERS:
                break
    assert credits == [2 * len(prefixed(message(6000)))] * 2


def test_cancelled_call_takes_no_answer_and_the_next_is_served(server, client):
    client.send(call(1, message(5)))
    server.receive(10, no_check)
    client.send(cancel(1), call(3, message(6)))
    with server._lock:
        while not server._owner.messages:
            server._wait(1.0)
    server.reply(message(1))
    served(server, client, 3, 6)
    assert server._owner._streams == {}


def test_call_that_is_cancelled_while_it_waits_is_not_delivered(server, client):
    client.send(call(1, message(5)) + cancel(1) + call(3, message(6)))
    served(server, client, 3, 6)


def test_call_cancelled_while_its_answer_waits_for_the_window_is_given_up(server, client):
    client.send(settings(window=10), call(1, message()))
    server.receive(10, no_check)
    with ThreadPoolExecutor(1) as pool:
        replied = pool.submit(server.reply, message(1000))
        client.until(f.DATA, 1)
        client.send(cancel(1))
        replied.result(30)
    client.send(settings(window=65535), call(3, message(9)))
    served(server, client, 3, 9)


@pytest.mark.parametrize(
    "body",
    [b"", b"\1" + BODY[1:], BODY[:-1], BODY + b"x", BODY + BODY],
    ids=["nothing", "compressed", "short", "long", "two messages"],
)
def test_call_that_is_not_one_plain_message_is_refused_and_the_next_served(server, client, body):
    client.send(opening(1), frame(f.DATA, f.END_STREAM, 1, body))
    client.send(call(3, message(2)))
    assert server.receive(10, no_check).header.status == 200
    status, text = client.failure(1)
    assert status == 12
    assert "PIPELINE_TRANSPORT=grpc" in text
    server.reply(message(1))
    assert client.answer(3) == message(1)


LARGE = prefixed(message(1 << 18))
SHARES = {
    "one frame": [LARGE],
    "two": [LARGE[:100_000], LARGE[100_000:]],
    "a small one first": [LARGE[:3], LARGE[3:]],
    "the prefix first": [LARGE[:5], LARGE[5:]],
    "a small one last": [LARGE[:-7], LARGE[-7:]],
    "an empty one between": [LARGE[:90_000], b"", LARGE[90_000:]],
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
@pytest.mark.parametrize("is_padded", [False, True], ids=["", "padded"])
def test_a_large_call_may_come_in_any_frames(server, client, shares, is_padded):
    flags, before, after = (f.PADDED, b"\x02", bytes(2)) if is_padded else (0, b"", b"")
    data = [frame(f.DATA, flags, 1, before + share + after) for share in shares]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(client.send, opening(1), *data, frame(f.DATA, f.END_STREAM, 1))
        served(server, client, 1, 1 << 18)


@pytest.mark.parametrize(
    "body",
    [LARGE[:-1], LARGE + b"x", b"\1" + LARGE[1:], LARGE[:100_000], LARGE + LARGE],
    ids=["short", "long", "compressed", "half", "two messages"],
)
def test_a_large_call_that_is_not_one_plain_message_is_refused(server, client, body):
    with ThreadPoolExecutor(1) as pool:
        parts = [frame(f.DATA, 0, 1, share) for share in (body[:90_000], body[90_000:])]
        pool.submit(client.send, opening(1), *parts, frame(f.DATA, f.END_STREAM, 1))
        pool.submit(client.send, call(3, message(2)))
        assert server.receive(10, no_check).header.status == 200
        assert client.failure(1)[0] == 12


def test_a_prefix_of_gigabytes_takes_no_memory_before_they_come(server, client):
    client.send(opening(1), frame(f.DATA, 0, 1, b"\0\x7f\xff\xff\xff" + bytes(100_000)))
    client.send(call(3, message(2)))
    assert server.receive(10, no_check).header.status == 200


def test_first_call_may_have_4_megabytes(server, client):
    size = (1 << 22) - len(prefixed(message(1 << 21))) + (1 << 21)
    sent = call(1, message(size))
    assert len(prefixed(message(size))) == 1 << 22
    with ThreadPoolExecutor(1) as pool:
        pool.submit(client.send, sent)
        served(server, client, 1, size)


@pytest.fixture
def connection():
    """A connection on which a client has greeted, and the client's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    pair = IncomingConnection(ours, METHOD), theirs
    read(pair, PREFACE + settings())
    yield pair
    ours.close()
    theirs.close()


def read(connection: tuple[IncomingConnection, socket.socket], *parts: bytes) -> list[int]:
    """Return the streams of the calls that wait after some frames have come."""
    ours, theirs = connection
    theirs.sendall(b"".join(parts))
    select.select([ours.socket], [], [], 10)
    ours.read()
    assert ours.failure == ""
    return [stream for stream, _ in ours.messages]


@pytest.mark.parametrize("of_trailers", [False, True])
def test_the_table_of_fields_follows_the_headers_of_a_call_that_is_refused(
    connection, of_trailers, monkeypatch
):
    monkeypatch.setattr(incoming, "MAX_CALLS", 1)
    encoder = Encoder()
    read(connection, opening(1, encoder.encode(FIELDS)))
    if of_trailers:
        refused = opening(3, encoder.encode(FIELDS))
        refused += opening(3, encoder.encode([("x", "y")]), f.END_STREAM)
    else:
        refused = opening(3, encoder.encode([*FIELDS, ("x", "y")]), f.END_STREAM)
    assert read(connection, refused, cancel(1)) == []
    assert read(connection, call(5, message(5), encoder.encode(FIELDS))) == [5]


def test_a_cancelled_call_takes_no_other_with_it_that_waits(connection):
    calls = [call(stream, message(stream)) for stream in (1, 3, 5)]
    assert read(connection, *calls, cancel(3)) == [1, 5]


def test_refused_calls_count_only_until_they_are_over(connection, monkeypatch):
    monkeypatch.setattr(incoming, "MAX_CALLS", 1)
    monkeypatch.setattr(incoming, "_MAX_REFUSED", 1)
    over = cancel(3), frame(f.DATA, f.END_STREAM, 5, b"x"), opening(7, TRAILERS, f.END_STREAM)
    for stream, ending in zip((3, 5, 7), over, strict=True):
        read(connection, opening(1) if stream == 3 else b"", opening(stream), ending)
    assert read(connection, opening(9)) == []


def test_answers_in_turn_are_sent_on_the_streams_and_windows_of_their_own_calls(connection):
    ours, theirs = connection
    read(connection, settings(window=4), call(1, message(1)), call(3, message(3)), update(3, 1000))
    with pytest.raises(UnityCommunicationException, match="only 4 of a message's 8 bytes"):
        ours.respond(1, b"one", 0.0)
    ours.respond(3, b"three", 1.0)
    sent = [(x.stream, x.payload) for x in cut(theirs.recv(1 << 16)) if x.kind == f.DATA]
    assert sent == [(1, prefixed(b"one")[:4]), (3, prefixed(b"three"))]
