"""HTTP/2 frames: their names on the wire, how they are written, and what makes one malformed.

Source: RFC 9113, sections 4 to 7.
"""

from __future__ import annotations

import struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = range(2, 7)
"""Settings; all others are of no concern to us."""
LARGEST_WINDOW, DEFAULT_WINDOW = 2**31 - 1, 65535
LARGEST_FRAME, DEFAULT_FRAME = 2**24 - 1, 16384
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11

HEAD = struct.Struct(">BHBBI")
"""Length (high, low), kind, flags and stream of a frame."""

_NAMES = (
    *("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY"),
    *("WINDOW_UPDATE", "CONTINUATION"),
)
_OF_STREAMS = {DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION}
_OF_CONNECTIONS = {SETTINGS, PING, GOAWAY}
_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


class FrameError(Exception):
    """The peer breaks the rules in a way after which the connection cannot go on."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def name(kind: int) -> str:
    """Return what the RFC calls a frame of this kind."""
    return _NAMES[kind] if kind < len(_NAMES) else f"type-{kind}"


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Return the nine bytes before a frame's payload of `length` bytes."""
    return HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    n = len(payload)
    return HEAD.pack(n >> 16, n & 0xFFFF, kind, flags, stream) + payload


def check(kind: int, flags: int, stream: int, length: int) -> None:
    """Accept a frame's head; frames of kinds that are not ours pass.

    Only DATA may be as large as we announce: what else we read is small, or ignored.

    Raises:
        FrameError: The frame is malformed.
    """
    # Nearly all frames of a conversation; the checks below are for the others.
    if stream and (kind == DATA or (kind == HEADERS and length <= DEFAULT_FRAME)):
        return
    if (kind in _OF_STREAMS and stream == 0) or (kind in _OF_CONNECTIONS and stream != 0):
        raise FrameError(PROTOCOL_ERROR, f"a {name(kind)} frame on stream {stream}")
    if kind == PUSH_PROMISE:
        raise FrameError(PROTOCOL_ERROR, "a PUSH_PROMISE frame, which was not allowed")
    wrong = length != _LENGTHS.get(kind, length)
    if kind == SETTINGS:
        wrong = length % 6 != 0 or (bool(flags & ACK) and length != 0)
    if wrong or (kind == GOAWAY and length < 8):
        raise FrameError(FRAME_SIZE_ERROR, f"a {name(kind)} frame of {length} bytes")
    if length > DEFAULT_FRAME:
        raise FrameError(ENHANCE_YOUR_CALM, f"a {name(kind)} frame of {length} bytes")


def without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the content of a DATA or HEADERS frame, without padding and priority.

    Raises:
        FrameError: There is more padding than frame, or less frame than priority.
    """
    start, stop = 0, len(payload)
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise FrameError(
                PROTOCOL_ERROR, f"a {name(kind)} frame with more padding than it holds"
            )
        start, stop = 1, len(payload) - payload[0]
    if kind == HEADERS and flags & WITH_PRIORITY:
        start += 5
        if start > stop:
            raise FrameError(FRAME_SIZE_ERROR, "a HEADERS frame that ends within its priority")
    return payload[start:stop]


def increment(payload: bytes, window: int) -> int:
    """Return how much a WINDOW_UPDATE adds to a window that is `window` now.

    Raises:
        FrameError: Nothing, or more than a window may hold.
    """
    credit: int = struct.unpack(">I", payload)[0] & LARGEST_WINDOW
    if credit == 0:
        raise FrameError(PROTOCOL_ERROR, "a WINDOW_UPDATE by 0")
    if window + credit > LARGEST_WINDOW:
        raise FrameError(FLOW_CONTROL_ERROR, "a WINDOW_UPDATE beyond the largest window")
    return credit


def settings(payload: bytes) -> list[tuple[int, int]]:
    """Return names and values of a SETTINGS frame, in order.

    Raises:
        FrameError: One that concerns us is out of its range.
    """
    pairs = list(struct.iter_unpack(">HI", payload))
    for key, value in pairs:
        if key == ENABLE_PUSH and value > 1:
            raise FrameError(PROTOCOL_ERROR, f"a setting of {value} where 0 or 1 is allowed")
        if key == INITIAL_WINDOW and value > LARGEST_WINDOW:
            raise FrameError(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if key == MAX_FRAME and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise FrameError(PROTOCOL_ERROR, f"a largest frame of {value} bytes")
    return pairs
