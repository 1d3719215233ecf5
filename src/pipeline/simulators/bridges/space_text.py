"""Converts spaces of an environment to text for specifications and exported policies, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from pipeline.core.arrays import AnyArray


def to_text(**parts: Any) -> str:
    """Return named Gymnasium spaces and plain values as one line of JSON."""
    known = {k: _to_json(p) if isinstance(p, spaces.Space) else p for k, p in parts.items()}
    return json.dumps(known, separators=(",", ":"))


def from_text(text: str) -> dict[str, Any]:
    """Return the spaces and plain values that `to_text` wrote.

    Raises:
        ValueError: `to_text` did not write the text.
    """
    try:
        known = json.loads(text)
        return {k: _from_json(p) if isinstance(p, Mapping) else p for k, p in known.items()}
    except (AttributeError, AssertionError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is no description of spaces: {error}") from error


def _to_json(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        # The parts are pairs, because JSON's keys are texts, and the parts must keep their order.
        return {"dict": [[key, _to_json(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"tuple": [_to_json(part) for part in space.spaces]}
    if isinstance(space, spaces.MultiBinary):
        return {"multi_binary": np.asarray(space.n).tolist()}
    fields: dict[str, Any] = {"dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.Box):
        bounds = {"low": _short(space.low), "high": _short(space.high)}
        return {"box": list(space.shape), **fields, **bounds}
    if isinstance(space, spaces.Discrete):
        return {"discrete": int(space.n), **fields, "start": int(space.start)}
    return {"multi_discrete": space.nvec.tolist(), **fields, "start": space.start.tolist()}


def _short(bounds: AnyArray) -> Any:
    """Return bounds as one number if all are equal, otherwise as nested lists."""
    is_one = bounds.size > 0 and bool((bounds == bounds.flat[0]).all())
    return bounds.flat[0].item() if is_one else bounds.tolist()


def _from_json(known: Mapping[str, Any]) -> Any:
    if "dict" in known:
        return spaces.Dict([(key, _from_json(part)) for key, part in known["dict"]])
    if "tuple" in known:
        return spaces.Tuple([_from_json(part) for part in known["tuple"]])
    if "multi_binary" in known:
        return spaces.MultiBinary(known["multi_binary"])
    dtype: Any = np.dtype(known["dtype"])
    if "box" in known:
        shape = tuple(known["box"])
        low, high = (
            np.broadcast_to(np.asarray(known[bound], dtype=dtype), shape)
            for bound in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype.type)
    # Before Gymnasium 1.3, a Discrete space has no argument `dtype` and is always int64.
    kind = {} if dtype == np.int64 else {"dtype": dtype.type}
    if "discrete" in known:
        return spaces.Discrete(known["discrete"], start=known["start"], **kind)
    return spaces.MultiDiscrete(np.asarray(known["multi_discrete"]), start=known["start"], **kind)
