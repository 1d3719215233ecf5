"""What simulators of many separate areas with one agent each have in common.

A simulator built on `SoloAreas` says how an episode begins, what a step does and what is seen, each
for all areas at once. Random numbers are drawn only when an episode begins, each area from its own
stream, so what an area does depends neither on the number of areas nor on the other ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.protocol.parameters import Parameters
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.seeding import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.protocol.specs import ActionTuple, BehaviorSpec
    from pipeline.protocol.steps import Steps

    Rows = AnyArray | slice
    """Numbers of some areas, or a slice of all."""

ALL = slice(None)


class SoloAreas(ABC):
    """N independent areas with one agent each, advanced together.

    Args:
        name: name of the areas' random streams.
        behavior: fully qualified behavior name.
        spec: what an agent observes and does.
        max_step: decisions after which an episode is interrupted.
        n_draws: uniform numbers that the beginning of an episode takes.
        seed: seed of the episodes' beginnings.
        n_agents: number of areas.
    """

    def __init__(
        self,
        *,
        name: str,
        behavior: str,
        spec: BehaviorSpec,
        max_step: int,
        n_draws: int,
        seed: int,
        n_agents: int,
    ) -> None:
        self.parameters = Parameters()
        self._behavior, self._max_step, self._n_draws = behavior, max_step, n_draws
        self._specs = {behavior: spec}
        self._rngs = [stream(seed, name, row) for row in range(n_agents)]
        self._n_steps = np.zeros(n_agents, dtype=np.int64)
        self._agent_id = np.arange(n_agents, dtype=np.int32)
        self._no_group = np.zeros(n_agents, dtype=np.int32)
        self._no_reward = np.zeros(n_agents, dtype=np.float32)

    @abstractmethod
    def _place(self, rows: AnyArray, uniform: AnyArray) -> None:
        """Lay out the episodes that begin in `rows` [K] from `uniform` [K, n_draws] in [0, 1)."""

    @abstractmethod
    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Apply an action per area; give each area's reward and whether its task has ended."""

    @abstractmethod
    def _observe(self, rows: Rows) -> list[FloatArray]:
        """New arrays of what the agents of `rows` see."""

    @abstractmethod
    def _arrays(self) -> dict[str, AnyArray]:
        """The arrays that hold the areas' state, changed in place only."""

    def _masks(self) -> list[BoolArray] | None:
        """Per branch [N, size], True where an action is forbidden; None forbids nothing."""
        return None

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """The one behavior."""
        return self._specs

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every area."""
        self._begin(self._agent_id)
        decisions = self._decisions(self._observe(ALL), self._no_reward.copy())
        return {self._behavior: (decisions, self._no_terminals())}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Advance every area by one decision; those whose episode ends begin their next."""
        action = actions[self._behavior]
        self._check(action)
        self._n_steps += 1
        reward, terminated = self._advance(action)
        obs = self._observe(ALL)
        ended = terminated | (self._n_steps >= self._max_step)
        if not ended.any():
            return {self._behavior: (self._decisions(obs, reward), self._no_terminals())}
        rows = np.flatnonzero(ended)
        terminals = TerminalSteps(
            obs=[values[rows] for values in obs],
            reward=reward[rows],
            interrupted=~terminated[rows],
            agent_id=self._agent_id[rows],
            group_id=self._no_group[rows],
            group_reward=self._no_reward[rows],
        )
        self._begin(rows)
        for values, first in zip(obs, self._observe(rows), strict=True):
            values[rows] = first
        reward[rows] = 0.0
        return {self._behavior: (self._decisions(obs, reward), terminals)}

    def set_parameter(self, name: str, value: float) -> None:
        """Set an environment parameter; it is read when an episode begins."""
        self.parameters.set_value(name, value)

    def close(self) -> None:  # noqa: B027  # most simulators have nothing to free
        """Nothing to free."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        return {
            "streams": [rng.bit_generator.state for rng in self._rngs],
            "parameters": self.parameters.state_dict(),
            "n_steps": self._n_steps.copy(),
            **{name: values.copy() for name, values in self._arrays().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for rng, saved in zip(self._rngs, state["streams"], strict=True):
            rng.bit_generator.state = saved
        self.parameters.load_state_dict(state["parameters"])
        self._n_steps[:] = state["n_steps"]
        for name, values in self._arrays().items():
            values[:] = state[name]

    def _begin(self, rows: AnyArray) -> None:
        uniform = np.empty((len(rows), self._n_draws))
        for index, row in enumerate(rows.tolist()):
            self._rngs[row].random(out=uniform[index])
        self._n_steps[rows] = 0
        self._place(rows, uniform)

    def _check(self, action: ActionTuple) -> None:
        spec, n_agents = self._specs[self._behavior].action_spec, len(self._agent_id)
        for given, size in (
            (action.continuous, spec.continuous_size),
            (action.discrete, spec.discrete_size),
        ):
            if given.shape != (n_agents, size):
                raise ValueError(
                    f"{self._behavior}: actions have the shape {given.shape}, "
                    f"expected {(n_agents, size)}"
                )

    def _decisions(self, obs: list[FloatArray], reward: FloatArray) -> DecisionSteps:
        masks = self._masks()
        return DecisionSteps(obs, reward, self._agent_id, masks, self._no_group, self._no_reward)

    def _no_terminals(self) -> TerminalSteps:
        return TerminalSteps.empty(self._specs[self._behavior])


def between(uniform: AnyArray, low: float, high: float) -> FloatArray:
    """Float32 numbers in [low, high) from `uniform` numbers in [0, 1)."""
    return np.asarray(low + (high - low) * uniform, dtype=np.float32)
