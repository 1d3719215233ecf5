"""A square grid with two goals, one of which is wanted: shaped like Unity's GridWorld.

An agent sees the grid as an image and is told by a goal signal which goal to reach, the green plus
or the red ex. Everything is arrays over the areas; only the beginnings of episodes are drawn one by
one, each area from its own random stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.protocol.parameters import Parameters
from pipeline.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    ObservationSpec,
    ObservationType,
)
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.seeding import stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.protocol.steps import Steps

BEHAVIOR = "GridWorld?team=0"
SIZE = 5
"""Cells along each side."""
CELL = 4
"""Pixels along each side of a cell."""
MAX_STEP = 100
"""Decisions after which an episode is interrupted."""
MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
"""Row and column change of each action: nothing, up, down, left, right."""
RED, GREEN, BLUE = 0, 1, 2
PLUS = np.array([(0, 1, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1), (0, 1, 1, 0)], dtype=np.float32)
EX = np.array([(1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 1, 0), (1, 0, 0, 1)], dtype=np.float32)
AGENT = np.ones((CELL, CELL), dtype=np.float32)

_STEP_REWARD, _GOAL_REWARD = -0.01, 1.0


class GridWorld:
    """N independent grids with one agent each.

    Args:
        seed: seed of the episodes' beginnings; area i has a random stream of its own.
        n_agents: number of areas.
    """

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        self.parameters = Parameters()
        pixels = SIZE * CELL
        self._specs = {
            BEHAVIOR: BehaviorSpec(
                [
                    ObservationSpec.visual(3, pixels, pixels, "GridSensor"),
                    ObservationSpec.vector(
                        2, "VectorSensor_size2_GoalSignal", ObservationType.GOAL_SIGNAL
                    ),
                ],
                ActionSpec.create_discrete([len(MOVES)]),
            )
        }
        self._rngs = [stream(seed, "grid_world", row) for row in range(n_agents)]
        self._agent = np.zeros((n_agents, 2), dtype=np.int64)
        self._goals = np.zeros((n_agents, 2, 2), dtype=np.int64)
        self._wanted = np.zeros(n_agents, dtype=np.int64)
        self._n_steps = np.zeros(n_agents, dtype=np.int64)
        self._agent_id = np.arange(n_agents, dtype=np.int32)
        self._no_group = np.zeros(n_agents, dtype=np.int32)
        self._no_reward = np.zeros(n_agents, dtype=np.float32)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """The one behavior, under GridWorld's name."""
        return self._specs

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every area."""
        self._begin(self._agent_id)
        none = TerminalSteps.empty(self._specs[BEHAVIOR])
        return {BEHAVIOR: (self._decisions(self._no_reward.copy()), none)}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Move every agent by one cell.

        Args:
            actions: int32 [N, 1] of 0 nothing, 1 up, 2 down, 3 left, 4 right. A move off the grid,
                which the mask forbids, moves nothing.
        """
        action = actions[BEHAVIOR].discrete
        if action.shape != (len(self._agent_id), 1):
            raise ValueError(
                f"{BEHAVIOR}: actions have the shape {action.shape}, "
                f"expected {(len(self._agent_id), 1)}"
            )
        self._agent = np.clip(self._agent + MOVES[action[:, 0]], 0, SIZE - 1)
        self._n_steps += 1
        at_goal = (self._goals == self._agent[:, None]).all(axis=2)
        reached = at_goal.any(axis=1)
        won = at_goal[self._agent_id, self._wanted]
        goal = np.where(won, _GOAL_REWARD, np.where(reached, -_GOAL_REWARD, 0.0))
        reward = (goal + _STEP_REWARD).astype(np.float32)
        ended = reached | (self._n_steps >= MAX_STEP)
        if not ended.any():
            none = TerminalSteps.empty(self._specs[BEHAVIOR])
            return {BEHAVIOR: (self._decisions(reward), none)}
        rows = np.flatnonzero(ended)
        terminals = TerminalSteps(
            obs=self._observe(rows),
            reward=reward[rows],
            interrupted=~reached[rows],
            agent_id=self._agent_id[rows],
            group_id=self._no_group[rows],
            group_reward=self._no_reward[rows],
        )
        self._begin(rows)
        reward[rows] = 0.0
        return {BEHAVIOR: (self._decisions(reward), terminals)}

    def set_parameter(self, name: str, value: float) -> None:
        """Keep a parameter; this environment reads none."""
        self.parameters.set_value(name, value)

    def close(self) -> None:
        """Nothing to free."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        return {
            "streams": [rng.bit_generator.state for rng in self._rngs],
            "parameters": self.parameters.state_dict(),
            **{name: values.copy() for name, values in self._arrays().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for rng, saved in zip(self._rngs, state["streams"], strict=True):
            rng.bit_generator.state = saved
        self.parameters.load_state_dict(state["parameters"])
        for name, values in self._arrays().items():
            values[:] = state[name]

    def _arrays(self) -> dict[str, AnyArray]:
        return {
            "agent": self._agent,
            "goals": self._goals,
            "wanted": self._wanted,
            "n_steps": self._n_steps,
        }

    def _begin(self, rows: AnyArray) -> None:
        """Put the agent, the plus and the ex of each area on three different cells."""
        n_cells = SIZE * SIZE
        for row in rows.tolist():
            number = int(self._rngs[row].integers(n_cells * (n_cells - 1) * (n_cells - 2) * 2))
            number, self._wanted[row] = divmod(number, 2)
            free = list(range(n_cells))
            cells = []
            for _ in range(3):
                number, index = divmod(number, len(free))
                cells.append(divmod(free.pop(index), SIZE))
            self._agent[row], self._goals[row] = cells[0], cells[1:]
        self._n_steps[rows] = 0

    def _decisions(self, reward: FloatArray) -> DecisionSteps:
        obs = self._observe(self._agent_id)
        mask = forbidden(self._agent)
        return DecisionSteps(obs, reward, self._agent_id, [mask], self._no_group, self._no_reward)

    def _observe(self, rows: AnyArray) -> list[FloatArray]:
        image = draw(self._agent[rows], self._goals[rows])
        goal = np.eye(2, dtype=np.float32)[self._wanted[rows]]
        return [image, goal]


def forbidden(agent: AnyArray) -> BoolArray:
    """Bool [N, 5], True where an action leaves the grid, for agents at [N, 2] (row, column)."""
    target = agent[:, None] + MOVES
    return np.asarray(((target < 0) | (target >= SIZE)).any(axis=2))


def draw(agent: AnyArray, goals: AnyArray) -> FloatArray:
    """Float32 [N, 3, 20, 20] image of each grid, row 0 at the top.

    Args:
        agent: [N, 2] row and column.
        goals: [N, 2, 2] row and column of the plus and of the ex.
    """
    n = len(agent)
    image = np.zeros((n, 3, SIZE, CELL, SIZE, CELL), dtype=np.float32)
    cells = image.transpose(0, 2, 4, 1, 3, 5)
    rows = np.arange(n)
    cells[rows, goals[:, 0, 0], goals[:, 0, 1], GREEN] = PLUS
    cells[rows, goals[:, 1, 0], goals[:, 1, 1], RED] = EX
    cells[rows, agent[:, 0], agent[:, 1], BLUE] = AGENT
    return image.reshape(n, 3, SIZE * CELL, SIZE * CELL)
