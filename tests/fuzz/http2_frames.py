"""Random HTTP/2 frames of a client: legal conversations, and conversations with faults."""

import struct
from typing import Any

from hpack import Encoder
from http2_peer import BLOCK, FIELDS, TRAILERS, prefixed, settings
from hypothesis import strategies as st

from pipeline.wire.transport import frames as f
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import frame
from pipeline.wire.transport.server import MAX_CALLS


@st.composite
def _parts(draw: Any, data: bytes, most: int = 3) -> list[bytes]:
    """Divide `data` into at most `most` pieces, which may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=most - 1)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]


NOISE = st.one_of(
    st.builds(lambda data: frame(f.PING, 0, 0, data), st.binary(min_size=8, max_size=8)),
    st.builds(lambda stream, at: frame(f.PRIORITY, 0, stream, struct.pack(">IB", at, 7)),
              st.integers(1, 99), st.sampled_from((0, 100))),
    st.builds(lambda credit: frame(f.WINDOW_UPDATE, 0, 0, struct.pack(">I", credit)),
              st.integers(1, 100_000)),
    st.builds(lambda window, size, table: settings(window=window, frame=size, table=table),
              st.integers(0, 1 << 20), st.integers(1 << 14, (1 << 24) - 1), st.integers(0, 9000)),
    st.builds(frame,
              st.integers(0x20, 0xFF), st.integers(0, 255), st.integers(0, 9),
              st.binary(max_size=20)),
    st.sampled_from((settings(), settings(streams=0, push=0, unknown=7), frame(f.SETTINGS, 1, 0))),
)  # fmt: skip


@st.composite
def header_frames(draw: Any, stream: int, block: bytes, flags: int) -> list[bytes]:
    """Return a header block as one frame or several; no other frame may come between them."""
    parts = draw(_parts(block)) if draw(st.booleans()) else [block]
    first = parts[0]
    if draw(st.integers(0, 3)) == 0:
        flags |= f.WITH_PRIORITY
        first = struct.pack(">IB", draw(st.sampled_from((0, 101, 101 | 1 << 31))), 3) + first
    if first and draw(st.integers(0, 3)) == 0:
        flags |= f.PADDED
        length = draw(st.integers(0, 20))
        first = bytes([length]) + first + bytes(length)
    out = [frame(f.HEADERS, flags, stream, first)]
    out += [frame(f.CONTINUATION, 0, stream, part) for part in parts[1:]]
    last = bytearray(out[-1])
    last[4] |= f.END_HEADERS
    return [*out[:-1], bytes(last)]


@st.composite
def data_frames(draw: Any, stream: int, data: bytes) -> list[bytes]:
    out = []
    for part in draw(_parts(data)):
        flags, padded = 0, part
        if part and draw(st.integers(0, 3)) == 0:
            length = draw(st.integers(0, 255))
            flags, padded = f.PADDED, bytes([length]) + part + bytes(length)
        out.append(frame(f.DATA, flags, stream, padded))
    return out


_EXTRA = st.lists(
    st.tuples(
        st.sampled_from(("grpc-timeout", "user-agent", "x-a", "authorization")),
        st.text("abc09-", min_size=1, max_size=30),
    ),
    max_size=3,
)
_SIZES = st.sampled_from((0, 1, 5, 100, 300))


class _Script:
    """The open calls of a conversation, and its frames so far."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.encoder = draw, Encoder()
        self.out = [settings()]
        self.stream = -1
        self.live: list[tuple[int, list[bytes]]] = []

    def begin(self) -> None:
        draw = self.draw
        self.stream += draw(st.sampled_from((2, 2, 2, 4, 10)))
        if draw(st.integers(0, 5)) == 5:
            self.encoder.header_table_size = draw(st.integers(0, 4096))
        path = draw(st.sampled_from((METHOD, METHOD, METHOD, "/other")))
        fields = [pair if pair[0] != ":path" else (":path", path) for pair in FIELDS]
        block = self.encoder.encode(fields + draw(_EXTRA), huffman=draw(st.booleans()))
        body = prefixed(bytes([self.stream % 256]) * draw(_SIZES))
        body = draw(st.sampled_from((body, body, body, body, body[:-1], body + b"x", b"")))
        self.out += draw(header_frames(self.stream, block, 0))
        self.live.append((self.stream, draw(data_frames(self.stream, body))))

    def go_on(self) -> None:
        """Append the next frame of an open call; a call's last frame ends it."""
        number, rest = self.draw(st.sampled_from(self.live))
        if rest:
            self.out.append(rest.pop(0))
            return
        self.live = [call for call in self.live if call[0] != number]
        end = self.draw(st.integers(0, 3))
        if end == 0:
            self.out.append(frame(f.DATA, f.END_STREAM, number))
        elif end == 1:
            block = self.encoder.encode([("x-end", "1")])
            self.out += self.draw(header_frames(number, block, f.END_STREAM))
        elif end == 2 and self.out[-1][3:9] == frame(f.DATA, 0, number)[3:9]:
            last = bytearray(self.out[-1])
            last[4] |= f.END_STREAM
            self.out[-1] = bytes(last)
        else:
            self.out.append(frame(f.RST_STREAM, 0, number, struct.pack(">I", 8)))


