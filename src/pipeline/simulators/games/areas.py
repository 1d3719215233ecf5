"""Base classes of built-in simulators: random streams, parameters, state, steps of equal areas.

`Areas` has any number of agents per area, which may come and go. `SoloAreas` has one agent in each
area, and also assembles the steps: a subclass only defines the beginning of an episode, the effect
of actions and the observations, each for all areas at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.core.specs import ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.errors import SettingsError
from pipeline.seeding import stream
from pipeline.wire.channels.parameters import Parameters

Rows = AnyArray | slice  # indices of areas, or a slice of all areas

ALL = slice(None)


class Areas:
    """Independent areas, each with its own random stream.

    A subclass allocates with `_keep` every array that later steps depend on. It must change these
    arrays in place, because `load_state_dict` writes a restored state into the same arrays.

    Args:
        name: name of the simulator and of its random streams.
        specs: specification of each behavior.
        seed: seed of all random numbers; area i is the same for any number of areas.
        n_agents: number of agents in all areas together.
        per_area: number of agents in one area.

    Raises:
        SettingsError: `n_agents` is not a positive multiple of `per_area`.
    """

    def __init__(
        self,
        name: str,
        specs: Mapping[str, BehaviorSpec],
        *,
        seed: int,
        n_agents: int,
        per_area: int = 1,
    ) -> None:
        if n_agents < 1 or n_agents % per_area:
            raise SettingsError(
                f"{name}: the number of agents must be a positive multiple of {per_area}, the "
                f"agents of one area, got {n_agents}; change n_agents or --num-agents."
            )
        self.parameters = Parameters()
        self._specs = specs
        self.n_copies = self._n_areas = n_agents // per_area
        self._areas = np.arange(self._n_areas)
        self._rngs = [stream(seed, name, area) for area in range(self._n_areas)]
        self._state_arrays: dict[str, AnyArray] = {}

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior."""
        return self._specs

    def set_parameter(self, name: str, value: float) -> None:
        """Set an environment parameter, which is read when the next episode begins."""
        self.parameters.set_value(name, value)

    def close(self) -> None:
        """Do nothing: areas have no resources that must be freed."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "streams": [rng.bit_generator.state for rng in self._rngs],
            "parameters": self.parameters.state_dict(),
            "arrays": {name: values.copy() for name, values in self._state_arrays.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        for rng, saved in zip(self._rngs, state["streams"], strict=True):
            rng.bit_generator.state = saved
        self.parameters.load_state_dict(state["parameters"])
        # Older checkpoints have the arrays at the top level.
        arrays = state.get("arrays", state)
        for name, values in self._state_arrays.items():
            values[:] = arrays[name]

    def _keep(self, name: str, shape: tuple[int, ...], dtype: type = np.int64) -> AnyArray:
        """Return a new array [areas, *shape] of zeros that is part of the state."""
        self._state_arrays[name] = np.zeros((self._n_areas, *shape), dtype=dtype)
        return self._state_arrays[name]


class SoloAreas(Areas, ABC):
    """N independent areas with one agent each, advanced together.

    Random numbers are drawn only when an episode begins, and each area has its own stream, so an
    area depends neither on the number of areas nor on other areas.

    Args:
        name: name of the simulator and of its random streams.
        behavior: fully qualified behavior name.
        spec: specification of the behavior.
        max_step: steps after which an episode is interrupted.
        options: `seed` and `n_agents` of `Areas`.
    """

    # Number of steps by which each decision advances an episode towards its step limit.
    _decision_period = 1

    def __init__(
        self, name: str, behavior: str, spec: BehaviorSpec, max_step: int, **options: int
    ) -> None:
        super().__init__(name, {behavior: spec}, **options)
        self._behavior, self._max_step = behavior, max_step
        self._n_steps = self._keep("n_steps", ())
        self._agent_id = self._areas.astype(np.int32)

    @abstractmethod
    def _place(self, rows: AnyArray) -> None:
        """Set up new episodes in the areas `rows` [K]."""

    @abstractmethod
    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Apply an action per area; return rewards [N], and whether each task has ended [N]."""

    @abstractmethod
    def _observe(self, rows: Rows) -> list[FloatArray]:
        """Return new arrays of the observations of the agents in `rows`."""

    def _last_observation(self, rows: AnyArray) -> list[FloatArray]:
        """Return the last observations of the ended episodes in the areas `rows`."""
        return self._observe(rows)

    def _masks(self) -> list[BoolArray] | None:
        """Return a mask [N, size] for each branch, True = forbidden; None allows all actions."""
        return None

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every area."""
        self._begin(self._agent_id)
        reward = np.zeros(self._n_areas, dtype=np.float32)
        return self._steps(reward, TerminalSteps.empty(self._specs[self._behavior]))

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Advance every area by one decision; an ended episode is followed by the next one."""
        action, spec = actions[self._behavior], self._specs[self._behavior]
        n_continuous, n_discrete = spec.action_spec.continuous_size, spec.action_spec.discrete_size
        checked(action.continuous, (self._n_areas, n_continuous), self._behavior)
        checked(action.discrete, (self._n_areas, n_discrete), self._behavior)
        self._n_steps += self._decision_period
        reward, terminated = self._advance(action)
        ended = terminated | (self._n_steps >= self._max_step)
        terminals = TerminalSteps.empty(spec)
        if ended.any():
            rows = np.flatnonzero(ended)
            # The last observations are computed before the next episodes begin and overwrite the
            # state.
            last = agent_fields(self._last_observation(rows), reward[rows], self._agent_id[rows])
            # A task that ends at the last allowed step has ended, and was not interrupted.
            terminals = TerminalSteps(**last, interrupted=~terminated[rows])
            self._begin(rows)
            # The reward is in the terminal steps; the decision steps belong to the next episode.
            reward[rows] = 0.0
        return self._steps(reward, terminals)

    def _begin(self, rows: AnyArray) -> None:
        self._n_steps[rows] = 0
        self._place(rows)

    def _uniform(self, rows: AnyArray, n_draws: int) -> AnyArray:
        """Return float64 [K, n_draws] in [0, 1); each area of `rows` [K] draws from its stream."""
        uniform = np.empty((len(rows), n_draws))
        for index, row in enumerate(rows.tolist()):
            self._rngs[row].random(out=uniform[index])
        return uniform

    def _steps(self, reward: FloatArray, terminals: TerminalSteps) -> dict[str, Steps]:
        fields = agent_fields(self._observe(ALL), reward, self._agent_id)
        return {self._behavior: (DecisionSteps(**fields, action_mask=self._masks()), terminals)}


