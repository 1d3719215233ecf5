"""What simulators of many like areas share: streams, parameters, and their whole state.

`Areas` holds any number of agents per area, which may come and go. `SoloAreas` has one agent in
each, and the steps that follow from that: a simulator built on it says only how an episode begins,
what a step does and what is seen, each for all areas at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import SettingsError
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


class SoloAreas(Areas, ABC):
    """N independent areas with one agent each, advanced together.

    Random numbers are drawn only when an episode begins, each area from its own stream, so what an
    area does depends neither on the number of areas nor on the other ones.

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
        super().__init__(name, seed=seed, n_agents=n_agents, per_area=1)
        self._behavior, self._max_step, self._n_draws = behavior, max_step, n_draws
        self._specs = {behavior: spec}
        self._n_steps = self._keep("n_steps", ())
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

    def _begin(self, rows: AnyArray) -> None:
        uniform = np.empty((len(rows), self._n_draws))
        for index, row in enumerate(rows.tolist()):
            self._rngs[row].random(out=uniform[index])
        self._n_steps[rows] = 0
        self._place(rows, uniform)

    def _check(self, action: ActionTuple) -> None:
        spec = self._specs[self._behavior].action_spec
        checked(action.continuous, (self._n_areas, spec.continuous_size), self._behavior)
        checked(action.discrete, (self._n_areas, spec.discrete_size), self._behavior)

    def _decisions(self, obs: list[FloatArray], reward: FloatArray) -> DecisionSteps:
        masks = self._masks()
        return DecisionSteps(obs, reward, self._agent_id, masks, self._no_group, self._no_reward)

    def _no_terminals(self) -> TerminalSteps:
        return TerminalSteps.empty(self._specs[self._behavior])


def checked(action: AnyArray, shape: tuple[int, int], behavior: str) -> AnyArray:
    """`action` if it has the shape that it must have.

    Raises:
        ValueError: It has another.
    """
    if action.shape != shape:
        raise ValueError(f"{behavior}: actions have the shape {action.shape}, expected {shape}")
    return action


def between(uniform: AnyArray, low: float, high: float) -> FloatArray:
    """Float32 numbers in [low, high) from `uniform` numbers in [0, 1)."""
    return np.asarray(low + (high - low) * uniform, dtype=np.float32)
