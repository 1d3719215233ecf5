"""Protobuf records of constant size, laid out as rows of bytes.

If all fields of a message have a fixed width, the messages of all agents differ in their numbers
only. So a batch of N agents is one uint8 [N, width] table: writing it is a broadcast of the
template and a few column copies; reading it is a comparison of the constant columns and a view of
the other columns. Nothing in this module loops over agents or numbers.

The encoding is described at https://protobuf.dev/programming-guides/encoding/.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.core.specs import ObservationSpec
from pipeline.errors import UnityCommunicationException

M = TypeVar("M", bound=Message)

Received = bytes | memoryview
"""Type of received bytes; a large message is a view of the memory that it was received into."""

ID_WIDTH = 10
"""Number of bytes of a varint that can hold any int32, negative numbers included."""


def parse(kind: type[M], data: Received, sender: str = "environment") -> M:
    """Return the message in `data`; else raise UnityCommunicationException with the `sender`."""
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # protobuf's stubs allow bytes only
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
    """Return tag and length of a length-delimited field with a content of `size` bytes."""
    return varint(field << 3 | 2) + varint(size)


def delimited(field: int, payload: bytes) -> bytes:
    """Return a length-delimited field (bytes, message or packed numbers)."""
    return head(field, len(payload)) + payload


def entry(parts: Iterable[tuple[bytes, bytes]]) -> tuple[AnyArray, list[int]]:
    """Return an entry of heads and contents, uint8 [width], and the offset of each content."""
    out, starts = bytearray(), []
    for before, content in parts:
        out += before
        starts.append(len(out))
        out += content
    # The list is field 1 in ListAgentInfoProto and in ListAgentActionProto.
    before = head(1, len(out))
    return np.frombuffer(before + out, dtype=np.uint8), [len(before) + start for start in starts]


def part(field: int, content: bytes) -> tuple[bytes, bytes]:
    """Return a field as a part of an `entry`: head and content; an empty field has no head."""
    return head(field, len(content)) if content else b"", content


def wide_varints(values: AnyArray, width: int) -> AnyArray:
    """Return varints padded to `width` bytes, uint8 [..., width], which every parser accepts.

    `values`, int [...], must fit in 7 * `width` bits; negative numbers need the width ID_WIDTH.
    """
    # Protobuf writes a negative number as 64 bits of two's complement.
    bits = np.asarray(values, dtype=np.int64).view(np.uint64)[..., None]
    groups = (bits >> (np.arange(width, dtype=np.uint64) * np.uint64(7))) & np.uint64(0x7F)
    out = groups.astype(np.uint8)
    # The highest bit of a byte says that another byte follows.
    out[..., :-1] |= 0x80
    return out


def width_of(values: AnyArray) -> int:
    """Return the number of bytes that the longest of `values`, int [...], takes as a varint."""
    if values.size == 0:
        return 1
    # Negative numbers are sign-extended to 64 bits, which take ten bytes.
    if int(values.min()) < 0:
        return ID_WIDTH
    return max(1, math.ceil(int(values.max()).bit_length() / 7))


def float_bytes(values: AnyArray) -> AnyArray:
    """Return the bytes of numbers [N, ...] as little-endian float32: uint8 [N, 4 * size].

    The result is a view of `values` if possible.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    n = len(values)
    # Without rows, NumPy could not compute the number of columns from -1.
    return values.reshape(n, values.size // n if n else 0).view(np.uint8)


def float_rows(table: AnyArray, start: int, shape: tuple[int, ...]) -> FloatArray:
    """Return float32 [N, *shape]: little-endian floats in `table`, uint8 [N, width], from `start`.

    The result is writable, even if `table` is read-only.
    """
    stop = start + 4 * math.prod(shape)
    block = np.ascontiguousarray(table[:, start:stop])
    floats = block.view("<f4").reshape(len(table), *shape)
    # With one row, `block` is contiguous already, and still a read-only view of received bytes.
    return floats if floats.flags.writeable else floats.copy()


@lru_cache(maxsize=256)
def observation_header(shape: tuple[int, ...]) -> bytes:
    """Return the bytes before the floats in an uncompressed ObservationProto of this shape."""
    size = 4 * math.prod(shape)
    # Protobuf leaves out an empty list, its tag included.
    inner = b"\x0a" + varint(size) if size else b""
    dims = delimited(1, b"".join(varint(d) for d in shape)) if shape else b""
    return dims + b"\x22" + varint(len(inner) + size) + inner


@lru_cache(maxsize=256)
def observation_template(spec: ObservationSpec) -> tuple[bytes, int]:
    """Return a serialized ObservationProto of zeros for `spec`, and the offset of its floats."""
    header = observation_header(spec.shape)
    out = header + bytes(4 * math.prod(spec.shape))
    if spec.dimension_property:
        out += delimited(6, b"".join(varint(int(p)) for p in spec.dimension_property))
    if spec.observation_type:
        out += varint(7 << 3) + varint(int(spec.observation_type))
    if spec.name:
        out += delimited(8, spec.name.encode())
    return out, len(header)
