"""Observation spaces of Gymnasium as the observations of a behavior.

A space is a tree; each leaf becomes one observation, in the order of the tree, named by its path:

    Box of rank 0, 1, 2, 4, ...      a vector of all its numbers
    Box of an image                  an image, channels first, bytes divided by 255
    Discrete, MultiDiscrete          one-hot vectors, one after another
    MultiBinary                      a vector of zeros and ones
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from pipeline.errors import SettingsError, UnityObservationException
from pipeline.protocol.specs import ObservationSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.arrays import FloatArray

    Put = Callable[[FloatArray, Any], None]
    Path = tuple[str | int, ...]

VISUAL = ("auto", "always", "never")
"""Which Boxes that could be images become visual observations; auto: those of 20 pixels or more."""
LEAST_SIDE = 20
"""Pixels that the default encoder needs along each side."""
CARRIED = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One observation of a behavior."""

    path: Path
    """Keys and indices that lead to it in the environment's observation."""
    spec: ObservationSpec
    """Its shape and name."""
    put: Put
    """Writes a value of the space into one agent's row, which holds zeros."""


class Observations:
    """Turns observations of one space into rows of arrays.

    Args:
        space: the environment's observation space.
        where: what to call the environment in errors.
        visual: one of `VISUAL`.

    Raises:
        SettingsError: The space, or a part of it, cannot be carried.
    """

    def __init__(self, space: Any, *, where: str, visual: str = "auto") -> None:
        if visual not in VISUAL:
            raise SettingsError(
                f"{where}: visual is '{visual}'; choose one of {', '.join(VISUAL)}."
            )
        self._where = where
        self.leaves = tuple(_leaves(space, (), where, visual))
        if not self.leaves:
            raise SettingsError(f"{where}: the observation space {space} has no observation.")

    @property
    def specs(self) -> list[ObservationSpec]:
        """One per leaf."""
        return [leaf.spec for leaf in self.leaves]

    def empty(self, n_agents: int) -> list[FloatArray]:
        """float32 [n_agents, *shape] of zeros for each leaf."""
        return [np.zeros((n_agents, *leaf.spec.shape), dtype=np.float32) for leaf in self.leaves]

    def put(self, arrays: list[FloatArray], row: int, observation: Any) -> None:
        """Write one agent's observation into `row` of the arrays that `empty` made.

        Raises:
            UnityObservationException: The environment's observation does not fit its space.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            value = observation
            try:
                for key in leaf.path:
                    value = value[key]
                leaf.put(array[row], value)
            except (ValueError, IndexError, KeyError, TypeError) as error:
                raise UnityObservationException(
                    f"{self._where}: the observation '{leaf.spec.name}' does not fit its space, "
                    f"which has the shape {leaf.spec.shape} here ({error}); repair the "
                    "environment's observation_space."
                ) from error


def _leaves(space: Any, path: Path, where: str, visual: str) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key), where, visual)
        return
    if isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index), where, visual)
        return
    name = "/".join(map(str, path)) or "observation"
    spec, put = _leaf(space, name, where, visual)
    if not math.prod(spec.shape):
        raise SettingsError(
            f"{where}: the observation '{name}' is {space}, which has no numbers in it; wrap the "
            "environment so that it leaves this observation out."
        )
    yield Leaf(path=path, spec=spec, put=put)


def _leaf(space: Any, name: str, where: str, visual: str) -> tuple[ObservationSpec, Put]:
    if isinstance(space, spaces.Box):
        if visual != "never" and (layout := image_layout(space)) is not None:
            channels, height, width = (space.shape + (1,) * (3 - len(space.shape)))[:3]
            if layout == "channels last":
                height, width, channels = channels, height, width
            if visual == "always" or min(height, width) >= LEAST_SIDE:
                return ObservationSpec.visual(channels, height, width, name), _image(space, layout)
        return ObservationSpec.vector(math.prod(space.shape), name), _put_numbers
    if isinstance(space, spaces.Discrete):
        return ObservationSpec.vector(int(space.n), name), _one_hot(int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = np.ravel(space.nvec)
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - np.ravel(space.start)
        return ObservationSpec.vector(int(sizes.sum()), name), _one_hots(first)
    if isinstance(space, spaces.MultiBinary):
        return ObservationSpec.vector(math.prod(space.shape), name), _put_numbers
    raise SettingsError(
        f"{where}: the observation '{name}' is a {type(space).__name__} space, which the protocol "
        f"cannot carry; wrap the environment so that it becomes one of {CARRIED}."
    )


def image_layout(space: spaces.Box) -> str | None:
    """`channels last`, `channels first`, or None when the Box is no image.

    An image is of bytes from 0 to 255, or of rank 3 with values from 0 to 1. Its channels are the
    shorter one of the first and the last axis, the last when they are equally long.
    """
    is_bytes = space.dtype == np.uint8 and bool(
        (space.low == 0).all() and (space.high == 255).all()
    )
    is_unit = bool((space.low == 0).all() and (space.high == 1).all())
    if len(space.shape) == 2:
        return "channels last" if is_bytes else None
    if len(space.shape) != 3 or not (is_bytes or is_unit):
        return None
    return "channels first" if space.shape[0] < space.shape[2] else "channels last"


def _image(space: spaces.Box, layout: str) -> Put:
    # A float32 divisor keeps bytes in float32: exactly value / 255, rounded once.
    divisor = np.float32(255 if space.dtype == np.uint8 else 1)
    shape = (*space.shape, 1) if len(space.shape) == 2 else space.shape
    axes = (0, 1, 2) if layout == "channels first" else (2, 0, 1)

    def put(row: FloatArray, value: Any) -> None:
        image = np.asarray(value).reshape(shape).transpose(axes)
        np.divide(image, divisor, out=row, casting="unsafe")

    return put


def _put_numbers(row: FloatArray, value: Any) -> None:
    row[:] = np.asarray(value).reshape(row.shape)


def _one_hot(start: int) -> Put:
    def put(row: FloatArray, value: Any) -> None:
        row[_within(int(value) - start, len(row))] = 1.0

    return put


def _one_hots(first: Any) -> Put:
    def put(row: FloatArray, value: Any) -> None:
        row[np.ravel(value) + first] = 1.0

    return put


def _within(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise IndexError(f"the value is number {index} of {size}")
    return index
