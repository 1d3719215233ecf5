"""What the agents of one behavior sent: structures of arrays, one row per agent.

`DecisionSteps` and `TerminalSteps` are both the public low-level API (names and argument order are
ML-Agents') and the only form in which steps travel inside this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
    from pipeline.protocol.specs import BehaviorSpec


class DecisionStep(NamedTuple):
    """One agent that asks for a decision."""

    obs: list[FloatArray]
    reward: float
    agent_id: int
    action_mask: list[BoolArray] | None
    group_id: int
    group_reward: float


class TerminalStep(NamedTuple):
    """One agent whose episode has ended."""

    obs: list[FloatArray]
    reward: float
    interrupted: bool
    agent_id: int
    group_id: int
    group_reward: float


Step = TypeVar("Step", covariant=True)


class _AgentSteps(Mapping[int, Step]):
    """What both kinds of steps have: a mapping from agent ids to rows of arrays."""

    __slots__ = ("_index", "agent_id", "group_id", "group_reward", "obs", "reward")
    obs: list[FloatArray]
    reward: FloatArray
    agent_id: IntArray
    group_id: IntArray
    group_reward: FloatArray
    _index: dict[int, int] | None

    @property
    def agent_id_to_index(self) -> dict[int, int]:
        """Row of each agent id."""
        # Made at the first look-up: training never asks for single agents.
        if self._index is None:
            self._index = {int(agent): row for row, agent in enumerate(self.agent_id)}
        return self._index

    def __len__(self) -> int:
        return len(self.agent_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self.agent_id_to_index)

    def _row(self, agent_id: int) -> tuple[int, dict[str, Any]]:
        """Return an agent's row, and the fields of its step that both kinds have."""
        row = self.agent_id_to_index.get(agent_id)
        if row is None:
            raise KeyError(f"agent_id {agent_id} is not present in the {type(self).__name__}")
        return row, {
            "obs": [values[row] for values in self.obs],
            "reward": float(self.reward[row]),
            "agent_id": agent_id,
            "group_id": int(self.group_id[row]),
            "group_reward": float(self.group_reward[row]),
        }


class DecisionSteps(_AgentSteps[DecisionStep]):
    """The agents that ask for a decision.

    Attributes:
        obs: one float32 [N, *shape] per observation.
        reward: float32 [N], gained since each agent's previous step.
        agent_id: int32 [N].
        action_mask: bool [N, branch size] per discrete branch, True where an action is forbidden;
            None without discrete actions.
        group_id: int32 [N], 0 for agents without a group.
        group_reward: float32 [N].
    """

    __slots__ = ("action_mask",)

    def __init__(
        self,
        obs: list[FloatArray],
        reward: FloatArray,
        agent_id: IntArray,
        action_mask: list[BoolArray] | None,
        group_id: IntArray,
        group_reward: FloatArray,
    ) -> None:
        self.obs = obs
        self.reward = reward
        self.agent_id = agent_id
        self.action_mask = action_mask
        self.group_id = group_id
        self.group_reward = group_reward
        self._index = None

    def __getitem__(self, agent_id: int) -> DecisionStep:
        row, fields = self._row(agent_id)
        mask = self.action_mask
        row_mask = None if mask is None else [branch[row] for branch in mask]
        return DecisionStep(**fields, action_mask=row_mask)

    @staticmethod
    def empty(spec: BehaviorSpec) -> DecisionSteps:
        """Return the steps of no agents, with arrays shaped for `spec`."""
        return DecisionSteps(**_no_rows(spec), action_mask=None)


class TerminalSteps(_AgentSteps[TerminalStep]):
    """The agents whose episode has ended since the last exchange.

    Attributes:
        obs: one float32 [N, *shape] per observation, the last of the episode.
        reward: float32 [N], gained since each agent's previous step.
        interrupted: bool [N], True where the episode was cut short rather than finished.
        agent_id: int32 [N].
        group_id: int32 [N], 0 for agents without a group.
        group_reward: float32 [N].
    """

    __slots__ = ("interrupted",)

    def __init__(
        self,
        obs: list[FloatArray],
        reward: FloatArray,
        interrupted: BoolArray,
        agent_id: IntArray,
        group_id: IntArray,
        group_reward: FloatArray,
    ) -> None:
        self.obs = obs
        self.reward = reward
        self.interrupted = interrupted
        self.agent_id = agent_id
        self.group_id = group_id
        self.group_reward = group_reward
        self._index = None

    def __getitem__(self, agent_id: int) -> TerminalStep:
        row, fields = self._row(agent_id)
        return TerminalStep(**fields, interrupted=bool(self.interrupted[row]))

    @staticmethod
    def empty(spec: BehaviorSpec) -> TerminalSteps:
        """Return the steps of no agents, with arrays shaped for `spec`."""
        return TerminalSteps(**_no_rows(spec), interrupted=np.zeros(0, dtype=np.bool_))


def _no_rows(spec: BehaviorSpec) -> dict[str, Any]:
    return {
        "obs": [np.zeros((0, *obs.shape), dtype=np.float32) for obs in spec.observation_specs],
        "reward": np.zeros(0, dtype=np.float32),
        "agent_id": np.zeros(0, dtype=np.int32),
        "group_id": np.zeros(0, dtype=np.int32),
        "group_reward": np.zeros(0, dtype=np.float32),
    }


Steps = tuple[DecisionSteps, TerminalSteps]


_SHARED = ("obs", "reward", "agent_id", "group_id", "group_reward")


def steps_to_mapping(steps: Steps) -> dict[str, dict[str, Any]]:
    """Return copies of a behavior's steps as plain values and arrays."""
    decision, terminal = steps
    mask = decision.action_mask
    return {
        "decision": {
            **_fields(decision),
            "action_mask": None if mask is None else [branch.copy() for branch in mask],
        },
        "terminal": {**_fields(terminal), "interrupted": terminal.interrupted.copy()},
    }


def steps_from_mapping(values: Mapping[str, Mapping[str, Any]]) -> Steps:
    """Return the steps that `steps_to_mapping` was given."""
    return DecisionSteps(**values["decision"]), TerminalSteps(**values["terminal"])


def same_steps(one: Steps, other: Steps) -> bool:
    """Whether two behaviors' steps are equal, number by number."""
    arrays, others = list(_arrays(one)), list(_arrays(other))
    return len(arrays) == len(others) and all(map(np.array_equal, arrays, others))


def _arrays(steps: Steps) -> Iterator[AnyArray]:
    decision, terminal = steps
    for part in steps:
        yield from (*part.obs, part.reward, part.agent_id, part.group_id, part.group_reward)
    yield terminal.interrupted
    yield from decision.action_mask or ()


def _fields(steps: DecisionSteps | TerminalSteps) -> dict[str, Any]:
    """Return copies of what both kinds have; arrays may be views of a message."""
    values = {name: getattr(steps, name) for name in _SHARED}
    return {
        name: [one.copy() for one in value] if name == "obs" else value.copy()
        for name, value in values.items()
    }
