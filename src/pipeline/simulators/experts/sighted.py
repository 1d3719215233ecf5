"""What experts that see by rays share: what is where, and how to walk there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, BoolArray, FloatArray

_FORWARD, _RIGHT, _LEFT = 1, 3, 4


def sights(rays: FloatArray, degrees: AnyArray, n_tags: int) -> tuple[AnyArray, FloatArray]:
    """[N, R] tag that each ray hits, -1 if none, and its distance as a part of the ray's length."""
    values = rays.reshape(len(rays), len(degrees), n_tags + 2)
    tag = np.where(values[..., n_tags] > 0.5, -1, values[..., :n_tags].argmax(axis=2))
    return tag, values[..., -1]


def nearest_ahead(seen: BoolArray, degrees: AnyArray) -> tuple[BoolArray, AnyArray]:
    """[N] whether a ray sees it, and the angle of the one that does nearest to straight ahead."""
    angle = np.where(seen, np.abs(degrees), np.inf)
    return np.asarray(seen.any(axis=1)), degrees[angle.argmin(axis=1)]


def walk(bearing: AnyArray, turn_degrees: float) -> ActionTuple:
    """Go forward where that leads towards `bearing` [N] degrees to the right, else turn to it."""
    bearing = (bearing + 180.0) % 360.0 - 180.0
    turn = np.where(bearing > 0.0, _RIGHT, _LEFT)
    choice = np.where(np.abs(bearing) <= 0.55 * turn_degrees, _FORWARD, turn)
    return ActionTuple(discrete=choice[:, None])
