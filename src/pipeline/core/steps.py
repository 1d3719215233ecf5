"""Steps of the agents of one behavior: structures of arrays, one row per agent.

`DecisionSteps` and `TerminalSteps` are the public low-level API, with ML-Agents' names and order of
arguments, and also the only form of steps inside this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.core.specs import BehaviorSpec


class DecisionStep(NamedTuple):
    """The step of one agent that asks for a decision."""

    obs: list[FloatArray]
    reward: float
    agent_id: int
    action_mask: list[BoolArray] | None
    group_id: int
    group_reward: float


# `interrupted` is what Gymnasium calls truncated: the value of the last state is bootstrapped.
class TerminalStep(NamedTuple):
    """The last step of one agent's episode."""

    obs: list[FloatArray]
    reward: float
    interrupted: bool
    agent_id: int
    group_id: int
    group_reward: float


Step = TypeVar("Step", covariant=True)


class _AgentSteps(Mapping[int, Step]):
    """Base class of DecisionSteps and TerminalSteps: a mapping from agent ids to steps."""

    __slots__ = ()
    obs: list[FloatArray]
    reward: FloatArray
    agent_id: IntArray
    group_id: IntArray
    group_reward: FloatArray
    _index: dict[int, int] | None

    @property
    def agent_id_to_index(self) -> dict[int, int]:
        """The row of each agent in the arrays, by the agent's id."""
        # The index is built at the first look-up, because training never looks up single agents.
        if self._index is None:
            self._index = {int(agent): row for row, agent in enumerate(self.agent_id)}
        return self._index

    def __len__(self) -> int:
        # Arrays have one row per agent, so this needs no index.
        return len(self.agent_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self.agent_id_to_index)

    def _row(self, agent_id: int) -> tuple[int, dict[str, Any]]:
        """Return an agent's row and its common fields; KeyError if the agent is absent."""
        # ML-Agents raises KeyError for an absent agent too, so existing `except` clauses work.
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


# A generated `__eq__` would fail: comparing two arrays gives an array, which has no truth value.
# `same_steps` compares steps.
@dataclass(eq=False, repr=False, slots=True)
class DecisionSteps(_AgentSteps[DecisionStep]):
    """The agents that ask for a decision."""

    obs: list[FloatArray]
    """One array for each observation: float32 [N, *shape], with a row for each agent."""
    reward: FloatArray
    """float32 [N], sum of rewards since each agent's previous step."""
    agent_id: IntArray
    """int32 [N], id of each agent."""
    action_mask: list[BoolArray] | None
    """bool [N, branch size] per discrete branch, True where an action is forbidden; None if all
    actions are allowed or continuous."""
    group_id: IntArray
    """int32 [N], id of each agent's group; 0 for agents without a group."""
    group_reward: FloatArray
    """float32 [N], sum of the rewards of each agent's group since the agent's previous step."""
    # `_index` is not an argument of the constructor, which has ML-Agents' arguments.
    _index: dict[int, int] | None = field(default=None, init=False)

    def __getitem__(self, agent_id: int) -> DecisionStep:
        row, shared = self._row(agent_id)
        mask = self.action_mask
        # The mask of each branch is an array [N, branch size]; the agent's mask is one row of it.
        row_mask = None if mask is None else [branch[row] for branch in mask]
        return DecisionStep(**shared, action_mask=row_mask)

    @staticmethod
    def empty(spec: BehaviorSpec) -> DecisionSteps:
        """Return steps without rows; the other sizes of the arrays are those of `spec`."""
        # A mask of None means that all actions are allowed, which is true without agents.
        return DecisionSteps(**_no_rows(spec), action_mask=None)


