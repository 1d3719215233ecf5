"""Action spaces of Gymnasium as the actions of a behavior.

Box becomes continuous actions, rescaled from -1..1 to its bounds; Discrete, MultiDiscrete and
MultiBinary become branches; Dict and Tuple of these become both, in the order of the tree.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.protocol.specs import ActionSpec
from pipeline.simulators.bridges.observations import CARRIED

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.arrays import AnyArray, BoolArray
    from pipeline.protocol.specs import ActionTuple

    Build = Callable[[AnyArray, AnyArray], Any]


class Actions:
    """Turns actions of a behavior into those of one space.

    Args:
        space: the environment's action space.
        where: what to call the environment in errors.
        scale: what an action of 1 means along a dimension of a Box without finite bounds; None
            refuses such a dimension.

    Raises:
        SettingsError: The space, or a part of it, cannot be carried.
    """

    def __init__(self, space: Any, *, where: str, scale: float | None = None) -> None:
        self._where = where
        self._scale = scale
        self._low: list[AnyArray] = []
        self._span: list[AnyArray] = []
        self._limits: list[tuple[AnyArray, AnyArray]] = []
        self._branches: list[int] = []
        self._build = self._builder(space, ())
        n_continuous = sum(map(len, self._low))
        self.spec = ActionSpec(n_continuous, tuple(self._branches))
        if not n_continuous and not self._branches:
            raise SettingsError(f"{where}: the action space {space} has no action.")
        self._offset, self._width = _joined(self._low), _joined(self._span)
        self._least = _joined([low for low, _ in self._limits])
        self._most = _joined([high for _, high in self._limits])
        self._start = int(space.start) if isinstance(space, spaces.Discrete) else None

    def native(self, actions: ActionTuple) -> list[Any]:
        """One action of the space for each row of `actions`; numbers beyond -1..1 are clipped."""
        if self._start is not None:
            return (actions.discrete[:, 0] + self._start).tolist()  # type: ignore[no-any-return]  # ints
        continuous: AnyArray = np.clip(actions.continuous.astype(np.float64), -1.0, 1.0)
        continuous = self._offset + (continuous + 1.0) / 2.0 * self._width
        continuous = np.clip(continuous, self._least, self._most)
        return [
            self._build(numbers, choices)
            for numbers, choices in zip(continuous, actions.discrete, strict=True)
        ]

    def forbidden(self, mask: Any) -> BoolArray:
        """Bool [sum of branch sizes], True = forbidden, of a mask in which 1 means allowed.

        Raises:
            UnityEnvironmentException: The mask does not fit, or forbids a whole branch.
        """
        parts = mask if isinstance(mask, tuple | list) else [mask]
        flat = np.concatenate([np.ravel(part) for part in parts]) == 0
        if len(flat) != sum(self._branches):
            raise UnityEnvironmentException(
                f"{self._where}: its action mask has {len(flat)} entries, but the discrete actions "
                f"have {sum(self._branches)} choices; repair the environment's action_mask."
            )
        first = 0
        for branch, size in enumerate(self._branches):
            if flat[first : first + size].all():
                raise UnityEnvironmentException(
                    f"{self._where}: its action mask forbids every choice of the discrete action "
                    f"{branch} to an agent that must act; repair the environment's action_mask."
                )
            first += size
        return np.asarray(flat)

    def masks(self, forbidden: BoolArray) -> list[BoolArray]:
        """`forbidden` [N, sum of branch sizes] by branch."""
        return np.split(forbidden, np.cumsum(self._branches)[:-1], axis=1)

    def _builder(self, space: Any, path: tuple[str | int, ...]) -> Build:
        """Gives a space's action for one agent's continuous and discrete actions."""
        if isinstance(space, spaces.Dict):
            named = {key: self._builder(part, (*path, key)) for key, part in space.spaces.items()}
            return lambda c, d: {key: build(c, d) for key, build in named.items()}
        if isinstance(space, spaces.Tuple):
            parts = [self._builder(part, (*path, i)) for i, part in enumerate(space.spaces)]
            return lambda c, d: tuple(build(c, d) for build in parts)
        if isinstance(space, spaces.Box):
            return self._box(space, path)
        first = len(self._branches)
        if isinstance(space, spaces.Discrete):
            self._branches.append(int(space.n))
            start = int(space.start)
            return lambda _, d: int(d[first]) + start
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            return self._choices(space)
        raise SettingsError(
            f"{self._where}: the action '{_name(path)}' is a {type(space).__name__} space, which "
            f"the protocol cannot carry; wrap the environment so that it becomes one of {CARRIED}."
        )

    def _choices(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> Build:
        shape, dtype, start = space.shape, space.dtype, np.zeros(space.shape, dtype=np.int64)
        first, size = len(self._branches), math.prod(shape)
        if isinstance(space, spaces.MultiDiscrete):
            self._branches += np.ravel(space.nvec).tolist()
            start = start + space.start
        else:
            self._branches += [2] * size
        return lambda _, d: (d[first : first + size].reshape(shape) + start).astype(dtype)

    def _box(self, space: spaces.Box, path: tuple[str | int, ...]) -> Build:
        low = np.ravel(space.low).astype(np.float64)
        high = np.ravel(space.high).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        if not bounded.all() and self._scale is None:
            raise SettingsError(
                f"{self._where}: the action '{_name(path)}' has no finite bounds in dimension "
                f"{int(np.argmin(bounded))} ({space}); give the option action_scale, the value "
                "that an action of 1 shall have there."
            )
        scale = self._scale or 0.0
        first = sum(map(len, self._low))
        self._low.append(np.where(bounded, low, -scale))
        self._span.append(np.where(bounded, high, scale) - self._low[-1])
        self._limits.append((low, high))
        shape, dtype, whole = space.shape, space.dtype, np.issubdtype(space.dtype, np.integer)
        last = first + len(low)

        def build(c: AnyArray, _: AnyArray) -> AnyArray:
            numbers = np.rint(c[first:last]) if whole else c[first:last]
            return numbers.reshape(shape).astype(dtype)

        return build


def _joined(parts: list[AnyArray]) -> AnyArray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _name(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path)) or "action"
