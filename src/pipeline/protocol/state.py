"""The state side channel: a trainer asks an environment for its state, and gives it back.

A message is an int32 version, an int32 kind, and the kind's content. The trainer never looks into a
state: only the environment knows what the bytes mean. Our own environments write arrays and JSON
(`encode`), and read nothing else (`decode`). docs/explanation/resume.md describes the channel for
authors of other environments.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from pipeline.arrays import AnyArray
from pipeline.errors import UnitySideChannelException

VERSION = 1
MAX_STATE_BYTES = 1 << 27
"""Bytes of one environment's state; a message of the general gRPC runtime has at most twice as
many."""

_HEAD = struct.Struct("<ii")
_LENGTH = struct.Struct("<q")
_ARRAY = "array"
_KINDS = "biuf"
_MAX_DIMENSIONS = 32


class Kind(IntEnum):
    """What a message says; the environment answers a request with the same number."""

    CAN = 0
    """Trainer: can the environment give its state? Environment: it can."""
    STATE = 1
    """Trainer: send the state as it is before this step. Environment: the state."""
    RESTORE = 2
    """Trainer: take up this state instead of beginning episodes. Environment: done."""
    CANNOT = 3
    """Environment: it cannot do what was asked, and why (UTF-8)."""


def message(kind: Kind, content: bytes = b"") -> bytes:
    """Return the payload of a message.

    Raises:
        ValueError: The content is larger than a state may be.
    """
    if len(content) > MAX_STATE_BYTES:
        raise ValueError(f"its state has {len(content)} bytes, the most is {MAX_STATE_BYTES}")
    return _HEAD.pack(VERSION, kind) + content


def read(payload: bytes) -> tuple[Kind, bytes]:
    """Return kind and content of a message.

    Raises:
        UnitySideChannelException: It is cut off, too large, or of another version.
    """
    if len(payload) < _HEAD.size:
        raise UnitySideChannelException(
            f"a message of {len(payload)} bytes on the state channel is cut off: version and kind "
            f"take {_HEAD.size}"
        )
    version, kind = _HEAD.unpack_from(payload)
    # A list, because Python 3.11 refuses to look for a plain number in an Enum.
    if version != VERSION or kind not in list(Kind):
        raise UnitySideChannelException(
            f"a message of version {version} and kind {kind} came on the state channel; version "
            f"{VERSION} and kinds 0 to {max(Kind)} are understood here"
        )
    if len(payload) > _HEAD.size + MAX_STATE_BYTES:
        raise UnitySideChannelException(
            f"a state of {len(payload)} bytes came, the most is {MAX_STATE_BYTES}: leave out what "
            "can be computed again"
        )
    return Kind(kind), payload[_HEAD.size :]


def encode(state: Mapping[str, Any]) -> bytes:
    """Return nested maps and lists of plain values and arrays as JSON followed by the arrays.

    Raises:
        ValueError: Something else is in it, or a key is not a text.
    """
    arrays: list[AnyArray] = []
    text = json.dumps(_plain(state, arrays, "state")).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode(data: bytes) -> dict[str, Any]:
    """Return the state that `encode` was given, tuples as lists; arrays are new.

    Raises:
        ValueError: These are not the bytes of a state.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        arrays = _Arrays(data, start)
        state = _restored(json.loads(data[_LENGTH.size : start]), arrays)
    # RecursionError: JSON may be nested deeper than Python follows it.
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"these bytes are no environment's state ({error})") from error
    if not isinstance(state, dict) or arrays.position != len(data):
        raise ValueError("these bytes are no environment's state (there are too many)")
    return state


class _Arrays:
    """Takes arrays one after another from the bytes after the text."""

    def __init__(self, data: bytes, position: int) -> None:
        if not _LENGTH.size <= position <= len(data):
            raise ValueError("it is cut off")
        self._data, self.position = data, position

    def take(self, dtype: Any, shape: Any) -> AnyArray:
        kind = np.dtype(str(dtype))
        sizes = [int(size) for size in shape or ()]
        if kind.kind not in _KINDS or len(sizes) > _MAX_DIMENSIONS or min(sizes, default=0) < 0:
            raise ValueError(f"an array of type {kind} and shape {sizes}")
        # In Python's integers, which the sizes of a damaged state cannot make overflow.
        end = self.position + kind.itemsize * math.prod(sizes)
        if end > len(self._data):
            raise ValueError("it is cut off")
        array = np.frombuffer(self._data[self.position : end], dtype=kind).reshape(sizes)
        self.position = end
        # Without a shape it was a NumPy scalar. A view of bytes could not be written to.
        return array[()] if shape is None else array.copy()


def _plain(value: Any, arrays: list[AnyArray], path: str) -> Any:
    # NumPy's texts are `np.generic`, too; JSON takes them as the texts that they are.
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str):
        if value.dtype.kind not in _KINDS:
            raise ValueError(f"{path}: an array of type {value.dtype} is not of numbers")
        arrays.append(np.asarray(value))
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {_ARRAY: [value.dtype.str, shape]}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{path}: the key {odd[0]!r} is not a text")
        # a map of the user's cannot be taken for an array
        return {"map": {k: _plain(item, arrays, f"{path}.{k}") for k, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(item, arrays, f"{path}[{at}]") for at, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{path}: a {type(value).__name__} is neither an array nor a number, text, list or map"
    )


def _restored(value: Any, arrays: _Arrays) -> Any:
    if isinstance(value, list):
        return [_restored(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays.take(*value[_ARRAY])
    return {key: _restored(item, arrays) for key, item in value["map"].items()}
