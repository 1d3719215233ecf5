"""What the agents of one behavior observe in one step, collected agent by agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.protocol.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.protocol.steps import Steps
    from pipeline.simulators.bridges.observations import Observations
    from pipeline.simulators.bridges.roles import Role


class Rows:
    """Arrays for as many agents as a behavior can have in one step, and how many are filled."""

    def __init__(self, observations: Observations, size: int) -> None:
        self.n = 0
        self.obs = observations.empty(size)
        self.reward = np.zeros(size, dtype=np.float32)
        self.group_reward = np.zeros(size, dtype=np.float32)
        self.interrupted = np.zeros(size, dtype=np.bool_)
        self.agent_id = np.zeros(size, dtype=np.int32)
        self.group_id = np.zeros(size, dtype=np.int32)

    def add(
        self, role: Role, obs: Any, reward: float, group_reward: float, identity: tuple[int, int]
    ) -> None:
        """Fill the next row; `identity` is agent id and group id."""
        row = self.n
        self.n += 1
        role.observations.put(self.obs, row, obs)
        self.reward[row], self.group_reward[row] = reward, group_reward
        self.agent_id[row], self.group_id[row] = identity

    def filled(self) -> list[FloatArray]:
        """The observations of the filled rows."""
        return [values[: self.n] for values in self.obs]


@dataclass(slots=True)
class Batch:
    """What the agents of one behavior observe in one step."""

    role: Role
    size: int
    decisions: Rows = field(init=False)
    terminals: Rows = field(init=False)
    asked: list[tuple[int, int]] = field(init=False, default_factory=list)
    """Copy and agent of each decision."""
    forbidden: BoolArray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.decisions = Rows(self.role.observations, self.size)
        self.terminals = Rows(self.role.observations, self.size)

    def forbid(self, row: int, mask: Any) -> None:
        """Set the mask of a decision; 1 means allowed in it."""
        if self.forbidden is None:
            choices = sum(self.role.actions.spec.discrete_branches)
            self.forbidden = np.zeros((self.size, choices), dtype=np.bool_)
        self.forbidden[row] = self.role.actions.forbidden(mask)

    def steps(self) -> Steps:
        """All that was collected."""
        asking, ended = self.decisions, self.terminals
        n, m = asking.n, ended.n
        masks = None if self.forbidden is None else self.role.actions.masks(self.forbidden[:n])
        return (
            DecisionSteps(
                obs=asking.filled(),
                reward=asking.reward[:n],
                agent_id=asking.agent_id[:n],
                action_mask=masks,
                group_id=asking.group_id[:n],
                group_reward=asking.group_reward[:n],
            ),
            TerminalSteps(
                obs=ended.filled(),
                reward=ended.reward[:m],
                interrupted=ended.interrupted[:m],
                agent_id=ended.agent_id[:m],
                group_id=ended.group_id[:m],
                group_reward=ended.group_reward[:m],
            ),
        )
