"""What simulators of many like areas share: streams, parameters, and their whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import SettingsError
from pipeline.protocol.parameters import Parameters
from pipeline.seeding import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.arrays import AnyArray


class Areas:
    """Areas that know nothing of each other, each with a random stream of its own.

    A subclass allocates every array that later steps depend on with `_keep`, and changes it in
    place; then it can be restored.

    Args:
        name: of the simulator; names its streams.
        seed: seed of everything random; area i does the same whatever the number of areas.
        n_agents: agents in all areas together.
        per_area: agents in one area.

    Raises:
        SettingsError: The agents do not fill whole areas.
    """

    def __init__(self, name: str, *, seed: int, n_agents: int, per_area: int) -> None:
        if n_agents < 1 or n_agents % per_area:
            raise SettingsError(
                f"{name}: the number of agents must be a positive multiple of {per_area}, which "
                f"play in one area, got {n_agents}; change n_agents or --num-agents."
            )
        self.parameters = Parameters()
        self._n_areas = n_agents // per_area
        self._rngs = [stream(seed, name, area) for area in range(self._n_areas)]
        self._kept: dict[str, AnyArray] = {}

    def set_parameter(self, name: str, value: float) -> None:
        """Keep a parameter; it is read when the next episode begins."""
        self.parameters.set_value(name, value)

    def close(self) -> None:
        """Nothing to free."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        return {
            "streams": [rng.bit_generator.state for rng in self._rngs],
            "parameters": self.parameters.state_dict(),
            "arrays": {name: values.copy() for name, values in self._kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for rng, saved in zip(self._rngs, state["streams"], strict=True):
            rng.bit_generator.state = saved
        self.parameters.load_state_dict(state["parameters"])
        for name, values in self._kept.items():
            values[:] = state["arrays"][name]

    def _keep(self, name: str, shape: tuple[int, ...], dtype: type = np.int64) -> AnyArray:
        """A new array [areas, *shape] of zeros that is part of the state."""
        self._kept[name] = np.zeros((self._n_areas, *shape), dtype=dtype)
        return self._kept[name]


def checked(action: AnyArray, shape: tuple[int, int], behavior: str) -> AnyArray:
    """`action` if it has the shape that it must have.

    Raises:
        ValueError: It has another.
    """
    if action.shape != shape:
        raise ValueError(f"{behavior}: actions have the shape {action.shape}, expected {shape}")
    return action
