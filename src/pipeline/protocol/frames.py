"""HTTP/2 frames: their names on the wire, how they are written, and what makes one malformed.

Source: RFC 9113, sections 4 to 7.
"""

from __future__ import annotations

import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW, MAX_FRAME = 4, 5
"""Settings; all others are of no concern to us."""
LARGEST_WINDOW, DEFAULT_WINDOW = 2**31 - 1, 65535
LARGEST_FRAME, DEFAULT_FRAME = 2**24 - 1, 16384
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6

_NAMES = {
    DATA: "DATA",
    HEADERS: "HEADERS",
    RST_STREAM: "RST_STREAM",
    SETTINGS: "SETTINGS",
    PING: "PING",
    GOAWAY: "GOAWAY",
    WINDOW_UPDATE: "WINDOW_UPDATE",
}
_OF_STREAMS, _OF_CONNECTIONS = {DATA, HEADERS, RST_STREAM}, {SETTINGS, PING, GOAWAY}
_LENGTHS = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


class FrameError(Exception):
    """The peer breaks the rules in a way after which the connection cannot go on."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a frame's payload of `length` bytes."""
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return head(kind, flags, stream, len(payload)) + payload


def check(kind: int, flags: int, stream: int, length: int) -> None:
    """Accept a frame's head; frames of kinds that are not ours pass.

    Raises:
        FrameError: The frame is malformed.
    """
    if (kind in _OF_STREAMS and stream == 0) or (kind in _OF_CONNECTIONS and stream != 0):
        raise FrameError(PROTOCOL_ERROR, f"a {_NAMES[kind]} frame on stream {stream}")
    wrong = length != _LENGTHS.get(kind, length)
    if kind == SETTINGS:
        wrong = length % 6 != 0 or (bool(flags & ACK) and length != 0)
    if wrong or (kind == GOAWAY and length < 8):
        raise FrameError(FRAME_SIZE_ERROR, f"a {_NAMES[kind]} frame of {length} bytes")


def without_padding(flags: int, payload: bytes) -> bytes:
    """The data of a DATA frame.

    Raises:
        FrameError: There is more padding than frame.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise FrameError(PROTOCOL_ERROR, "a DATA frame with more padding than it holds")
    return payload[1 : len(payload) - payload[0]]


def increment(payload: bytes, window: int) -> int:
    """How much a WINDOW_UPDATE adds to a window that is `window` now.

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
    """Names and values of a SETTINGS frame, in order.

    Raises:
        FrameError: One that concerns us is out of its range.
    """
    pairs = list(struct.iter_unpack(">HI", payload))
    for name, value in pairs:
        if name == INITIAL_WINDOW and value > LARGEST_WINDOW:
            raise FrameError(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if name == MAX_FRAME and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise FrameError(PROTOCOL_ERROR, f"a largest frame of {value} bytes")
    return pairs