@st.composite
def conversations(draw: Any) -> list[bytes]:
    """Return legal frames of a client: calls, one by one or at the same time, and other frames.

    The bodies are arbitrary bytes instead of messages; some have a wrong length, or are empty.
    """
    script = _Script(draw)
    for _ in range(draw(st.integers(1, 20))):
        act = draw(st.integers(0, 6))
        if act <= 1 and len(script.live) < MAX_CALLS:
            script.begin()
        elif act <= 5 and script.live:
            script.go_on()
        else:
            script.out.append(draw(NOISE))
            if script.live and draw(st.booleans()):
                credit = struct.pack(">I", draw(st.integers(1, 100_000)))
                script.out.append(frame(f.WINDOW_UPDATE, 0, script.live[0][0], credit))
    while script.live and draw(st.integers(0, 20)):
        script.go_on()
    return script.out


@st.composite
def _changed(draw: Any, original: bytes) -> bytes:
    """Return a frame with another type, stream, length, content, or other flags."""
    out = bytearray(original)
    kind = draw(st.integers(0, 5))
    if kind == 0:
        out[3] = draw(st.sampled_from((*range(10), 0xEE)))
    elif kind <= 2:
        out[4] ^= draw(
            st.sampled_from((f.END_STREAM, f.END_HEADERS, f.PADDED, f.WITH_PRIORITY, 0x40))
        )
    elif kind == 3:
        out[8] = draw(st.integers(0, 12))
    elif kind == 4 and len(out) > 9:
        out[draw(st.integers(9, len(out) - 1))] = draw(st.integers(0, 255))
    else:
        length = draw(st.integers(0, len(out) - 9))
        out[:3], out[9 + length :] = length.to_bytes(3, "big"), b""
    return bytes(out)


_PAIRS = st.lists(
    st.builds(
        lambda key, value: struct.pack(">HI", key, value),
        st.integers(1, 8),
        st.sampled_from((0, 1, 2, 16383, 16384, 65535, 2**24 - 1, 2**24, 2**31 - 1, 2**31)),
    ),
    max_size=3,
)
_PAYLOADS = {
    f.DATA: st.sampled_from((b"", b"x", prefixed(b"late"))),
    f.HEADERS: st.sampled_from((BLOCK, TRAILERS, BLOCK[:-2], b"", b"\xbe")),
    f.PRIORITY: st.just(bytes(5)),
    f.RST_STREAM: st.just(bytes(4)),
    f.SETTINGS: _PAIRS.map(b"".join),
    f.PUSH_PROMISE: st.just(bytes(4) + BLOCK),
    f.PING: st.just(bytes(8)),
    f.GOAWAY: st.just(bytes(8)),
    f.WINDOW_UPDATE: st.sampled_from((bytes(4), b"\0\0\0\1", b"\x7f\xff\xff\xff")),
    f.CONTINUATION: st.sampled_from((b"", BLOCK[9:], TRAILERS)),
}


@st.composite
def _strange(draw: Any) -> bytes:
    """Return a random frame, well formed or not, on a random stream."""
    kind = draw(st.sampled_from(sorted(_PAYLOADS)))
    flags = draw(st.sampled_from((0, 1, 4, 4, 5, 5, 8, 0x20)))
    of_connection = kind in (f.SETTINGS, f.PING, f.GOAWAY)
    stream = draw(st.sampled_from((0, 0, 0, 1) if of_connection else (0, 1, 1, 2, 3, 3, 5, 7, 99)))
    payload = draw(_PAYLOADS[kind])
    if draw(st.integers(0, 7)) == 7:
        payload = draw(st.binary(max_size=20))
    return frame(kind, flags, stream, payload)


@st.composite
def spoiled(draw: Any, sent: list[bytes], least: int = 1) -> list[bytes]:
    """Change, remove, repeat, move or insert up to three frames."""
    for _ in range(draw(st.integers(least, 3))):
        at, to = draw(st.integers(0, len(sent) - 1)), draw(st.integers(0, len(sent)))
        act = draw(st.integers(0, 9))
        if act <= 2:
            sent[at] = draw(_changed(sent[at]))
        elif act <= 6:
            sent.insert(to, draw(_strange()))
        elif act == 7:
            sent.insert(to, sent[at])
        elif act == 8:
            sent.insert(to, sent.pop(at))
        elif len(sent) > 1:
            del sent[at]
    return sent


PIECES = st.sampled_from(([1 << 16], [1], [3, 8, 1], [9], [10, 100], [1000, 1]))
