"""An environment without a process: a simulator, stepped directly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.envs.base import StoredStepsEnv, closed_error
from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.protocol.parameters import Controls, Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.envs.base import Stats
    from pipeline.protocol.simulator import Simulator
    from pipeline.protocol.steps import Steps


class InProcessEnvironment(StoredStepsEnv):
    """A simulator behind the same interface as `UnityEnvironment`, with the same semantics."""

    def __init__(self, simulator: Simulator) -> None:
        """Take ownership of `simulator`; `close` closes it."""
        super().__init__()
        self._simulator = simulator
        self._controls = Controls(simulator)
        self._is_reset = False
        self._loaded = True

    def reset(self) -> None:
        """Begin a new episode for every agent, and forget the set actions."""
        self._check_loaded()
        self._actions.clear()
        self._is_reset = True
        self._controls.draw()
        self._update(self._simulator.reset())

    def step(self) -> None:
        """Apply the set actions, zeros where none."""
        self._check_loaded()
        if not self._is_reset:
            self.reset()
            return
        self._controls.draw()
        self._update(self._simulator.step(self._take_actions()))

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter, from the next reading on; True.

        Numbers are rounded to float32, as they are on their way to an executable.
        """
        if isinstance(value, Sampler):
            rounded = tuple(float(np.float32(number)) for number in value.values)
            self._controls.set_sampler(name, replace(value, values=rounded))
        else:
            self._controls.set_value(name, float(np.float32(value)))
        return True

    def take_stats(self) -> Stats:
        """What the simulator has reported since the last call, by name."""
        stats: Stats = {}
        for name, value, method in self._controls.take_stats():
            stats.setdefault(name, []).append((value, StatsAggregationMethod(method)))
        return stats

    def close(self) -> None:
        """Close the simulator.

        Raises:
            UnityEnvironmentException: It is closed already.
        """
        self._check_loaded()
        self._loaded = False
        self._simulator.close()

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise closed_error()

    def _update(self, result: Mapping[str, Steps]) -> None:
        specs = self._simulator.behavior_specs
        for name, (decision, terminal) in result.items():
            if name not in self._specs and (len(decision) or len(terminal)):
                self._specs[name] = specs[name]
        for name in self._specs:
            self._steps[name] = result[name] if name in result else self._no_agents(name)