def agent_fields(
    obs: list[FloatArray],
    reward: FloatArray,
    agent_id: IntArray,
    *,
    group_id: IntArray | None = None,
    group_reward: FloatArray | None = None,
) -> dict[str, Any]:
    """Return the fields that decision and terminal steps share, by name.

    Without `group_id` and `group_reward` the agents have no groups.
    """
    none = np.zeros(len(agent_id), dtype=np.int32)
    return {
        "obs": obs,
        "reward": reward,
        "agent_id": agent_id,
        "group_id": none if group_id is None else group_id,
        "group_reward": none.astype(np.float32) if group_reward is None else group_reward,
    }


def checked(action: AnyArray, shape: tuple[int, int], behavior: str) -> AnyArray:
    """Return `action`, or raise ValueError if it has another shape."""
    if action.shape != shape:
        raise ValueError(f"{behavior}: actions have the shape {action.shape}, expected {shape}")
    return action


def vector(size: int) -> ObservationSpec:
    """Return the spec of a vector of `size` numbers, with the name of Unity's vector sensor."""
    return ObservationSpec.vector(size, f"VectorSensor_size{size}")


def between(uniform: AnyArray, low: float, high: float) -> FloatArray:
    """Return float32 numbers in [low, high) for `uniform` numbers in [0, 1), of any shape."""
    return np.asarray(low + (high - low) * uniform, dtype=np.float32)
