"""Three agents push a heavy block together, after one agent has filled a pit.

Shaped like Unity's Cooperative Push Block and Dungeon Escape: the agents of an area are one group
and earn group rewards. A pit blocks the way. The agent that fills the pit gets a negative reward
and leaves, while the other agents continue, so only an algorithm that credits an agent with its
group's later rewards learns to fill the pit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.simulators.games import drawing
from pipeline.simulators.games.areas import Areas, agent_fields, checked, vector

BEHAVIOR = "PushTogether?team=0"
TEAM = 3  # number of agents in one area
ROWS, COLUMNS = 5, 8
FIRST_ROW, LAST_ROW = 1, 3  # first and last row that the block covers
START, GOAL = 2, 6  # columns of the block at the beginning and at the end of the task
MAX_STEP = 150  # number of decisions after which an episode is interrupted
MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
"""Row and column change of each action: nothing, up, down, left, right."""
_UP, _DOWN, _LEFT, _RIGHT = range(1, len(MOVES))
PIT_COLUMNS = (4, 5)
PIT_REWARD, PUSH_REWARD, GOAL_REWARD = -0.1, 0.25, 1.0
SCALE = 4.0  # number of cells that a relative observation of 1 stands for
OBS_SIZE = 12

# Number of agents that must push in the same step to move the block.
_NEEDED = 2
# For each agent of an area, the indices of the two other agents.
_MATES = np.array([(1, 2), (0, 2), (0, 1)])
_MIDDLE = np.array([(ROWS - 1) / 2, (COLUMNS - 1) / 2])

_SPEC = BehaviorSpec([vector(OBS_SIZE)], ActionSpec.create_discrete([len(MOVES)]))


class PushTogether(Areas):
    """Areas with one group of three agents, one block and one pit each.

    `n_agents` counts the agents of all areas.
    """

    def __init__(self, *, seed: int = 0, n_agents: int = 48) -> None:
        specs = {BEHAVIOR: _SPEC}
        super().__init__("push_together", specs, seed=seed, n_agents=n_agents, per_area=TEAM)
        self._cell = self._keep("cell", (TEAM, 2))
        self._present = self._keep("present", (TEAM,), np.bool_)
        self._life = self._keep("life", (TEAM,))  # number of earlier agents at this index
        self._block = self._keep("block", ())
        self._pit = self._keep("pit", (2,))
        self._open = self._keep("open", (), np.bool_)
        self._n_steps = self._keep("n_steps", ())
        self._present[:] = True

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every area."""
        self._begin(self._areas)
        none = np.zeros((self._n_areas, TEAM), dtype=np.float32)
        return {BEHAVIOR: (self._decisions(none, none), TerminalSteps.empty(_SPEC))}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Move every agent by one cell, and each block that at least two agents push.

        Actions are int32 [N, 1] (0 nothing, 1 up, 2 down, 3 left, 4 right) of the agents that have
        not left.
        """
        # The array is copied, because agents that fall are removed from `_present` below.
        playing = self._present.copy()
        action = np.zeros(playing.shape, dtype=np.int64)
        sent_actions = checked(actions[BEHAVIOR].discrete, (int(playing.sum()), 1), BEHAVIOR)
        action[playing] = sent_actions[:, 0]
        # The block moves before the agents, so that the pushing agents can follow it.
        pushed = self._push(action)
        self._move(action)
        fell = self._fall()
        self._n_steps += 1
        done = self._block >= GOAL
        late = ~done & (self._n_steps >= MAX_STEP)
        reward = (PIT_REWARD * fell).astype(np.float32)
        gain = (PUSH_REWARD * pushed + GOAL_REWARD * done).astype(np.float32)
        group_reward = np.repeat(gain[:, None], TEAM, axis=1)
        # The episode of an agent that fell ends at once; the episodes of all other agents end
        # together.
        over = done | late
        ended = playing & (fell | over[:, None])
        if not ended.any():
            none = TerminalSteps.empty(_SPEC)
            return {BEHAVIOR: (self._decisions(reward, group_reward), none)}
        # An agent that falls into the pit has ended its task and is not interrupted.
        interrupted = late[:, None] & ~fell
        fields = self._fields(ended, reward, group_reward)
        terminals = TerminalSteps(**fields, interrupted=interrupted[ended])
        self._begin(np.flatnonzero(over))
        # The reward is in the terminal steps; the decision steps belong to the next episode.
        reward[over] = 0.0
        group_reward[over] = 0.0
        return {BEHAVIOR: (self._decisions(reward, group_reward), terminals)}

    def _push(self, action: AnyArray) -> BoolArray:
        """Move blocks that two agents push right; return bool [areas], True for moved blocks."""
        column = self._cell[..., 1]
        in_rows = self._present & _on_rail(self._cell[..., 0])
        ahead = self._block[:, None] + 1
        n_pushing = (in_rows & (column == ahead - 2) & (action == _RIGHT)).sum(axis=1)
        blocked = (in_rows & (column == ahead)).any(axis=1)
        blocked |= self._open & (self._pit[:, 1] == ahead[:, 0])
        pushed = (n_pushing >= _NEEDED) & ~blocked
        self._block += pushed
        return np.asarray(pushed)

    def _move(self, action: AnyArray) -> None:
        target = np.clip(self._cell + MOVES[action], 0, (ROWS - 1, COLUMNS - 1))
        hits = _on_rail(target[..., 0]) & (target[..., 1] == self._block[:, None])
        np.copyto(self._cell, target, where=~hits[..., None])

    def _fall(self) -> BoolArray:
        """Fill open pits with the first agent inside; return bool [areas, 3]: agents that fell."""
        inside = self._present & (self._cell == self._pit[:, None]).all(axis=2)
        inside &= self._open[:, None]
        # Only the first agent in the pit fills it, if several step in at once.
        fell = inside & (inside.cumsum(axis=1) == 1)
        self._open &= ~fell.any(axis=1)
        self._present &= ~fell
        return np.asarray(fell)

    def _begin(self, areas: AnyArray) -> None:
        """Put pit and agents on different cells; new agents replace agents that had left."""
        for area in areas.tolist():
            rng = self._rngs[area]
            pit = rng.integers((FIRST_ROW, PIT_COLUMNS[0]), (LAST_ROW + 1, PIT_COLUMNS[1] + 1))
            free = [cell for cell in _FREE if cell != tuple(pit.tolist())]
            self._cell[area] = np.array(free)[rng.choice(len(free), TEAM, replace=False)]
            self._pit[area] = pit
            self._open[area] = self.parameters.read("pit", 1.0) > 0.0
        self._life[areas] += ~self._present[areas]
        self._present[areas] = True
        self._block[areas] = START
        self._n_steps[areas] = 0

    def _decisions(self, reward: FloatArray, group_reward: FloatArray) -> DecisionSteps:
        mask = np.zeros((int(self._present.sum()), len(MOVES)), dtype=np.bool_)
        fields = self._fields(self._present, reward, group_reward)
        return DecisionSteps(**fields, action_mask=[mask])

    def _fields(
        self, selected: BoolArray, reward: FloatArray, group_reward: FloatArray
    ) -> dict[str, Any]:
        """Return the common fields of decision and terminal steps, for `selected` [areas, 3]."""
        # `_life` counts the earlier agents at an index, so that each new agent gets an id that no
        # earlier agent has had.
        seat = np.arange(selected.size).reshape(selected.shape)
        ids = np.asarray((seat + selected.size * self._life)[selected], dtype=np.int32)
        return agent_fields(
            [self._observe(selected)],
            reward[selected],
            ids,
            group_id=(np.nonzero(selected)[0] + 1).astype(np.int32),  # one group per area
            group_reward=group_reward[selected],
        )

    def _observe(self, selected: BoolArray) -> FloatArray:
        """Return observations, float32 [n, 12], of the agents in `selected` [areas, 3]."""
        cell = self._cell.astype(np.float32)
        obs = np.zeros((*selected.shape, OBS_SIZE), dtype=np.float32)
        obs[..., 0:2] = (cell - _MIDDLE) / _MIDDLE
        obs[..., 2] = (self._block[:, None] - cell[..., 1]) / SCALE
        obs[..., 3:5] = (self._pit[:, None] - cell) / SCALE
        obs[..., 5] = self._open[:, None]
        mates = obs[..., 6:].reshape(*selected.shape, TEAM - 1, 3)
        mate_present = self._present[:, _MATES]
        mates[..., 0] = mate_present
        mates[..., 1:] = (cell[:, _MATES] - cell[:, :, None]) / SCALE * mate_present[..., None]
        return obs[selected]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's area; the goal of the block is green."""
        area = agent % (TEAM * self._n_areas) // TEAM
        canvas = drawing.Canvas((0, 0), (COLUMNS, ROWS))
        for row, column in np.ndindex(ROWS, COLUMNS):
            canvas.box((column + 0.03, row + 0.03), (column + 0.97, row + 0.97), drawing.FLOOR)
        canvas.box((GOAL + 0.4, FIRST_ROW), (GOAL + 0.6, LAST_ROW + 1), drawing.GREEN)
        row, column = _upwards(self._pit[area])
        pit = drawing.INK if self._open[area] else drawing.GRAY
        canvas.box((column + 0.1, row + 0.1), (column + 0.9, row + 0.9), pit)
        left = self._block[area] + 0.05
        canvas.box((left, FIRST_ROW + 0.05), (left + 0.9, LAST_ROW + 0.95), drawing.AMBER)
        for row, column in _upwards(self._cell[area][self._present[area]]):
            canvas.disc((column + 0.5, row + 0.5), 0.3, drawing.BLUE)
        return canvas.pixels()


