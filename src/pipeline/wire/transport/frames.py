"""HTTP/2 frames and the header blocks of gRPC calls: writing, and checks of received frames.

The headers that we write are HPACK literals, which need no dynamic table. A client's headers depend
on the table of its connection and are decoded by `hpack`, but only if a call's block differs from
the previous block: an environment sends the same headers in every call.

Sources: RFC 9113, sections 4 to 8, RFC 7541 (HPACK), and the gRPC-over-HTTP/2 specification.
"""

import re
import struct
from collections.abc import Iterable

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
# END_STREAM and ACK are the same bit: its meaning depends on the kind of the frame.
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = range(2, 7)
"""Identifiers of the settings that are used here (RFC 9113, section 6.5.2)."""
# Windows of flow control and payloads of frames, in bytes (RFC 9113, section 6.5.2).
LARGEST_WINDOW, DEFAULT_WINDOW = 2**31 - 1, 65535
LARGEST_FRAME, DEFAULT_FRAME = 2**24 - 1, 16384
# Error codes (RFC 9113, section 7).
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11

HEAD = struct.Struct(">IBI")
"""A frame's header: length (24 bits) and kind (8 bits), flags, and stream."""

MAX_BLOCK_BYTES = 16384
"""Largest header block, compressed or not, in bytes; gRPC's runtime has the same limit."""
FAILED_PRECONDITION, UNIMPLEMENTED = 9, 12
"""Status codes of gRPC (https://grpc.github.io/grpc/core/md_doc_statuscodes.html)."""

# Names have no capital letters, and values have no blanks around them (RFC 9113, section 8.2.1).
_FIELD_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_FIELD_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
# Header fields of HTTP/1.1 that HTTP/2 forbids (RFC 9113, section 8.2.2).
_FORBIDDEN_FIELDS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)

_NAMES = (
    *("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY"),
    *("WINDOW_UPDATE", "CONTINUATION"),
)
# Kinds of frames that must belong to a stream, kinds that must not, and lengths in bytes of
# payloads with a fixed length.
_OF_STREAMS = {DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION}
_OF_CONNECTIONS = {SETTINGS, PING, GOAWAY}
_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


class FrameError(Exception):
    """The peer broke a rule of HTTP/2: the connection ends with the error `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def name(kind: int) -> str:
    """Return the RFC's name for frames of this kind."""
    return _NAMES[kind] if kind < len(_NAMES) else f"type-{kind}"


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Return the nine bytes of the header of a frame with a payload of `length` bytes."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame as bytes."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def check(kind: int, flags: int, stream: int, length: int) -> None:
    """Raise FrameError if a frame's header is malformed; accept unknown kinds, as RFC 9113 demands.

    Only DATA frames may be as large as the announced limit: all other frames are small.
    """
    # Nearly all frames are DATA and HEADERS; they need none of the slow checks below.
    if stream and (kind == DATA or (kind == HEADERS and length <= DEFAULT_FRAME)):
        return
    if (kind in _OF_STREAMS and stream == 0) or (kind in _OF_CONNECTIONS and stream != 0):
        raise FrameError(PROTOCOL_ERROR, f"a {name(kind)} frame on stream {stream}")
    # Our client turns pushes off, and a server never receives them (RFC 9113, section 8.4).
    if kind == PUSH_PROMISE:
        raise FrameError(PROTOCOL_ERROR, "a PUSH_PROMISE frame, which was not allowed")
    # RFC 9113, sections 6.3 to 6.9, give the lengths of these frames.
    wrong = length != _LENGTHS.get(kind, length)
    if kind == SETTINGS:
        wrong = length % 6 != 0 or (bool(flags & ACK) and length != 0)
    if wrong or (kind == GOAWAY and length < 8):
        raise FrameError(FRAME_SIZE_ERROR, f"a {name(kind)} frame of {length} bytes, a wrong size")
    if length > DEFAULT_FRAME:
        raise FrameError(ENHANCE_YOUR_CALM, f"a {name(kind)} frame of {length} bytes, too large")


