"""Numbered tiles around a circle, to be visited in rising order: shaped like Unity's Sorter.

The number of tiles changes between episodes; the agent observes them as a list of entities.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps
from pipeline.errors import SettingsError
from pipeline.simulators.games import rays
from pipeline.simulators.games.areas import Rows, SoloAreas, vector
from pipeline.simulators.games.drawing import AMBER, FLOOR, GRAY, Canvas

BEHAVIOR = "Sorter?team=0"
MAX_STEP = 500  # number of decisions after which an episode is interrupted
MAX_TILES = 20  # largest number of tiles, and number of places and of numbers that tiles can have
RADIUS = 10.0  # radius of the circle of tiles
REACH = 9.5  # largest distance of the agent from the middle
TOUCH = 1.5  # distance at which a tile is visited
TURN_DEGREES, N_HEADINGS = 20, 18
SPEED = 1.0

# Index of the mark for visited tiles, after the one-hot number and the tile's direction.
_VISITED = MAX_TILES + 2
_RIGHT_REWARD, _WRONG_REWARD = 1.0, -1.0
_PLACES = rays.directions(np.arange(MAX_TILES) * 360.0 / MAX_TILES)
_FORWARD = rays.directions(np.arange(N_HEADINGS) * TURN_DEGREES)
_TO_RIGHT = rays.directions(np.arange(N_HEADINGS) * TURN_DEGREES + 90.0)
_SIGNS = np.array([0, 1, -1])
_NUMBERS = np.eye(MAX_TILES, dtype=np.float32)
_SPEC = BehaviorSpec(
    [ObservationSpec.entities(MAX_TILES, _VISITED + 1, "BufferSensor"), vector(4)],
    ActionSpec.create_discrete([3, 3, 3]),
)


class Sorter(SoloAreas):
    """N independent circles of tiles with one agent each."""

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__("sorter", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._position = self._keep("position", (2,), np.float32)
        self._heading = self._keep("heading", ())
        self._number = self._keep("number", (MAX_TILES,))
        self._waits = self._keep("waits", (MAX_TILES,), np.bool_)
        self._entities = self._keep("entities", (MAX_TILES, _VISITED + 1), np.float32)

    def _place(self, rows: AnyArray) -> None:
        """Spread 1 to `num_tiles` tiles with different numbers over different places."""
        uniform = self._uniform(rows, 1 + 2 * MAX_TILES)
        # Each area reads the parameter, because a sampler draws a new value at each reading.
        most = np.array([self._read_num_tiles() for _ in rows])
        n_tiles = 1 + (uniform[:, 0] * most).astype(np.int64)
        used = np.arange(MAX_TILES) < n_tiles[:, None]
        # The order of uniform numbers is a random permutation.
        number = uniform[:, 1 : 1 + MAX_TILES].argsort(axis=1)
        place = uniform[:, 1 + MAX_TILES :].argsort(axis=1)
        self._position[rows], self._heading[rows] = 0.0, 0
        self._number[rows], self._waits[rows] = number, used
        tiles = np.zeros((len(rows), MAX_TILES, _VISITED + 1), dtype=np.float32)
        tiles[:, :, :MAX_TILES], tiles[:, :, MAX_TILES:_VISITED] = _NUMBERS[number], _PLACES[place]
        self._entities[rows] = tiles * used[:, :, None]

    def _read_num_tiles(self) -> int:
        value = self.parameters.read("num_tiles", MAX_TILES)
        if not 1 <= value < MAX_TILES + 1:
            raise SettingsError(
                f"sorter: the environment parameter num_tiles must be from 1 to {MAX_TILES}, got "
                f"{value}; change it in the configuration's environment_parameters."
            )
        return int(value)

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Move by branches 0 (1 forward, 2 back) and 1 (1 right, 2 left), turn by branch 2."""
        ahead, right, turn = _SIGNS[action.discrete.T]
        self._heading -= turn
        self._heading %= N_HEADINGS
        move = ahead[:, None] * _FORWARD[self._heading] + right[:, None] * _TO_RIGHT[self._heading]
        # The two parts of a diagonal move are shortened, so that it is as long as other moves.
        length = np.where((ahead != 0) & (right != 0), np.sqrt(0.5), 1.0) * SPEED
        self._position += (move * length[:, None]).astype(np.float32)
        distance = np.sqrt((self._position * self._position).sum(axis=1, keepdims=True))
        self._position *= REACH / np.maximum(distance, np.float32(REACH))
        return self._visit()

    def _visit(self) -> tuple[FloatArray, BoolArray]:
        """Return each agent's reward, and whether it touched a wrong tile or the last tile."""
        place = self._entities[:, :, MAX_TILES:_VISITED] * np.float32(RADIUS)
        offset = place - self._position[:, None]
        touched = ((offset * offset).sum(axis=2) < TOUCH**2) & self._waits
        reward = np.full(len(touched), -1.0 / MAX_STEP, dtype=np.float32)
        visiting = touched.any(axis=1)
        if not visiting.any():
            return reward, visiting
        # Visited and unused tiles get a number above all others.
        next_tile = np.where(self._waits, self._number, MAX_TILES).argmin(axis=1)
        right = touched[self._agent_id, next_tile]
        reward += np.where(right, _RIGHT_REWARD, np.where(visiting, _WRONG_REWARD, 0.0))
        rows, tiles = np.flatnonzero(right), next_tile[right]
        self._waits[rows, tiles] = False
        self._entities[rows, tiles, _VISITED] = 1.0
        return reward, (visiting & ~right) | ~self._waits.any(axis=1)

    def _observe(self, rows: Rows) -> list[FloatArray]:
        agent = np.empty((len(self._position[rows]), 4), dtype=np.float32)
        agent[:, :2] = self._position[rows] / np.float32(RADIUS)
        agent[:, 2:] = _FORWARD[self._heading[rows]]
        # Later steps write to the array, so a view of all its areas must be copied.
        return [self._entities[rows].copy(), agent]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's circle; tiles that it has visited are gray."""
        canvas = Canvas((-11.5, -11.5), (11.5, 11.5))
        canvas.disc((0.0, 0.0), 11.4, FLOOR)
        tiles = self._entities[agent]
        for number in np.flatnonzero(tiles.any(axis=1)):
            place = RADIUS * tiles[number, MAX_TILES:_VISITED]
            canvas.disc(place, 1.3, AMBER if self._waits[agent, number] else GRAY)
            canvas.text(place, str(self._number[agent, number] + 1), 1.4)
        canvas.walker(self._position[agent], _FORWARD[self._heading[agent]], 0.9)
        return canvas.pixels()


