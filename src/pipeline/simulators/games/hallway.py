"""A cue at the beginning of a hallway says which goal at its end is right, as in Unity's Hallway.

The cue is in a small room. An agent that leaves the room is put on a fixed place in the corridor,
facing ahead, and the door closes: no later observation depends on the cue, so a policy without
memory can only guess.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps
from pipeline.simulators.games import rays
from pipeline.simulators.games.areas import Rows, SoloAreas, between, vector
from pipeline.simulators.games.drawing import FLOOR, GREEN, INK, RED, Canvas

BEHAVIOR = "Hallway?team=0"
MAX_STEP = 150  # number of decisions after which an episode is interrupted
HALF_WIDTH, ROOM_END, CORRIDOR_END = 4.0, -6.0, 12.0
"""Walls are at x = -4 and 4, z = -6 and 12; the door of the room is at z = 0."""
TURN_DEGREES, N_HEADINGS = 20, 18
WALL, SYMBOL_O, SYMBOL_X, GOAL_O, GOAL_X = range(5)
RAY_DEGREES = rays.spread(3, 60.0)
RAY_LENGTH = 20.0
SPEED = 1.0
START_Z = 0.5  # z at which every agent enters the corridor, with x = 0 and heading 0

# The rewards of Unity's Hallway for the two goals.
_RIGHT_REWARD, _WRONG_REWARD = 1.0, -0.1
_MARGIN, _SYMBOL_Z, _GOAL_X, _GOAL_Z = 0.5, -1.5, 2.5, CORRIDOR_END - 1.0
# Radii of the six things: symbols in the room, goals, and symbols at the end (see `_place`).
_RADIUS = np.array([1.2, 1.2, 1.5, 1.5, 0.9, 0.9], dtype=np.float32)
# Tags of the wall and of the six things, in the order of the distances for `rays.encode`.
_TAGS = np.array([WALL, SYMBOL_O, SYMBOL_X, GOAL_O, GOAL_X, SYMBOL_O, SYMBOL_X])
_HEADINGS = np.arange(N_HEADINGS) * TURN_DEGREES
_FORWARD = rays.directions(_HEADINGS)
_RAYS = rays.directions(_HEADINGS[:, None] + RAY_DEGREES)
_SPEC = BehaviorSpec(
    [rays.sensor(RAY_DEGREES, 5), vector(3)], ActionSpec.create_discrete([len(rays.MOVES)])
)


class Hallway(SoloAreas):
    """N independent hallways with one agent each.

    With `cue_at_end` the cue is also between the goals, so that no memory is needed. A policy that
    solves this variant but not the default variant fails because of its memory.
    """

    def __init__(self, *, seed: int = 0, n_agents: int = 16, cue_at_end: bool = False) -> None:
        super().__init__("hallway", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._cue_at_end = cue_at_end
        self._position = self._keep("position", (2,), np.float32)
        self._heading = self._keep("heading", ())
        self._is_past = self._keep("is_past", (), np.bool_)
        self._cue = self._keep("cue", ())
        self._things = self._keep("things", (6, 2), np.float32)

    def _place(self, rows: AnyArray) -> None:
        k, uniform = np.arange(len(rows)), self._uniform(rows, 6)
        self._position[rows, 0] = between(uniform[:, 0], -2.0, 2.0)
        self._position[rows, 1] = between(uniform[:, 1], -5.0, -3.5)
        self._heading[rows] = (uniform[:, 2] * N_HEADINGS).astype(np.int64)
        self._is_past[rows] = False
        self._cue[rows] = cue = (uniform[:, 3] * 2).astype(np.int64)
        # The things are two symbols in the room, two goals, and two symbols at the end. Things that
        # an episode does not use are hidden.
        things = np.full((len(rows), 6, 2), rays.HIDDEN, dtype=np.float32)
        things[k, cue, 0] = between(uniform[:, 4], -1.5, 1.5)
        things[k, cue, 1] = _SYMBOL_Z
        side = np.where(uniform[:, 5] < 0.5, -_GOAL_X, _GOAL_X)
        things[:, 2, 0], things[:, 3, 0] = side, -side
        things[:, 2:4, 1] = _GOAL_Z
        if self._cue_at_end:
            things[k, 4 + cue] = (0.0, CORRIDOR_END)
        self._things[rows] = things

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Turn or move each agent: 0 nothing, 1 forward, 2 back, 3 turn right, 4 turn left."""
        choice = action.discrete[:, 0]
        self._heading += rays.TURNS[choice]
        self._heading %= N_HEADINGS
        position = self._position
        position += SPEED * rays.MOVES[choice][:, None] * _FORWARD[self._heading]
        np.clip(position[:, 0], _MARGIN - HALF_WIDTH, HALF_WIDTH - _MARGIN, out=position[:, 0])
        # After the agent has left the room, the closed door is a wall.
        low = np.where(self._is_past, _MARGIN, ROOM_END + _MARGIN)
        np.clip(position[:, 1], low, CORRIDOR_END - _MARGIN, out=position[:, 1])
        passing = (position[:, 1] >= 0.0) & ~self._is_past
        if passing.any():
            self._is_past |= passing
            position[passing] = (0.0, START_Z)
            self._heading[passing] = 0
            self._things[passing, :2] = rays.HIDDEN
        offset = self._things[:, 2:4] - position[:, None]
        touched = (offset * offset).sum(axis=2) < _RADIUS[2] ** 2
        right = touched[self._agent_id, self._cue]
        reached = touched.any(axis=1)
        goal = np.where(right, _RIGHT_REWARD, np.where(reached, _WRONG_REWARD, 0.0))
        # Each step gives a small negative reward, so that faster episodes have higher returns.
        return (goal - 1.0 / MAX_STEP).astype(np.float32), reached

    def _observe(self, rows: Rows) -> list[FloatArray]:
        position, heading = self._position[rows], self._heading[rows]
        past, direction = self._is_past[rows], _RAYS[heading]
        low = np.empty((len(position), 1, 2), dtype=np.float32)
        low[:, 0, 0], low[:, 0, 1] = -HALF_WIDTH, np.where(past, 0.0, ROOM_END)
        high = np.array([HALF_WIDTH, CORRIDOR_END], dtype=np.float32)
        walls = rays.to_walls(position, direction, low, high)
        n = 6 if self._cue_at_end else 4
        things = rays.to_circles(position, direction, self._things[rows, :n], _RADIUS[:n])
        agent = np.empty((len(position), 3), dtype=np.float32)
        agent[:, :2], agent[:, 2] = _FORWARD[heading], past
        return [rays.encode([walls, things], _TAGS, 5, RAY_LENGTH), agent]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's hallway, which leads to the right."""
        canvas = Canvas((ROOM_END - 0.3, -HALF_WIDTH - 0.3), (CORRIDOR_END + 0.8, HALF_WIDTH + 0.3))
        low = 0.0 if self._is_past[agent] else ROOM_END
        canvas.box((low, -HALF_WIDTH), (CORRIDOR_END, HALF_WIDTH), FLOOR)
        canvas.line([(0.0, -HALF_WIDTH), (0.0, HALF_WIDTH)], 0.15, INK)
        for thing, (x, z) in enumerate(self._things[agent].tolist()):
            if x == rays.HIDDEN:
                continue
            if thing % 2 == 0:
                canvas.disc((z, -x), 0.8, GREEN)
                canvas.disc((z, -x), 0.45, FLOOR)
            else:
                canvas.ex((z, -x), 0.6, RED)
        (x, z), (right, ahead) = self._position[agent], _FORWARD[self._heading[agent]]
        canvas.walker((z, -x), (ahead, -right), 0.5)
        return canvas.pixels()