def without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the content of a DATA or HEADERS frame, without padding and priority."""
    start, stop = 0, len(payload)
    # The first byte is the padding's length (RFC 9113, section 6.1).
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise FrameError(PROTOCOL_ERROR, f"a {name(kind)} frame with more padding than payload")
        start, stop = 1, len(payload) - payload[0]
    # Priorities are obsolete, but a client may send them (RFC 9113, section 5.3.2).
    if kind == HEADERS and flags & WITH_PRIORITY:
        start += 5
        if start > stop:
            raise FrameError(FRAME_SIZE_ERROR, "a HEADERS frame that ends within its priority")
    return payload[start:stop]


def increment(payload: bytes, window: int) -> int:
    """Return the number of bytes that a WINDOW_UPDATE adds to a window of `window` bytes."""
    credit: int = struct.unpack(">I", payload)[0] & LARGEST_WINDOW
    if credit == 0:
        raise FrameError(PROTOCOL_ERROR, "a WINDOW_UPDATE with an increment of 0")
    if window + credit > LARGEST_WINDOW:
        raise FrameError(FLOW_CONTROL_ERROR, "a WINDOW_UPDATE beyond the largest window")
    return credit


def settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the identifiers and values in a SETTINGS frame, in order."""
    pairs = list(struct.iter_unpack(">HI", payload))
    for key, value in pairs:
        if key == ENABLE_PUSH and value > 1:
            raise FrameError(PROTOCOL_ERROR, f"the setting ENABLE_PUSH {value}, not 0 or 1")
        if key == INITIAL_WINDOW and value > LARGEST_WINDOW:
            raise FrameError(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if key == MAX_FRAME and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise FrameError(PROTOCOL_ERROR, f"the setting MAX_FRAME_SIZE {value}, out of range")
    return pairs


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field of at most 126 bytes, not indexed (RFC 7541, section 6.2.2)."""
    return name + bytes([len(value)]) + value


# HPACK's static table (RFC 7541, appendix A): name 31, in two bytes, is content-type; 0x88 is
# `:status: 200`.
_CONTENT_TYPE = literal(b"\x0f\x10", b"application/grpc")
_STATUS = b"\x00\x0bgrpc-status"
RESPONSE = b"\x88" + _CONTENT_TYPE
SUCCESS = literal(_STATUS, b"0")


def request_block(method: str, authority: str) -> bytes:
    """Return the header block of a call of `method`."""
    # `:method: POST`, `:scheme: http`, `:path` and `:authority` are in HPACK's static table.
    target = literal(b"\x04", method.encode()) + literal(b"\x01", authority.encode())
    return b"\x83\x86" + target + _CONTENT_TYPE + literal(b"\x00\x02te", b"trailers")


def refusal_block(status: int, why: str) -> bytes:
    """Return the header block that refuses a call; `why` has at most 126 ASCII characters."""
    reason = literal(b"\x00\x0cgrpc-message", why.encode())
    return RESPONSE + literal(_STATUS, str(status).encode()) + reason


class HeaderReader:
    """Reads the header blocks of one connection; every block must be read once and in order."""

    def __init__(self) -> None:
        # This import is here, because packed executables only make calls, and are packed without
        # hpack.
        from hpack import Decoder
        from hpack.exceptions import HPACKError

        # The decoder refuses a header list that becomes large by decompression.
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._errors = (HPACKError, IndexError, TypeError)
        self._repeats: bytes | None = None

    def is_call(self, block: bytes, path: bytes) -> bool:
        """Return whether a block begins a call of the method at `path`; FrameError if malformed."""
        if block == self._repeats:
            return True
        table = list(self._decoder.header_table.dynamic_entries)
        fields = self._decode(block)
        pseudo = _pseudo_headers(fields)
        if b":method" not in pseudo or (
            # Only CONNECT has neither scheme nor path (RFC 9113, section 8.5).
            pseudo[b":method"] != b"CONNECT" and not {b":scheme", b":path"} <= pseudo.keys()
        ):
            raise FrameError(PROTOCOL_ERROR, "a call without method, scheme or path")
        content = dict(fields).get(b"content-type", b"")
        is_call = (
            pseudo[b":method"] == b"POST"
            and pseudo.get(b":path") == path
            # gRPC allows a suffix, as in `application/grpc+proto`.
            and content.startswith(b"application/grpc")
        )
        # An equal block has the same fields again only if it does not change the dynamic table.
        unchanged = table == list(self._decoder.header_table.dynamic_entries)
        self._repeats = block if is_call and unchanged else None
        return is_call

    def read_trailers(self, block: bytes) -> None:
        """Update the dynamic table with a block of trailers; their fields are ignored."""
        self._repeats = None
        if _pseudo_headers(self._decode(block)):
            raise FrameError(PROTOCOL_ERROR, "trailers with a pseudo-header")

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            return [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except self._errors as error:
            raise FrameError(COMPRESSION_ERROR, f"headers that are not HPACK: {error}") from error


def _pseudo_headers(fields: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the pseudo-headers of a request; raise FrameError for malformed headers."""
    pseudo: dict[bytes, bytes] = {}
    for position, (name, value) in enumerate(fields):
        wrong = not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value)
        if name[:1] == b":":
            # Pseudo-headers come before all other fields (RFC 9113, section 8.3).
            wrong = wrong or name not in _PSEUDO or name in pseudo or len(pseudo) != position
            pseudo[name] = value
        if (
            wrong
            or name in _FORBIDDEN_FIELDS
            or (name == b"te" and value.lower() != b"trailers")
            or (name == b":path" and not value)
        ):
            raise FrameError(
                PROTOCOL_ERROR, f"a call with the malformed header {name!r}: {value[:80]!r}"
            )
    return pseudo
