"""An environment without a process: a simulator, stepped directly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.envs.base import StoredStepsEnv, closed_error
from pipeline.envs.side_channels import aggregation_of
from pipeline.protocol.parameters import Controls, Sampler
from pipeline.protocol.simulator import Restorable
from pipeline.protocol.specs import ActionTuple, check_spec

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
        self._restored: dict[str, ActionTuple] | None = None

    def reset(self) -> None:
        """Begin a new episode for every agent, and forget the set actions."""
        self._check_loaded()
        self._actions.clear()
        self._restored = None
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
        restored, self._restored = self._restored, None
        actions = self._take_actions() if restored is None else restored
        self._update(self._simulator.step(actions))

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
            stats.setdefault(name, []).append((value, aggregation_of(name, method)))
        return stats

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that the next step depends on, the set actions included.

        None when the simulator cannot be restored, or has not been reset.
        """
        if not isinstance(self._simulator, Restorable) or not self._is_reset:
            return None
        actions = self._take_actions()
        self._actions = dict(actions)
        return {
            "simulator": self._simulator.state_dict(),
            "controls": self._controls.state_dict(),
            "behaviors": list(self._specs),
            "actions": {
                name: {"continuous": action.continuous, "discrete": action.discrete}
                for name, action in actions.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; the next call is `step`.

        Raises:
            ValueError: The state is of another simulator.
        """
        self._check_loaded()
        if not isinstance(self._simulator, Restorable):
            super().load_state_dict(state)
            return
        self._simulator.load_state_dict(state["simulator"])
        self._controls.load_state_dict(state["controls"])
        specs = self._simulator.behavior_specs
        self._specs.update({name: specs[name] for name in state["behaviors"]})
        self._restored = {
            name: ActionTuple(action["continuous"], action["discrete"])
            for name, action in state["actions"].items()
        }
        self._is_reset = True

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
                check_spec(name, specs[name])
                self._specs[name] = specs[name]
        for name in self._specs:
            self._steps[name] = result[name] if name in result else self._no_agents(name)
