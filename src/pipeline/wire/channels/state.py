"""The state side channel: a trainer asks an environment for its state, and later restores it.

A message is an int32 version, an int32 type, and a content that depends on the type. The trainer
never reads a state: only the environment knows the meaning of its bytes. Our simulators write
arrays and JSON (`encode`), and read the same format only (`decode`). docs/explanation/resume.md
describes the channel for authors of other environments.
"""

import io
import json
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.errors import UnitySideChannelException

VERSION = 1
MAX_STATE_BYTES = 1 << 27
"""Largest state of one environment, in bytes. The general gRPC runtime accepts messages of up
to twice this size.
"""

_HEAD = struct.Struct("<ii")
_LENGTH = struct.Struct("<q")
_ARRAY = "array"
# NumPy's letters for the dtypes bool, int, unsigned int and float. Other dtypes are refused,
# because their values may be Python objects.
_DTYPE_KINDS = "biuf"
# Largest number of dimensions of an array in NumPy 1.
_MAX_DIMENSIONS = 32


class StateMessageType(IntEnum):
    """Type of a state message; the environment answers a request with the same type."""

    CAN = 0
    """Trainer: can the environment give its state? Environment: yes."""
    STATE = 1
    """Trainer: send the state before this step. Environment: the state."""
    RESTORE = 2
    """Trainer: restore this state instead of beginning episodes. Environment: done."""
    CANNOT = 3
    """Environment: it cannot do what was requested; the content is the reason (UTF-8)."""


def message(kind: StateMessageType, content: bytes = b"") -> bytes:
    """Return the payload of a message; raise ValueError if the content is too large."""
    if len(content) > MAX_STATE_BYTES:
        raise ValueError(
            f"the environment's state has {len(content)} bytes, at most {MAX_STATE_BYTES} can be "
            "sent: leave out values that can be computed again"
        )
    return _HEAD.pack(VERSION, kind) + content


def read(payload: bytes) -> tuple[StateMessageType, bytes]:
    """Return a message's type and content; raise UnitySideChannelException if it is invalid."""
    if len(payload) < _HEAD.size:
        raise UnitySideChannelException(
            f"a message of {len(payload)} bytes on the state channel is cut off: version and type "
            f"take {_HEAD.size} bytes"
        )
    version, kind = _HEAD.unpack_from(payload)
    # Python 3.11 refuses to look for a plain number in an Enum, but not in a list.
    if version != VERSION or kind not in list(StateMessageType):
        raise UnitySideChannelException(
            f"a message of version {version} and type {kind} arrived on the state channel; version "
            f"{VERSION} and types 0 to {max(StateMessageType)} are supported"
        )
    if len(payload) > _HEAD.size + MAX_STATE_BYTES:
        raise UnitySideChannelException(
            f"a state of {len(payload)} bytes arrived; at most {MAX_STATE_BYTES} are possible: "
            "leave out values that can be computed again"
        )
    return StateMessageType(kind), payload[_HEAD.size :]


def encode(state: Mapping[str, Any]) -> bytes:
    """Serialize nested maps and lists of plain values and arrays: a JSON text, then the arrays.

    Raises:
        ValueError: A value has another type, or a key is not a text.
    """
    # Arrays are not in the JSON text, because they would take more space there and lose the dtype.
    arrays: list[AnyArray] = []
    text = json.dumps(_plain(state, arrays, "state")).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode(data: bytes) -> dict[str, Any]:
    """Return what `encode` serialized, with lists for tuples; ValueError for other bytes."""
    rest = io.BytesIO(data)
    try:
        (length,) = _LENGTH.unpack(rest.read(_LENGTH.size))
        state = _restored(json.loads(_taken(rest, length)), rest)
    # A RecursionError means that the JSON is nested more deeply than Python can parse.
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"these bytes are not an environment's state ({error})") from error
    if not isinstance(state, dict) or rest.read():
        raise ValueError(
            "these bytes are not an environment's state (the JSON is no map, or "
            "bytes follow the arrays)"
        )
    return state


def _taken(rest: io.BytesIO, size: int) -> bytes:
    if not 0 <= size <= len(rest.getbuffer()) - rest.tell():
        raise ValueError("the JSON text or an array is cut off")
    return rest.read(size)


def _array(rest: io.BytesIO, dtype: Any, shape: Any) -> AnyArray:
    kind = np.dtype(str(dtype))
    sizes = [int(size) for size in shape or ()]
    if kind.kind not in _DTYPE_KINDS or len(sizes) > _MAX_DIMENSIONS or min(sizes, default=0) < 0:
        raise ValueError(f"an array of type {kind} and shape {sizes} is not allowed")
    # Python's integers, unlike NumPy's, do not overflow with the sizes of a damaged state.
    content = _taken(rest, kind.itemsize * math.prod(sizes))
    array = np.frombuffer(content, dtype=kind).reshape(sizes)
    # A shape of None belongs to a NumPy scalar. An array is copied, because a view of bytes is
    # read-only.
    return array[()] if shape is None else array.copy()


def _plain(value: Any, arrays: list[AnyArray], path: str) -> Any:
    # A `numpy.str_` is an `np.generic`, but also a `str`, so JSON can write it.
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str):
        if value.dtype.kind not in _DTYPE_KINDS:
            raise ValueError(f"{path}: an array of type {value.dtype} does not hold numbers")
        arrays.append(np.asarray(value))
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {_ARRAY: [value.dtype.str, shape]}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{path}: the key {odd[0]!r} is not a text")
        # A map is stored under the key "map", so that a user's key "array" is not read as an array.
        return {"map": {k: _plain(item, arrays, f"{path}.{k}") for k, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(item, arrays, f"{path}[{at}]") for at, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{path}: a {type(value).__name__} is neither an array nor a number, text, list or map"
    )


def _restored(value: Any, rest: io.BytesIO) -> Any:
    """Return a value of the JSON text; its arrays follow each other in `rest`."""
    if isinstance(value, list):
        return [_restored(item, rest) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return _array(rest, *value[_ARRAY])
    return {key: _restored(item, rest) for key, item in value["map"].items()}
