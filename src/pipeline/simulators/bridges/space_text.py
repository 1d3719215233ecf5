"""Converts spaces of an environment to text for specifications and exported policies, and back."""

import json
from typing import Any

import numpy as np
from gymnasium import spaces

_ARGUMENTS: dict[type, tuple[str, ...]] = {
    spaces.Dict: ("spaces",),
    spaces.Tuple: ("spaces",),
    spaces.Box: ("shape", "dtype", "low", "high"),
    spaces.Discrete: ("n", "dtype", "start"),
    spaces.MultiDiscrete: ("nvec", "dtype", "start"),
    spaces.MultiBinary: ("n",),
}
"""Arguments that make each kind of space, which are also the names of its attributes."""


def to_text(**parts: Any) -> str:
    """Return one line of JSON with spaces and plain values, by name."""
    return json.dumps(parts, default=_to_plain, separators=(",", ":"))


def from_text(text: str) -> Any:
    """Return the spaces and plain values that `to_text` wrote; other texts raise any exception."""
    return json.loads(text, object_hook=_to_space)


def _to_plain(value: Any) -> Any:
    """Return what JSON cannot write, a space or an attribute of one, by simpler values."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    kind = next(kind for kind in _ARGUMENTS if isinstance(value, kind))
    given = {name: getattr(value, name) for name in _ARGUMENTS[kind]}
    if kind is spaces.Dict:
        # The parts are pairs, because JSON's keys are texts, and the parts must keep their order.
        given["spaces"] = list(value.spaces.items())
    for name in ("low", "high") if kind is spaces.Box else ():
        # An image has thousands of equal bounds.
        if given[name].size and (given[name] == given[name].flat[0]).all():
            given[name] = given[name].flat[0]
    return {"space": kind.__name__, **given}


def _to_space(known: dict[str, Any]) -> Any:
    if "space" not in known:
        return known
    kinds: dict[str, Any] = {kind.__name__: kind for kind in _ARGUMENTS}
    kind, dtype = kinds[known.pop("space")], np.dtype(known.pop("dtype", np.int64))
    if kind is spaces.Box:
        bounds = (np.asarray(known[name], dtype) for name in ("low", "high"))
        known["low"], known["high"] = (np.broadcast_to(bound, known["shape"]) for bound in bounds)
    # Before Gymnasium 1.3, a Discrete space has no argument `dtype` and is always int64.
    if kind is spaces.Box or dtype != np.int64:
        known["dtype"] = dtype.type
    return kind(**known)