@dataclass(eq=False, repr=False, slots=True)
class TerminalSteps(_AgentSteps[TerminalStep]):
    """The agents whose episode has ended since the last exchange with the environment.

    Fields without a description here are as in `DecisionSteps`.
    """

    obs: list[FloatArray]
    """Last observations of the episode, one float32 [N, *shape] per observation."""
    reward: FloatArray
    interrupted: BoolArray
    """bool [N], True where the episode was cut short before its end, for example by a step
    limit."""
    agent_id: IntArray
    group_id: IntArray
    group_reward: FloatArray
    _index: dict[int, int] | None = field(default=None, init=False)

    def __getitem__(self, agent_id: int) -> TerminalStep:
        row, shared = self._row(agent_id)
        return TerminalStep(**shared, interrupted=bool(self.interrupted[row]))

    @staticmethod
    def empty(spec: BehaviorSpec) -> TerminalSteps:
        """Return steps without rows; the other sizes of the arrays are those of `spec`."""
        return TerminalSteps(**_no_rows(spec), interrupted=np.zeros(0, dtype=np.bool_))


# The arrays have 0 rows, but their other sizes are those of `spec`, so that callers need no special
# case for a behavior without agents.
def _no_rows(spec: BehaviorSpec) -> dict[str, Any]:
    return {
        "obs": [np.zeros((0, *obs.shape), dtype=np.float32) for obs in spec.observation_specs],
        "reward": np.zeros(0, dtype=np.float32),
        "agent_id": np.zeros(0, dtype=np.int32),
        "group_id": np.zeros(0, dtype=np.int32),
        "group_reward": np.zeros(0, dtype=np.float32),
    }


Steps = tuple[DecisionSteps, TerminalSteps]


# A behavior exists from its first specification on, also while it has no agents.
def no_agents(spec: BehaviorSpec) -> Steps:
    """Return decision and terminal steps without rows, for a behavior without agents."""
    return DecisionSteps.empty(spec), TerminalSteps.empty(spec)


def steps_to_mapping(steps: Steps) -> dict[str, dict[str, Any]]:
    """Return copies of a behavior's steps as plain values and arrays."""
    # Arrays are copied, because they may be views of a received message.
    decision, terminal = (
        {
            name: [array.copy() for array in value] if isinstance(value, list) else value.copy()
            for name, value in _values(part)
        }
        for part in steps
    )
    # `_values` leaves out fields that are None, but the constructor needs this field.
    decision.setdefault("action_mask", None)
    return {"decision": decision, "terminal": terminal}


def steps_from_mapping(values: Mapping[str, Mapping[str, Any]]) -> Steps:
    """Return the steps in a mapping from `steps_to_mapping`."""
    return DecisionSteps(**values["decision"]), TerminalSteps(**values["terminal"])


def refuse_other_shapes(name: str, spec: BehaviorSpec, steps: Steps) -> None:
    """Raise ValueError if the shape of a saved array does not fit `spec`."""
    for part in steps:
        # N is the number of ids; observations must be [N, *shape], and the other arrays [N, ...].
        n = len(part.agent_id)
        expected = [(n, *obs.shape) for obs in spec.observation_specs]
        others = [*(getattr(part, "action_mask", None) or []), part.reward, part.group_reward]
        others += [part.group_id, getattr(part, "interrupted", part.agent_id)]
        # `interrupted` is only in terminal steps; the default repeats an array that always fits.
        if [obs.shape for obs in part.obs] != expected or any(len(v) != n for v in others):
            raise ValueError(f"the shapes of the steps of {name} do not fit its specification")


def same_steps(one: Steps, other: Steps) -> bool:
    """Return whether all arrays of two `Steps` have equal shapes and values."""
    # Values are compared without a tolerance, because a restored simulator must give exactly the
    # saved steps.
    arrays, other_arrays = list(_arrays(one)), list(_arrays(other))
    return len(arrays) == len(other_arrays) and all(map(np.array_equal, arrays, other_arrays))


def _arrays(steps: Steps) -> Iterator[AnyArray]:
    for part in steps:
        for _, value in _values(part):
            # Observations and masks are lists of arrays, the other fields single arrays.
            yield from value if isinstance(value, list) else [value]


def _values(steps: DecisionSteps | TerminalSteps) -> list[tuple[str, Any]]:
    """Return the name and the value of each field of `steps` that is not None."""
    # Only the field `_index` has `init=False`; it is built again when it is needed.
    values = [
        (attribute.name, getattr(steps, attribute.name))
        for attribute in fields(steps)
        if attribute.init
    ]
    return [(name, value) for name, value in values if value is not None]
