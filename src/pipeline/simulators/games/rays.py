"""Ray observations in the layout of Unity's ray sensor, and helpers of experts that use them.

Points are (x, z). A heading is an angle clockwise from +z, seen from above, as Unity's angle about
the y axis.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionTuple, ObservationSpec

# Signed distance, in steps, that each action moves the agent forward: nothing, forward, back, turn
# right, turn left.
MOVES = np.array([0, 1, -1, 0, 0], dtype=np.float32)
TURNS = np.array([0, 0, 0, 1, -1])  # clockwise turn of each action as a number of headings
_FORWARD, _RIGHT, _LEFT = 1, 3, 4
# This number replaces 0 in directions, so that a division by it gives a large and finite distance.
_SMALLEST = np.float32(1e-6)
# float32 represents this number exactly, because stored float32 coordinates are compared with it.
HIDDEN = 1e4  # a coordinate that no ray and no agent can reach


def spread(n_per_side: int, max_degrees: float) -> AnyArray:
    """Return [2 n + 1] angles of rays in degrees: 0, then alternating to the right and left."""
    angles = np.zeros(2 * n_per_side + 1)
    angles[1::2] = max_degrees * np.arange(1, n_per_side + 1) / n_per_side
    angles[2::2] = -angles[1::2]
    return angles


def directions(degrees: AnyArray) -> FloatArray:
    """Return float32 [..., 2] unit vectors of headings.

    No component is 0, because callers divide by the components.
    """
    radians = np.radians(degrees)
    vectors = np.stack([np.sin(radians), np.cos(radians)], axis=-1).astype(np.float32)
    return np.where(np.abs(vectors) < _SMALLEST, _SMALLEST, vectors)


def to_walls(
    origin: FloatArray, direction: FloatArray, low: AnyArray | float, high: AnyArray | float
) -> FloatArray:
    """Return [N, R, 1] distances from `origin` [N, 2] to the walls of the rectangle around it.

    `direction` [N, R, 2] are unit vectors without zeros. `low` and `high`, which must broadcast to
    [N, R, 2], are the smallest and the largest x and z of the rectangle.
    """
    # A ray in a rectangle hits the nearer one of the two walls that it points to.
    bound = np.where(direction > 0, high, low)
    distance = ((bound - origin[:, None]) / direction).min(axis=2, keepdims=True)
    return np.asarray(distance, dtype=np.float32)


def to_circles(
    origin: FloatArray, direction: FloatArray, centre: FloatArray, radius: AnyArray
) -> FloatArray:
    """Return [N, R, K] distances from `origin` [N, 2] to circles with `centre` [N, K, 2].

    A distance is infinite if a ray misses the circle or begins inside of it. `direction` [N, R, 2]
    are unit vectors, `radius` is [K].
    """
    offset = centre - origin[:, None]
    off_x, off_z = offset[:, None, :, 0], offset[:, None, :, 1]
    dir_x, dir_z = direction[:, :, None, 0], direction[:, :, None, 1]
    along = off_x * dir_x + off_z * dir_z
    # The distance of the centre from the ray's line, as a cross product.
    across = off_x * dir_z - off_z * dir_x
    # The square of half the chord; negative if the ray misses the circle.
    half = radius * radius - across * across
    distance = along - np.sqrt(np.maximum(half, 0.0))
    return np.where((half >= 0.0) & (distance > 0.0), distance, np.float32(np.inf))


def encode(things: list[FloatArray], tag: AnyArray, n_tags: int, length: float) -> FloatArray:
    """Return [N, R * (n_tags + 2)]; per ray: one-hot tag, 1 if nothing is hit, distance / length.

    `things` are [N, R, ...] distances to M things in all, infinite if missed, and `tag` [M] their
    tags. Beyond `length`, the rays' length, nothing is hit, and the last number is 1.
    """
    distance = np.concatenate(things, axis=2)
    hit = distance.min(axis=2)
    # The index after the last tag means that nothing was hit.
    nearest = np.where(hit <= length, tag[distance.argmin(axis=2)], n_tags)
    rays = np.empty((*hit.shape, n_tags + 2), dtype=np.float32)
    rays[:, :, :-1] = np.eye(n_tags + 1, dtype=np.float32)[nearest]
    rays[:, :, -1] = np.minimum(hit / np.float32(length), np.float32(1.0))
    return rays.reshape(len(rays), -1)


def sensor(degrees: AnyArray, n_tags: int) -> ObservationSpec:
    """Return the spec of the observation that `encode` returns for these rays."""
    return ObservationSpec.vector(len(degrees) * (n_tags + 2), "RayPerceptionSensor")


def sights(rays: FloatArray, degrees: AnyArray, n_tags: int) -> tuple[AnyArray, FloatArray]:
    """Return the tag that each ray hits, -1 for none, and distance / ray length: [N, R] each."""
    values = rays.reshape(len(rays), len(degrees), n_tags + 2)
    tag = np.where(values[..., n_tags] > 0.5, -1, values[..., :n_tags].argmax(axis=2))
    return tag, values[..., -1]


def nearest_ahead(seen: BoolArray, degrees: AnyArray) -> tuple[BoolArray, AnyArray]:
    """Return whether any ray of an agent is True in `seen` [N, R], and the angle of such a ray.

    Both results are [N]; the angle, in degrees, is that of the most central of these rays.
    """
    angle = np.where(seen, np.abs(degrees), np.inf)
    return np.asarray(seen.any(axis=1)), degrees[angle.argmin(axis=1)]


def walk(bearing: AnyArray, turn_degrees: float) -> ActionTuple:
    """Return moves: forward if `bearing` [N], degrees to the right, is about 0; else a turn."""
    turn = np.where(relative(bearing) > 0.0, _RIGHT, _LEFT)
    # The limit is a little more than half a turn: at exactly half, rounding could make an agent
    # turn back and forth forever.
    is_ahead = np.abs(relative(bearing)) <= 0.55 * turn_degrees
    return ActionTuple(discrete=np.where(is_ahead, _FORWARD, turn)[:, None])


def relative(degrees: AnyArray) -> AnyArray:
    """Return angles in degrees moved into [-180, 180) by full turns."""
    return (degrees + 180.0) % 360.0 - 180.0
