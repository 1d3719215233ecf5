"""A field with good and bad food and a laser: shaped like Unity's Food Collector.

Actions are hybrid: three continuous actions move and turn, a discrete action fires the laser, which
burns the nearest food in front. The laser is masked while it recharges.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps
from pipeline.simulators.games import rays
from pipeline.simulators.games.areas import Rows, SoloAreas, between, vector
from pipeline.simulators.games.drawing import AMBER, FLOOR, GREEN, RED, Canvas

BEHAVIOR = "FoodCollector?team=0"
MAX_STEP = 300  # number of decisions after which an episode is interrupted
HALF_SIDE = 10.0
N_GOOD, N_BAD = 10, 10
SPEED = 0.5  # distance per decision at full speed
TURN_DEGREES = 20.0
TOUCH = 1.0  # distance at which food is eaten
BEAM_LENGTH, BEAM_HALF_WIDTH = 5.0, 0.5
RECHARGE = 5  # number of decisions for which the laser is masked after a shot
WALL, GOOD, BAD = range(3)
RAY_DEGREES = rays.spread(4, 80.0)
RAY_LENGTH = 12.0

_N_FOOD = N_GOOD + N_BAD
# Number of places that each episode draws for food that appears again, used one after another.
_N_PLACES = 256
_EDGE, _MARGIN, _KEEP = HALF_SIDE - 1.0, 0.5, np.float32(0.5)
_TAGS = np.array([WALL] + [GOOD] * N_GOOD + [BAD] * N_BAD)
_VALUE = np.array([1] * N_GOOD + [-1] * N_BAD, dtype=np.float32)
_RADII = np.full(_N_FOOD, 0.5, dtype=np.float32)
_SPEC = BehaviorSpec([rays.sensor(RAY_DEGREES, 3), vector(3)], ActionSpec.create_hybrid(3, [2]))


class Collector(SoloAreas):
    """N independent fields with one agent each."""

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__("collector", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._position = self._keep("position", (2,), np.float32)
        self._velocity = self._keep("velocity", (2,), np.float32)
        self._degrees = self._keep("degrees", (), np.float64)
        self._food = self._keep("food", (_N_FOOD, 2), np.float32)
        self._recharge = self._keep("recharge", ())
        self._places = self._keep("places", (_N_PLACES, 2), np.float32)
        self._n_placed = self._keep("n_placed", ())

    def _place(self, rows: AnyArray) -> None:
        """Draw the places of agent and food, and the later places of food that was eaten."""
        uniform = self._uniform(rows, 3 + 2 * (_N_FOOD + _N_PLACES))
        places = between(uniform[:, 3:], -_EDGE, _EDGE).reshape(len(rows), -1, 2)
        self._position[rows] = between(uniform[:, :2], -_EDGE, _EDGE)
        self._degrees[rows] = uniform[:, 2] * 360.0
        self._velocity[rows] = 0.0
        self._food[rows], self._places[rows] = places[:, :_N_FOOD], places[:, _N_FOOD:]
        self._recharge[rows], self._n_placed[rows] = 0, 0

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Move ahead and right and turn right, by actions in [-1, 1]; choice 1 fires the laser."""
        ahead, right, turn = np.clip(action.continuous, -1.0, 1.0).T
        # A policy may ignore the mask, so the recharge is checked here, too.
        fires = (action.discrete[:, 0] == 1) & (self._recharge == 0)
        self._degrees += turn * TURN_DEGREES
        self._degrees %= 360.0
        forward = rays.directions(self._degrees)
        push = ahead[:, None] * forward + right[:, None] * _to_right(forward)
        speed = np.sqrt((push * push).sum(axis=1))
        # An agent that fires moves at half speed; diagonal moves are not faster than other moves.
        most = np.where(fires, 0.5 * SPEED, SPEED) / np.maximum(speed, 1.0)
        self._velocity *= _KEEP
        self._velocity += (1 - _KEEP) * push * most[:, None].astype(np.float32)
        limit = HALF_SIDE - _MARGIN
        np.clip(self._position + self._velocity, -limit, limit, out=self._position)
        # The laser fires before the agent eats: food that it burns is not eaten.
        gone = self._shot(forward, fires)
        offset = self._food - self._position[:, None]
        eaten = ((offset * offset).sum(axis=2) < TOUCH**2) & ~gone
        gone = eaten | gone
        if gone.any():
            # Food that was eaten or burnt appears again at the next unused places in `_places`.
            # They were drawn at the start of the episode, so that later random numbers do not
            # depend on the agent's actions.
            rows, food = np.nonzero(gone)
            which = (self._n_placed[:, None] + gone.cumsum(axis=1) - 1)[rows, food]
            self._food[rows, food] = self._places[rows, which % _N_PLACES]
            self._n_placed += gone.sum(axis=1)
        self._recharge[:] = np.where(fires, RECHARGE, np.maximum(self._recharge - 1, 0))
        return (eaten * _VALUE).sum(axis=1, dtype=np.float32), np.zeros(len(fires), dtype=np.bool_)

    def _shot(self, forward: FloatArray, fires: BoolArray) -> BoolArray:
        """Return bool [N, number of foods], True for the nearest food in the beam of a shot."""
        burnt = np.zeros((len(fires), _N_FOOD), dtype=np.bool_)
        rows = np.flatnonzero(fires)
        if len(rows):
            offset = self._food[rows] - self._position[rows, None]
            along = (offset * forward[rows, None]).sum(axis=2)
            across = (offset * _to_right(forward[rows])[:, None]).sum(axis=2)
            in_beam = (np.abs(across) < BEAM_HALF_WIDTH) & (along > 0.0) & (along < BEAM_LENGTH)
            nearest = np.where(in_beam, along, np.inf).argmin(axis=1)
            burnt[rows, nearest] = in_beam.any(axis=1)
        return burnt

    def _masks(self) -> list[BoolArray]:
        mask = np.zeros((len(self._recharge), 2), dtype=np.bool_)
        mask[:, 1] = self._recharge > 0
        return [mask]

    def _observe(self, rows: Rows) -> list[FloatArray]:
        position, degrees = self._position[rows], self._degrees[rows]
        direction = rays.directions(degrees[:, None] + RAY_DEGREES)
        walls = rays.to_walls(position, direction, -HALF_SIDE, HALF_SIDE)
        food = rays.to_circles(position, direction, self._food[rows], _RADII)
        forward, velocity = direction[:, 0], self._velocity[rows] / np.float32(SPEED)
        body = np.empty((len(position), 3), dtype=np.float32)
        body[:, 0] = (velocity * _to_right(forward)).sum(axis=1)
        body[:, 1] = (velocity * forward).sum(axis=1)
        body[:, 2] = self._recharge[rows] == 0
        return [rays.encode([walls, food], _TAGS, 3, RAY_LENGTH), body]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's field: good food is green, the laser amber."""
        canvas = Canvas((-HALF_SIDE, -HALF_SIDE), (HALF_SIDE, HALF_SIDE))
        canvas.box((-HALF_SIDE, -HALF_SIDE), (HALF_SIDE, HALF_SIDE), FLOOR)
        position, forward = self._position[agent], rays.directions(self._degrees[agent])
        for place, value in zip(self._food[agent], _VALUE, strict=True):
            canvas.disc(place, 0.4, GREEN if value > 0 else RED)
        if self._recharge[agent] == RECHARGE:
            beam = [position, position + BEAM_LENGTH * forward]
            canvas.line(beam, 2 * BEAM_HALF_WIDTH, AMBER)
        canvas.walker(position, forward, 0.6)
        return canvas.pixels()


