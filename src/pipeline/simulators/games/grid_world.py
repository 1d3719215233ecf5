"""A square grid with two goals, of which one must be reached: shaped like Unity's GridWorld.

An agent observes the grid as an image, and a goal signal says which goal to reach, the green plus
or the red ex. All steps are computed for all areas at once; only the beginnings of episodes are
drawn one by one, each area from its own random stream.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    ObservationSpec,
    ObservationType,
)
from pipeline.core.steps import DecisionSteps
from pipeline.simulators.games import drawing
from pipeline.simulators.games.areas import Rows, SoloAreas

BEHAVIOR = "GridWorld?team=0"
SIZE = 5  # number of cells along each side of the grid
CELL = 4  # number of pixels along each side of a cell
MAX_STEP = 100  # number of decisions after which an episode is interrupted
MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
"""Row and column change of each action: nothing, up, down, left, right."""
RED, GREEN, BLUE = 0, 1, 2
PLUS = np.array([(0, 1, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1), (0, 1, 1, 0)], dtype=np.float32)
EX = np.array([(1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 1, 0), (1, 0, 0, 1)], dtype=np.float32)
AGENT = np.ones((CELL, CELL), dtype=np.float32)

# The rewards of Unity's GridWorld; the wrong goal gives the negative goal reward.
_STEP_REWARD, _GOAL_REWARD = -0.01, 1.0

_SPEC = BehaviorSpec(
    [
        ObservationSpec.visual(3, SIZE * CELL, SIZE * CELL, "GridSensor"),
        ObservationSpec.vector(2, "VectorSensor_size2_GoalSignal", ObservationType.GOAL_SIGNAL),
    ],
    ActionSpec.create_discrete([len(MOVES)]),
)


class GridWorld(SoloAreas):
    """N independent grids with one agent each."""

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__("grid_world", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._agent = self._keep("agent", (2,))
        self._goals = self._keep("goals", (2, 2))
        self._target_goal = self._keep("wanted", ())

    def _place(self, rows: AnyArray) -> None:
        n_cells = SIZE * SIZE
        for row in rows.tolist():
            # One draw decides both the target goal and the three cells.
            number = int(self._rngs[row].integers(n_cells * (n_cells - 1) * (n_cells - 2) * 2))
            number, self._target_goal[row] = divmod(number, 2)
            free = list(range(n_cells))
            cells = []
            for _ in range(3):
                number, index = divmod(number, len(free))
                cells.append(divmod(free.pop(index), SIZE))
            self._agent[row], self._goals[row] = cells[0], cells[1:]

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Move by one cell; a move off the grid, which the mask forbids, has no effect."""
        np.clip(self._agent + MOVES[action.discrete[:, 0]], 0, SIZE - 1, out=self._agent)
        at_goal = (self._goals == self._agent[:, None]).all(axis=2)
        reached = at_goal.any(axis=1)
        won = at_goal[self._agent_id, self._target_goal]
        goal = np.where(won, _GOAL_REWARD, np.where(reached, -_GOAL_REWARD, 0.0))
        return (goal + _STEP_REWARD).astype(np.float32), reached

    def _masks(self) -> list[BoolArray]:
        return [forbidden(self._agent)]

    def _observe(self, rows: Rows) -> list[FloatArray]:
        image = draw(self._agent[rows], self._goals[rows])
        return [image, np.eye(2, dtype=np.float32)[self._target_goal[rows]]]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's grid, with an edge in the color of the target goal."""
        colors = (drawing.GREEN, drawing.RED)
        canvas = drawing.Canvas((-0.25, -0.25), (SIZE + 0.25, SIZE + 0.25))
        canvas.box((-0.25, -0.25), (SIZE + 0.25, SIZE + 0.25), colors[self._target_goal[agent]])
        for row, column in np.ndindex(SIZE, SIZE):
            canvas.box((column + 0.03, row + 0.03), (column + 0.97, row + 0.97), drawing.FLOOR)
        rows = np.array([*self._goals[agent], self._agent[agent]])
        plus, ex, place = np.stack((rows[:, 1] + 0.5, SIZE - rows[:, 0] - 0.5), axis=1)
        canvas.plus(plus, 0.32, colors[0])
        canvas.ex(ex, 0.26, colors[1])
        canvas.disc(place, 0.32, drawing.BLUE)
        return canvas.pixels()


def forbidden(agent: AnyArray) -> BoolArray:
    """Return bool [N, 5], True where an action leaves the grid, for agents [N, 2] (row, column)."""
    target = agent[:, None] + MOVES
    return np.asarray(((target < 0) | (target >= SIZE)).any(axis=2))


def draw(agent: AnyArray, goals: AnyArray) -> FloatArray:
    """Return float32 [N, 3, 20, 20] images of grids, row 0 at the top.

    `agent` [N, 2], and `goals` [N, 2, 2] of the plus and of the ex, are rows and columns.
    """
    n = len(agent)
    image = np.zeros((n, 3, SIZE, CELL, SIZE, CELL), dtype=np.float32)
    # `cells` is a view of the image with the pixels of a cell as the last axes, so writing to a
    # cell writes to the image.
    cells = image.transpose(0, 2, 4, 1, 3, 5)
    rows = np.arange(n)
    cells[rows, goals[:, 0, 0], goals[:, 0, 1], GREEN] = PLUS
    cells[rows, goals[:, 1, 0], goals[:, 1, 1], RED] = EX
    cells[rows, agent[:, 0], agent[:, 1], BLUE] = AGENT
    return image.reshape(n, 3, SIZE * CELL, SIZE * CELL)


def expert(steps: DecisionSteps) -> ActionTuple:
    """Move along a shortest path to the target goal that does not touch the other goal."""
    agent, plus, ex = (_find(steps.obs[0], color) for color in (BLUE, GREEN, RED))
    wants_plus = steps.obs[1].argmax(axis=1)[:, None] == 0
    goal, other = np.where(wants_plus, plus, ex), np.where(wants_plus, ex, plus)
    target = agent[:, None] + MOVES
    is_open = ~forbidden(agent) & (target != other[:, None]).any(axis=2)
    offset = np.abs(target - goal[:, None])
    # The best move ends in the cell that is nearest to the goal. Of equally near cells the expert
    # takes the cell with the most equal row and column offsets, because in the goal's row or column
    # the other goal could block the only shortest path.
    cost = offset.sum(axis=2) + 0.1 * offset.max(axis=2) + 100.0 * ~is_open
    # Standing still costs more than any open cell, and less than any closed cell.
    cost[:, 0] = 50.0
    return ActionTuple(discrete=cost.argmin(axis=1)[:, None])


def _find(image: AnyArray, channel: int) -> AnyArray:
    """Return row and column [N, 2] of the cell with the largest sum of `channel` in each image."""
    cells = image[:, channel].reshape(-1, SIZE, CELL, SIZE, CELL).sum(axis=(2, 4))
    return np.stack(np.divmod(cells.reshape(len(image), -1).argmax(axis=1), SIZE), axis=1)