class Expert:
    """Looks at the symbol, walks to the end and chooses the goal of the remembered symbol."""

    def __init__(self) -> None:
        self._cue = np.zeros(0, dtype=np.int64)

    def __call__(self, steps: DecisionSteps) -> ActionTuple:
        """Return one move per agent."""
        tag, _ = rays.sights(steps.obs[0], RAY_DEGREES, 5)
        cue = self._remember(steps.agent_id, tag)
        goal, bearing = rays.nearest_ahead(tag == (GOAL_O + cue)[:, None], RAY_DEGREES)
        compass = np.degrees(np.arctan2(steps.obs[1][:, 0], steps.obs[1][:, 1]))
        is_past = steps.obs[1][:, 2] > 0.5
        return rays.walk(np.where(goal & is_past, bearing, -compass), TURN_DEGREES)

    def _remember(self, agents: AnyArray, tag: AnyArray) -> AnyArray:
        """Store visible symbols; return the last symbol of each agent, [N]: 0 is O, 1 is X."""
        # Agents may appear later, so the memory grows with the largest id.
        missing = int(agents.max(initial=-1)) + 1 - len(self._cue)
        self._cue = np.pad(self._cue, (0, max(0, missing)))
        for symbol in (SYMBOL_O, SYMBOL_X):
            self._cue[agents[(tag == symbol).any(axis=1)]] = symbol - SYMBOL_O
        return self._cue[agents]


expert = Expert