def _upwards(cell: AnyArray) -> AnyArray:
    """Return the cells [..., 2] with rows counted from below."""
    return np.abs(cell - (ROWS - 1, 0))


def _on_rail(row: AnyArray) -> BoolArray:
    return np.asarray((row >= FIRST_ROW) & (row <= LAST_ROW))


_FREE = [
    (row, column)
    for row in range(ROWS)
    for column in range(COLUMNS)
    if not (column == START and FIRST_ROW <= row <= LAST_ROW)
]

_MIDDLE_ROW = (ROWS - 1) // 2


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk into the pit if no other agent is nearer to it; else walk to the block and push.

    Two agents that are equally near both walk to the pit; the second agent finds it filled.
    """
    obs = steps.obs[0]
    cell = np.rint((obs[:, :2] + 1) * (ROWS - 1, COLUMNS - 1) / 2).astype(np.int64)
    block = cell[:, 1] + np.rint(SCALE * obs[:, 2]).astype(np.int64)
    to_pit = np.rint(SCALE * obs[:, 3:5]).astype(np.int64)
    mates = obs[:, 6:].reshape(-1, TEAM - 1, 3)
    mate_cells = cell[:, None] + np.rint(SCALE * mates[..., 1:]).astype(np.int64)
    pit = cell + to_pit
    way = _n_moves(mate_cells, block[:, None], pit[:, None]) + 100 * (mates[..., 0] == 0)
    # `way` counts an agent that has left as 100 moves farther away.
    fills = (obs[:, 5] > 0) & (_n_moves(cell, block, pit) <= way.min(axis=1))
    action = np.where(fills, _to_pit(cell, block, to_pit), _to_block(cell, block))
    return ActionTuple(discrete=action[:, None])


def _n_moves(cell: AnyArray, block: AnyArray, pit: AnyArray) -> AnyArray:
    """Return the number of moves, [...], by which `_to_pit` leads from `cell` to the pit."""
    offset = np.abs(pit - cell)
    edge = np.where(cell[..., 0] <= _MIDDLE_ROW, 0, ROWS - 1)
    around = np.abs(cell[..., 0] - edge) + np.abs(pit[..., 0] - edge)
    must_leave = _on_rail(cell[..., 0]) & (cell[..., 1] < block)
    return np.asarray(np.where(must_leave, around, offset[..., 0]) + offset[..., 1])


def _to_pit(cell: AnyArray, block: AnyArray, to_pit: AnyArray) -> AnyArray:
    """Return the next moves [N] around the block into the pit, which is to the block's right."""
    sideways = np.where(to_pit[:, 1] > 0, _RIGHT, _LEFT)
    straight = np.where(to_pit[:, 0] > 0, _DOWN, _UP)
    action = np.where(to_pit[:, 1] != 0, sideways, straight)
    must_leave = _on_rail(cell[..., 0]) & (cell[:, 1] < block)
    return np.where(must_leave, _to_edge(cell), action)


def _to_block(cell: AnyArray, block: AnyArray) -> AnyArray:
    """Return the next moves [N] around the block to its left side, from which agents push it."""
    enter = np.where(cell[:, 0] < FIRST_ROW, _DOWN, _UP)
    from_left = np.where(_on_rail(cell[..., 0]), _RIGHT, enter)
    from_right = np.where(_on_rail(cell[..., 0]), _to_edge(cell), _LEFT)
    return np.where(cell[:, 1] < block, from_left, from_right)


def _to_edge(cell: AnyArray) -> AnyArray:
    return np.where(cell[:, 0] <= _MIDDLE_ROW, _UP, _DOWN)