# Choices of the first two branches for moves at 0, 45, ... degrees to the right.
_AHEAD, _RIGHTWARD = np.array([1, 1, 0, 2, 2, 2, 0, 1]), np.array([0, 1, 1, 1, 0, 2, 2, 2])


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk to the unvisited tile with the smallest number, through an inner circle.

    The inner circle keeps the agent away from other tiles.
    """
    tiles, agent = steps.obs
    waits = tiles[:, :, :MAX_TILES].any(axis=2) & (tiles[:, :, -1] < 0.5)
    number = np.where(waits, tiles[:, :, :MAX_TILES].argmax(axis=2), MAX_TILES)
    place = tiles[np.arange(len(tiles)), number.argmin(axis=1), MAX_TILES:_VISITED]
    position = agent[:, :2]
    radius = np.sqrt((position * position).sum(axis=1))
    # Distance of the agent from the line through the middle and the tile.
    aside = np.abs(position[:, 0] * place[:, 1] - position[:, 1] * place[:, 0])
    is_before = (aside < 0.1) & ((position * place).sum(axis=1) > 0.0)
    target = np.where((radius > 0.75)[:, None], 0.0, 0.45 * place)
    target = np.where((is_before & (radius > 0.35))[:, None], place, target)
    change = target - position
    bearing = np.degrees(
        np.arctan2(change[:, 0], change[:, 1]) - np.arctan2(agent[:, 2], agent[:, 3])
    )
    bearing = rays.relative(bearing)
    turn = np.where(np.abs(bearing) > 0.5 * TURN_DEGREES, np.sign(bearing), 0.0)
    eighth = np.round((bearing - TURN_DEGREES * turn) / 45.0).astype(np.int64) % 8
    moves = [_AHEAD[eighth], _RIGHTWARD[eighth], np.where(turn > 0.0, 2, np.abs(turn))]
    return ActionTuple(discrete=np.stack(moves, axis=1))
