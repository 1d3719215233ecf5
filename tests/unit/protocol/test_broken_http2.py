"""Broken HTTP/2, kind by kind: what ends its connection and what is tolerated (RFC 9113)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from http2_peer import (
    BLOCK,
    FIELDS,
    TRAILERS,
    RawClient,
    block,
    call,
    cancel,
    message,
    opening,
    prefixed,
    served,
    settings,
    update,
)

from pipeline.protocol import frames as f
from pipeline.protocol.calls import METHOD
from pipeline.protocol.frames import frame
from pipeline.protocol.http2 import PREFACE
from pipeline.protocol.incoming import MAX_CALLS
from pipeline.protocol.server import Server

PROTOCOL, FLOW_CONTROL, CLOSED, SIZE, COMPRESSION, CALM = 1, 3, 5, 6, 9, 11
UNKNOWN = 0xEE
CALL_BYTES = 1 << 22
"""The most that a call may have before its peer is known to be the environment."""
OPEN = opening(1)
PLAIN = dict(FIELDS)
HALF = frame(f.HEADERS, 0, 1, BLOCK[:9])
DONE = call(1, b"")  # no greeting, and refused as such


def without(name: str) -> bytes:
    return opening(1, block(*(pair for pair in FIELDS if pair[0] != name)))


def extra(name: str, value: str) -> bytes:
    return opening(1, block(*FIELDS, (name, value)))


# What comes after the client's preface and SETTINGS, and the code in the GOAWAY that answers it.
REFUSED = {
    # frames on the wrong stream
    "DATA on stream 0": (frame(f.DATA, 0, 0, b"x"), PROTOCOL),
    "HEADERS on stream 0": (frame(f.HEADERS, f.END_HEADERS, 0, BLOCK), PROTOCOL),
    "PRIORITY on stream 0": (frame(f.PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    "RST_STREAM on stream 0": (frame(f.RST_STREAM, 0, 0, bytes(4)), PROTOCOL),
    "CONTINUATION on stream 0": (HALF + frame(f.CONTINUATION, f.END_HEADERS, 0), PROTOCOL),
    "SETTINGS on a stream": (frame(f.SETTINGS, 0, 1), PROTOCOL),
    "PING on a stream": (frame(f.PING, 0, 1, bytes(8)), PROTOCOL),
    "GOAWAY on a stream": (frame(f.GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "PUSH_PROMISE": (frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4) + BLOCK), PROTOCOL),
    # frames of the wrong size
    "PRIORITY of 4 bytes": (frame(f.PRIORITY, 0, 1, bytes(4)), SIZE),
    "RST_STREAM of 3 bytes": (OPEN + frame(f.RST_STREAM, 0, 1, bytes(3)), SIZE),
    "SETTINGS of 5 bytes": (frame(f.SETTINGS, 0, 0, bytes(5)), SIZE),
    "SETTINGS acknowledged with values": (frame(f.SETTINGS, f.ACK, 0, bytes(6)), SIZE),
    "PING of 7 bytes": (frame(f.PING, 0, 0, bytes(7)), SIZE),
    "GOAWAY of 7 bytes": (frame(f.GOAWAY, 0, 0, bytes(7)), SIZE),
    "WINDOW_UPDATE of 3 bytes": (frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "HEADERS that end in their priority": (
        frame(f.HEADERS, f.END_HEADERS | f.WITH_PRIORITY, 1, bytes(4)),
        SIZE,
    ),
    # padding
    "DATA with padding beyond the frame": (OPEN + frame(f.DATA, f.PADDED, 1, b"\4abc"), PROTOCOL),
    "DATA with padding without a length": (OPEN + frame(f.DATA, f.PADDED, 1), PROTOCOL),
    "HEADERS with padding beyond the frame": (
        frame(f.HEADERS, f.END_HEADERS | f.PADDED, 1, b"\xff" + BLOCK),
        PROTOCOL,
    ),
    # settings and windows
    "push of 2": (settings(push=2), PROTOCOL),
    "window too large": (settings(window=2**31), FLOW_CONTROL),
    "frame too small": (settings(frame=16383), PROTOCOL),
    "frame too large": (settings(frame=2**24), PROTOCOL),
    "window too large for an open stream": (
        settings(window=0) + OPEN + update(1, 2**31 - 1) + settings(window=1),
        FLOW_CONTROL,
    ),
    "WINDOW_UPDATE of the connection by 0": (update(0, 0), PROTOCOL),
    "WINDOW_UPDATE of a stream by 0": (OPEN + update(1, 0), PROTOCOL),
    "WINDOW_UPDATE of the connection beyond the limit": (update(0, 2**31 - 1), FLOW_CONTROL),
    "WINDOW_UPDATE of a stream beyond the limit": (OPEN + update(1, 2**31 - 1), FLOW_CONTROL),
    "WINDOW_UPDATE twice beyond the limit": (OPEN + 2 * update(1, 2**30), FLOW_CONTROL),
    # the states of a stream
    "DATA before HEADERS": (frame(f.DATA, f.END_STREAM, 1, prefixed(message())), PROTOCOL),
    "RST_STREAM before HEADERS": (cancel(1), PROTOCOL),
    "WINDOW_UPDATE before HEADERS": (update(1, 10), PROTOCOL),
    "WINDOW_UPDATE of a stream of ours": (call(3, b"") + update(2, 10), PROTOCOL),
    "HEADERS on an even stream": (opening(2), PROTOCOL),
    "HEADERS on a stream that was passed over": (opening(3) + opening(1), CLOSED),
    "HEADERS again without the end": (OPEN + opening(1, TRAILERS), PROTOCOL),
    "HEADERS after the end": (DONE + opening(1, TRAILERS, f.END_STREAM), CLOSED),
    "DATA after the end": (DONE + frame(f.DATA, 0, 1, b"x"), CLOSED),
    "DATA after RST_STREAM": (OPEN + cancel(1) + frame(f.DATA, 0, 1, b"x"), CLOSED),
    "HEADERS after RST_STREAM": (OPEN + cancel(1) + opening(1, BLOCK, f.END_STREAM), CLOSED),
    # header blocks
    "CONTINUATION without HEADERS": (OPEN + frame(f.CONTINUATION, f.END_HEADERS, 1, b""), PROTOCOL),
    "CONTINUATION on another stream": (
        HALF + frame(f.CONTINUATION, f.END_HEADERS, 3, BLOCK[9:]),
        PROTOCOL,
    ),
    "DATA within headers": (HALF + frame(f.DATA, 0, 1, b"x"), PROTOCOL),
    "PING within headers": (HALF + frame(f.PING, 0, 0, bytes(8)), PROTOCOL),
    "a frame of an unknown type within headers": (HALF + frame(UNKNOWN, 0, 1), PROTOCOL),
    "headers that end within a field": (opening(1, BLOCK[:-3]), COMPRESSION),
    "headers with an entry that is not in the table": (opening(1, b"\xfe"), COMPRESSION),
    "headers with wrong Huffman codes": (opening(1, b"\x44\x84\xff\xff\xff\xff"), COMPRESSION),
    "a header table larger than allowed": (opening(1, b"\x3f\xe2\x1f" + BLOCK), COMPRESSION),
    "a number without end in headers": (opening(1, b"\xff" + b"\x80" * 12 + b"\1"), COMPRESSION),
    "headers without path": (without(":path"), PROTOCOL),
    "headers without method": (without(":method"), PROTOCOL),
    "headers without scheme": (without(":scheme"), PROTOCOL),
    "a pseudo-header after others": (extra(":authority", "again"), PROTOCOL),
    "a pseudo-header twice": (
        opening(1, block((":path", METHOD), *FIELDS)),
        PROTOCOL,
    ),
    "a pseudo-header of answers": (opening(1, block((":status", "200"), *FIELDS)), PROTOCOL),
    "a header with capitals": (extra("Checksum", "1"), PROTOCOL),
    "a header without name": (extra("", "1"), PROTOCOL),
    "a header with a line break": (extra("checksum", "1\r\nx: 2"), PROTOCOL),
    "a header with blanks around": (extra("checksum", " 1"), PROTOCOL),
    "a header of HTTP/1's connections": (extra("connection", "close"), PROTOCOL),
    "te that is not trailers": (extra("te", "gzip"), PROTOCOL),
    "trailers with a pseudo-header": (OPEN + opening(1, block((":path", "/")), 1), PROTOCOL),
    # more than is taken
    "16 kB of headers in one frame": (opening(1, bytes(16385)), CALM),
    "16 kB of headers in several frames": (
        HALF + 2 * frame(f.CONTINUATION, 0, 1, bytes(9000)),
        CALM,
    ),
    "headers that unpack to more than 16 kB": (
        opening(1, block(("x", "y" * 3000)) + b"\xbe" * 9),
        COMPRESSION,
    ),
    "SETTINGS of 16 kB": (frame(f.SETTINGS, 0, 0, bytes(6 * 2731)), CALM),
    "an unknown frame of 16 kB": (frame(UNKNOWN, 0, 0, bytes(16385)), CALM),
    "a large frame announced": (OPEN + f.head(f.DATA, 0, 1, CALL_BYTES + 1), CALM),
    "a large call in one frame": (
        OPEN + frame(f.DATA, 0, 1, bytes(CALL_BYTES + 1)),
        CALM,
    ),
    "a large call in many frames": (
        OPEN + (CALL_BYTES // 16000 + 1) * frame(f.DATA, 0, 1, bytes(16000)),
        CALM,
    ),
    "a large call of padding": (
        OPEN + (CALL_BYTES // 256 + 1) * frame(f.DATA, f.PADDED, 1, b"\xff" + bytes(255)),
        CALM,
    ),
    "a large call of another method": (
        opening(1, block(*{**PLAIN, ":path": "/other"}.items()))
        + (CALL_BYTES // 16000 + 1) * frame(f.DATA, 0, 1, bytes(16000)),
        CALM,
    ),
    "thousands of calls without end": (
        b"".join(opening(k) for k in range(1, 2 * (MAX_CALLS + 1002), 2)),
        CALM,
    ),
}


# What comes before anything else.
FIRST = {
    "PING before SETTINGS": (PREFACE + frame(f.PING, 0, 0, bytes(8)), PROTOCOL),
    "HEADERS before SETTINGS": (PREFACE + OPEN, PROTOCOL),
    "SETTINGS that acknowledge ours first": (PREFACE + frame(f.SETTINGS, f.ACK, 0), PROTOCOL),
    "another version's preface": (PREFACE.replace(b"2.0", b"3.0"), None),
    "a request of HTTP/1": (b"GET / HTTP/1.1\r\n\r\n", None),
    "a greeting of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), None),
}

# What is against the rules and does no harm; docs/reference/protocol.md says why it is let through.
TOLERATED = {
    "PRIORITY that depends on itself": frame(f.PRIORITY, 0, 1, struct.pack(">IB", 1, 9)),
    "HEADERS that depend on themselves": frame(
        f.HEADERS,
        f.END_HEADERS | f.END_STREAM | f.WITH_PRIORITY,
        1,
        struct.pack(">IB", 1, 9) + BLOCK,
    ),
    "RST_STREAM twice": OPEN + cancel(1) + cancel(1),
    "WINDOW_UPDATE after RST_STREAM": OPEN + cancel(1) + update(1, 10),
    "SETTINGS acknowledged twice": 2 * frame(f.SETTINGS, f.ACK, 0),
    "PING acknowledged that was not sent": frame(f.PING, f.ACK, 0, bytes(8)),
    "a setting of another protocol out of its range": frame(
        f.SETTINGS, 0, 0, struct.pack(">HI", 8, 2)
    ),
    "a length of the content that is not its": extra("content-length", "1") + cancel(1),
    "a host that is not the authority": extra("host", "elsewhere") + cancel(1),
    "CONNECT with a path": opening(
        1, block(*{**PLAIN, ":method": "CONNECT"}.items()), f.END_STREAM
    ),
}


@pytest.fixture
def server():
    with Server() as new_server:
        yield new_server


def cut_off(server: Server, client: RawClient, act: Callable[[], int | None]) -> int | None:
    """Return what `act` gives while the server reads; then another client's greeting is served."""
    other = RawClient(server.port)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(served, server, other, 1, 4)
        result = act()
        other.send(call(1, message(4)))
        future.result()
    other.close()
    return result


@pytest.mark.parametrize(("sent", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_broken_traffic_ends_its_connection_with_the_reason_and_no_other(server, sent, code):
    client = RawClient(server.port)

    def act() -> int | None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # before all is sent
            client.send(sent)
        return client.end()

    assert cut_off(server, client, act) == code
    client.close()


@pytest.mark.parametrize(("sent", "code"), FIRST.values(), ids=FIRST.keys())
def test_connection_that_begins_otherwise_is_cut_off_and_no_other(server, sent, code):
    client = RawClient(server.port, first=sent)
    assert cut_off(server, client, client.end) == code
    client.close()


@pytest.mark.parametrize("sent", TOLERATED.values(), ids=TOLERATED.keys())
def test_call_after_what_is_tolerated_is_served(server, sent):
    client = RawClient(server.port)
    client.send(sent, call(3, message(5)))
    served(server, client, 3, 5)
    client.close()
