"""Header blocks of gRPC calls: those that we write, and which call a client's is.

What we write are literals, so no table is kept for it. What a client writes depends on the table of
its connection and is decoded by `hpack`, in full when a call's block differs from the one before:
calls of an environment have equal headers.

Sources: RFC 7541 (HPACK), RFC 9113 section 8, and the gRPC-over-HTTP/2 specification.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.protocol.frames import COMPRESSION_ERROR, PROTOCOL_ERROR, FrameError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_BLOCK_BYTES = 16384
"""Bytes of a header block, compressed or not: what gRPC's runtime takes at most, too."""
FAILED_PRECONDITION, UNIMPLEMENTED = 9, 12
"""Statuses of gRPC."""

_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")
_OF_REQUESTS = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_CONNECTIONS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without indexing; `name` is an index below 127 (one byte) or a text."""
    return name + bytes([len(value)]) + value


_CONTENT_TYPE = literal(b"\x0f\x10", b"application/grpc")
_STATUS = b"\x00\x0bgrpc-status"
RESPONSE = b"\x88" + _CONTENT_TYPE
SUCCESS = literal(_STATUS, b"0")


def request(method: str, authority: str) -> bytes:
    """Return the header block of a call of `method`."""
    return (
        b"\x83\x86"
        + literal(b"\x04", method.encode())
        + literal(b"\x01", authority.encode())
        + _CONTENT_TYPE
        + literal(b"\x00\x02te", b"trailers")
    )


def refusal(status: int, why: str) -> bytes:
    """Return the header block of an answer that is a failure; `why` has at most 126 characters."""
    reason = literal(b"\x00\x0cgrpc-message", why.encode())
    return RESPONSE + literal(_STATUS, str(status).encode()) + reason


class HeaderReader:
    """Reads the header blocks that arrive on one connection, each of them once and in order."""

    def __init__(self) -> None:
        # Not needed, and not packed, where an environment only calls.
        from hpack import Decoder
        from hpack.exceptions import HPACKError

        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._errors = (HPACKError, IndexError, TypeError)
        self._repeats: bytes | None = None

    def is_call(self, block: bytes, path: bytes) -> bool:
        """Return whether these are the headers of a call of the method at `path`.

        Raises:
            FrameError: They are no headers of a request.
        """
        if block == self._repeats:
            return True
        table = list(self._decoder.header_table.dynamic_entries)
        fields = self._decode(block)
        pseudo = _check(fields)
        if b":method" not in pseudo or (
            pseudo[b":method"] != b"CONNECT" and not {b":scheme", b":path"} <= pseudo.keys()
        ):
            raise FrameError(PROTOCOL_ERROR, "a call without method, scheme or path")
        content = dict(fields).get(b"content-type", b"")
        is_call = (
            pseudo[b":method"] == b"POST"
            and pseudo.get(b":path") == path
            and content.startswith(b"application/grpc")
        )
        # The same block means the same as long as it leaves the table as it was.
        unchanged = table == list(self._decoder.header_table.dynamic_entries)
        self._repeats = block if is_call and unchanged else None
        return is_call

    def read_trailers(self, block: bytes) -> None:
        """Follow the table through a block whose fields do not matter.

        Raises:
            FrameError: They are no trailers.
        """
        self._repeats = None
        if _check(self._decode(block)):
            raise FrameError(PROTOCOL_ERROR, "trailers with a pseudo-header")

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            return [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except self._errors as error:
            raise FrameError(COMPRESSION_ERROR, f"headers that are not HPACK: {error}") from error


def _check(fields: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the pseudo-headers of a request.

    Raises:
        FrameError: The headers are malformed.
    """
    pseudo: dict[bytes, bytes] = {}
    for position, (name, value) in enumerate(fields):
        wrong = not _NAME.fullmatch(name) or not _VALUE.fullmatch(value)
        if name[:1] == b":":
            wrong = wrong or name not in _OF_REQUESTS or name in pseudo or len(pseudo) != position
            pseudo[name] = value
        if (
            wrong
            or name in _OF_CONNECTIONS
            or (name == b"te" and value.lower() != b"trailers")
            or (name == b":path" and not value)
        ):
            raise FrameError(PROTOCOL_ERROR, f"a call with the header {name!r}: {value[:80]!r}")
    return pseudo