def _to_right(forward: FloatArray) -> FloatArray:
    """Return the unit vectors `forward` [..., 2] after a quarter turn clockwise."""
    return np.stack([forward[..., 1], -forward[..., 0]], axis=-1)


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk to the nearest good food, and burn bad food that is in front."""
    tag, distance = rays.sights(steps.obs[0], RAY_DEGREES, 3)
    reach = distance * RAY_LENGTH
    # Food ahead is preferred to food at the same distance that needs a turn.
    good = np.where(tag == GOOD, reach + 0.03 * np.abs(RAY_DEGREES), np.inf)
    # Without good food in sight, the expert wanders, and turns around in front of a wall.
    roam = np.where(reach[:, 0] < 3.0, 90.0, 10.0)
    bearing = np.where(np.isfinite(good.min(axis=1)), RAY_DEGREES[good.argmin(axis=1)], roam)
    # Bad food in the way is a danger: the expert slows down, turns to it and fires.
    off = np.abs(RAY_DEGREES - bearing[:, None])
    aside = np.abs(np.sin(np.radians(off))) * reach
    danger = (tag == BAD) & (off < 90.0) & (reach < 2.0) & (aside < 1.2)
    threat = RAY_DEGREES[np.where(danger, reach, np.inf).argmin(axis=1)]
    waits = danger.any(axis=1)
    bearing = np.where(waits, threat, bearing)
    moves = np.zeros((len(tag), 3), dtype=np.float32)
    moves[:, 0] = np.where(waits, -0.2, np.where(np.abs(bearing) > 45.0, 0.3, 1.0))
    moves[:, 2] = np.clip(bearing / TURN_DEGREES, -1.0, 1.0)
    is_aimed = (tag[:, 0] == BAD) & (reach[:, 0] < BEAM_LENGTH) & (np.abs(bearing) < 1.0)
    fires = is_aimed & (steps.obs[1][:, 2] > 0.5)
    return ActionTuple(moves, fires[:, None].astype(np.int32))
