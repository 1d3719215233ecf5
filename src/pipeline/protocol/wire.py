"""Protobuf records of constant size, laid out as rows of bytes.

A message whose fields all have a fixed width is the same run of bytes for every agent except for
the numbers in it. So a batch of N agents is one uint8 [N, width] table: writing it is a broadcast
of the template and a few column copies, reading it is a comparison of the constant columns and a
view of the others. Nothing here loops over agents or numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from pipeline.arrays import AnyArray, FloatArray
from pipeline.errors import UnityCommunicationException
from pipeline.protocol.frames import Received
from pipeline.protocol.specs import ObservationSpec

M = TypeVar("M", bound=Message)

ID_WIDTH = 10
"""Bytes of a varint that holds any int32, negative ones included."""


def parse(kind: type[M], data: Received, sender: str = "environment") -> M:
    """Return the message that `sender` sent.

    Raises:
        UnityCommunicationException: It is not a message of the protocol.
    """
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # its stubs know bytes alone
    except DecodeError as error:
        raise UnityCommunicationException(
            f"the {sender} sent {len(data)} bytes that are not a message of the protocol"
        ) from error


def varint(value: int) -> bytes:
    """Return the shortest varint of a non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def head(field: int, size: int) -> bytes:
    """Return the bytes before a content of `size` bytes in a length-delimited field."""
    return varint(field << 3 | 2) + varint(size)


def delimited(field: int, payload: bytes) -> bytes:
    """Return a length-delimited field (bytes, message or packed numbers)."""
    return head(field, len(payload)) + payload


def entry(parts: Iterable[tuple[bytes, bytes]]) -> tuple[AnyArray, list[int]]:
    """Return an entry of a list, uint8 [width], and where its parts' contents begin.

    Args:
        parts: head and content of each. Only contents differ between entries.
    """
    out, starts = bytearray(), []
    for before, content in parts:
        out += before
        starts.append(len(out))
        out += content
    # Field 1 is the list in messages of agents and in those of actions.
    before = head(1, len(out))
    return (np.frombuffer(before + out, dtype=np.uint8), [len(before) + start for start in starts])


def part(field: int, content: bytes) -> tuple[bytes, bytes]:
    """Return a part of an `entry`: a length-delimited field, which is left out if empty."""
    return head(field, len(content)) if content else b"", content


def wide_varints(values: AnyArray, width: int) -> AnyArray:
    """Varints of exactly `width` bytes, padded with continuation bytes, which every parser accepts.

    Args:
        values: int [...] whole numbers that fit in 7 * `width` bits; negative ones need width 10.
        width: bytes of each.

    Returns:
        uint8 [..., width].
    """
    # Protobuf writes a negative number as 64 bits of two's complement.
    bits = np.asarray(values, dtype=np.int64).view(np.uint64)[..., None]
    groups = (bits >> (np.arange(width, dtype=np.uint64) * np.uint64(7))) & np.uint64(0x7F)
    out = groups.astype(np.uint8)
    out[..., :-1] |= 0x80
    return out


def width_of(values: AnyArray) -> int:
    """Bytes that the widest of `values` needs as a varint."""
    if values.size == 0:
        return 1
    if int(values.min()) < 0:
        return ID_WIDTH
    return max(1, math.ceil(int(values.max()).bit_length() / 7))


def float_bytes(values: AnyArray) -> AnyArray:
    """Numbers [N, ...] as float32 in uint8 [N, 4 * size], little-endian, a view where possible."""
    values = np.ascontiguousarray(values, dtype="<f4")
    n = len(values)
    # Of no rows, `-1` could not tell the width.
    return values.reshape(n, values.size // n if n else 0).view(np.uint8)


def float_rows(table: AnyArray, start: int, shape: tuple[int, ...]) -> FloatArray:
    """float32 [N, *shape] copied out of the columns from `start` of uint8 [N, width]."""
    stop = start + 4 * math.prod(shape)
    block = np.ascontiguousarray(table[:, start:stop])
    floats = block.view("<f4").reshape(len(table), *shape)
    # One row is contiguous already, and then still a view of what was received.
    return floats if floats.flags.writeable else floats.copy()


@lru_cache(maxsize=256)
def observation_header(shape: tuple[int, ...]) -> bytes:
    """Return what precedes the floats in an uncompressed ObservationProto of this shape."""
    size = 4 * math.prod(shape)
    # Protobuf leaves out an empty list, its tag included.
    inner = b"\x0a" + varint(size) if size else b""
    dims = delimited(1, b"".join(varint(d) for d in shape)) if shape else b""
    return dims + b"\x22" + varint(len(inner) + size) + inner


@lru_cache(maxsize=256)
def observation_template(spec: ObservationSpec) -> tuple[bytes, int]:
    """Return an ObservationProto of zeros that fits `spec`, and where its floats begin."""
    header = observation_header(spec.shape)
    out = header + bytes(4 * math.prod(spec.shape))
    if spec.dimension_property:
        out += delimited(6, b"".join(varint(int(p)) for p in spec.dimension_property))
    if spec.observation_type:
        out += varint(7 << 3) + varint(int(spec.observation_type))
    if spec.name:
        out += delimited(8, spec.name.encode())
    return out, len(header)
