"""What agents see by rays, laid out as Unity's ray sensor does, and how they walk by it.

Points are (x, z). A heading is an angle clockwise from +z, seen from above, as Unity's is about y.
"""

from __future__ import annotations

import numpy as np

from pipeline.arrays import AnyArray, BoolArray, FloatArray
from pipeline.protocol.specs import ActionTuple, ObservationSpec

MOVES = np.array([0, 1, -1, 0, 0], dtype=np.float32)
"""Of a walker's actions: how far ahead each goes. Nothing, forward, back, turn right, turn left."""
TURNS = np.array([0, 0, 0, 1, -1])
"""Of a walker's actions: how many headings clockwise each turns."""
_FORWARD, _RIGHT, _LEFT = 1, 3, 4
_SMALLEST = np.float32(1e-6)
# Exact in float32, in which it is stored and compared.
HIDDEN = 1e4
"""A coordinate out of reach of every ray and agent."""


def spread(n_per_side: int, max_degrees: float) -> AnyArray:
    """[2 n + 1] angles of rays in degrees: 0, then to the right and to the left in turn."""
    angles = np.zeros(2 * n_per_side + 1)
    angles[1::2] = max_degrees * np.arange(1, n_per_side + 1) / n_per_side
    angles[2::2] = -angles[1::2]
    return angles


def directions(degrees: AnyArray) -> FloatArray:
    """Float32 [..., 2] unit vectors of headings; no component is zero, so that one may divide."""
    radians = np.radians(degrees)
    vectors = np.stack([np.sin(radians), np.cos(radians)], axis=-1).astype(np.float32)
    return np.where(np.abs(vectors) < _SMALLEST, _SMALLEST, vectors)


def to_walls(
    origin: FloatArray, direction: FloatArray, low: AnyArray | float, high: AnyArray | float
) -> FloatArray:
    """[N, R, 1] distance to the wall of the rectangle that the origin is in.

    Args:
        origin: [N, 2] where the rays begin.
        direction: [N, R, 2] unit vectors without zeros.
        low: least x and z of the rectangle; must broadcast to [N, R, 2].
        high: greatest x and z, likewise.
    """
    bound = np.where(direction > 0, high, low)
    distance = ((bound - origin[:, None]) / direction).min(axis=2, keepdims=True)
    return np.asarray(distance, dtype=np.float32)


def to_circles(
    origin: FloatArray, direction: FloatArray, centre: FloatArray, radius: AnyArray
) -> FloatArray:
    """[N, R, K] distance to circles, infinite where missed; from inside, a circle is not hit.

    Args:
        origin: [N, 2] where the rays begin.
        direction: [N, R, 2] unit vectors.
        centre: [N, K, 2].
        radius: [K].
    """
    offset = centre - origin[:, None]
    off_x, off_z = offset[:, None, :, 0], offset[:, None, :, 1]
    dir_x, dir_z = direction[:, :, None, 0], direction[:, :, None, 1]
    along = off_x * dir_x + off_z * dir_z
    across = off_x * dir_z - off_z * dir_x
    # Half of the chord, squared: negative where the ray passes by.
    half = radius * radius - across * across
    distance = along - np.sqrt(np.maximum(half, 0.0))
    return np.where((half >= 0.0) & (distance > 0.0), distance, np.float32(np.inf))


def encode(things: list[FloatArray], tag: AnyArray, n_tags: int, length: float) -> FloatArray:
    """[N, R * (n_tags + 2)] of each ray: one-hot tag hit, 1 if nothing hit, distance / length.

    Args:
        things: [N, R, ...] distances to things, M in all, infinite where missed.
        tag: [M] tag of each thing.
        n_tags: number of tags.
        length: how far a ray sees; beyond it the last number is 1.
    """
    distance = np.concatenate(things, axis=2)
    hit = distance.min(axis=2)
    # The tag behind the last one stands for nothing that was hit.
    nearest = np.where(hit <= length, tag[distance.argmin(axis=2)], n_tags)
    rays = np.empty((*hit.shape, n_tags + 2), dtype=np.float32)
    rays[:, :, :-1] = np.eye(n_tags + 1, dtype=np.float32)[nearest]
    rays[:, :, -1] = np.minimum(hit / np.float32(length), np.float32(1.0))
    return rays.reshape(len(rays), -1)


def sensor(degrees: AnyArray, n_tags: int) -> ObservationSpec:
    """Return the spec of what `encode` gives for these rays."""
    return ObservationSpec.vector(len(degrees) * (n_tags + 2), "RayPerceptionSensor")


def sights(rays: FloatArray, degrees: AnyArray, n_tags: int) -> tuple[AnyArray, FloatArray]:
    """[N, R] tag that each ray hits, -1 if none, and its distance as a part of the ray's length."""
    values = rays.reshape(len(rays), len(degrees), n_tags + 2)
    tag = np.where(values[..., n_tags] > 0.5, -1, values[..., :n_tags].argmax(axis=2))
    return tag, values[..., -1]


def nearest_ahead(seen: BoolArray, degrees: AnyArray) -> tuple[BoolArray, AnyArray]:
    """[N] whether any ray is in `seen`, and the angle of the one nearest to straight ahead."""
    angle = np.where(seen, np.abs(degrees), np.inf)
    return np.asarray(seen.any(axis=1)), degrees[angle.argmin(axis=1)]


def walk(bearing: AnyArray, turn_degrees: float) -> ActionTuple:
    """Go forward where that leads towards `bearing` [N] degrees to the right, else turn to it."""
    turn = np.where(relative(bearing) > 0.0, _RIGHT, _LEFT)
    # A little more than half a turn, or rounding could make it turn to and fro for ever.
    is_ahead = np.abs(relative(bearing)) <= 0.55 * turn_degrees
    return ActionTuple(discrete=np.where(is_ahead, _FORWARD, turn)[:, None])


def relative(degrees: AnyArray) -> AnyArray:
    """Return the same angles from -180 on and below 180."""
    return (degrees + 180.0) % 360.0 - 180.0
