"""Rooms in a ring: press the switch in one room, then reach the goal that appears in another.

Shaped like Unity's Pyramids. There is no reward before the goal, and switch and goal are far apart,
so random actions do not reach the goal: learning needs demonstrations or a curiosity reward.
"""

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps
from pipeline.simulators.games import drawing, rays
from pipeline.simulators.games.areas import Rows, SoloAreas, vector

BEHAVIOR = "Pyramids?team=0"
MAX_STEP = 500  # number of decisions after which an episode is interrupted
ROOM = 8.0  # length of a room's sides; there are three by three rooms, without the middle room
SIDE = 3 * ROOM
DOORS = (4.0, 20.0)  # coordinates of the middles of the doors in the walls at x or z = 8 and 16
HALF_DOOR = 1.5
SPOT = 2.4  # distance of a switch, a goal or a pyramid from the middle of its room, in x and in z
RING = np.array([(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0)])
"""Column (x) and row (z) of the rooms in the order of the ring, clockwise from the corner at 0."""
TURN_DEGREES, N_HEADINGS = 30, 12
WALL, SWITCH_OFF, SWITCH_ON, GOAL, PYRAMID = range(5)
RAY_DEGREES = rays.spread(5, 75.0)
RAY_LENGTH = 20.0
SPEED = 1.0
RADIUS = 0.8  # radius of switch, goal and pyramids
TOUCH = 1.2  # distance from the middle of a switch or goal at which it is touched

_N_ROOMS, _MARGIN, _PUSH = len(RING), 0.4, 1.1
# The middle of all rooms, and distances of inner walls and of doors' middles from it.
_MIDDLE, _TO_LINE, _TO_DOOR = np.float32(SIDE / 2), ROOM / 2, DOORS[1] - SIDE / 2
# The goal's reward in Unity's Pyramids.
_GOAL_REWARD = 2.0
_LINES = np.array([ROOM, 2 * ROOM], dtype=np.float32)
_CORNERS = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)]) * SPOT
_HEADINGS = np.arange(N_HEADINGS) * TURN_DEGREES
_FORWARD = rays.directions(_HEADINGS)
_RAYS = rays.directions(_HEADINGS[:, None] + RAY_DEGREES)
_RADII = np.full(3 + _N_ROOMS, RADIUS, dtype=np.float32)
_TAGS = np.array([WALL] * 5 + [SWITCH_OFF, SWITCH_ON, GOAL] + [PYRAMID] * _N_ROOMS)
_OFF, _ON, _GOAL, _PYRAMIDS = 0, 1, 2, slice(3, None)
_SPEC = BehaviorSpec(
    [rays.sensor(RAY_DEGREES, 5), vector(5)], ActionSpec.create_discrete([len(rays.MOVES)])
)


class Pyramids(SoloAreas):
    """N independent rings of rooms with one agent each."""

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__("pyramids", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._position = self._keep("position", (2,), np.float32)
        self._heading = self._keep("heading", ())
        self._is_on = self._keep("is_on", (), np.bool_)
        self._switch = self._keep("switch", (2,), np.float32)
        self._goal = self._keep("goal", (2,), np.float32)
        self._things = self._keep("things", (3 + _N_ROOMS, 2), np.float32)

    def _place(self, rows: AnyArray) -> None:
        """Put the switch 2 or more rooms from the agent, and the goal 3 or more from the switch."""
        k, uniform = np.arange(len(rows)), self._uniform(rows, 4 + _N_ROOMS)
        start, self._heading[rows], away, next_ = (
            (uniform[:, :4] * (_N_ROOMS, N_HEADINGS, _N_ROOMS - 3, _N_ROOMS - 5)).astype(np.int64).T
        )
        # In a ring of eight rooms, the rooms 2 to 6 further on are at least two rooms away in both
        # directions, and the rooms 3 to 5 further on at least three.
        switch = (start + 2 + away) % _N_ROOMS
        goal = (switch + 3 + next_) % _N_ROOMS
        middle = (RING + 0.5) * ROOM
        spots = middle + _CORNERS[(uniform[:, 4:] * 4).astype(np.int64)]
        self._position[rows] = middle[start]
        self._is_on[rows] = False
        self._switch[rows], self._goal[rows] = spots[k, switch], spots[k, goal]
        things = np.full((len(rows), 3 + _N_ROOMS, 2), rays.HIDDEN, dtype=np.float32)
        things[:, _PYRAMIDS] = spots
        for empty in (start, switch, goal):
            things[k, 3 + empty] = rays.HIDDEN
        things[:, _OFF] = self._switch[rows]
        self._things[rows] = things

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Turn or move each agent: 0 nothing, 1 forward, 2 back, 3 turn right, 4 turn left."""
        choice = action.discrete[:, 0]
        self._heading += rays.TURNS[choice]
        self._heading %= N_HEADINGS
        change = SPEED * rays.MOVES[choice][:, None] * _FORWARD[self._heading]
        position = self._position
        # Agents move along one axis after the other, so that they slide along walls.
        for axis in (0, 1):
            position[:, axis] = slide(position[:, axis], position[:, 1 - axis], change[:, axis])
        self._push_out()
        pressed = self._touches(_OFF)
        if pressed.any():
            self._is_on |= pressed
            self._things[pressed, _OFF] = rays.HIDDEN
            self._things[pressed, _ON] = self._switch[pressed]
            self._things[pressed, _GOAL] = self._goal[pressed]
        reached = self._touches(_GOAL)
        # Each step gives a small negative reward, so that faster episodes have higher returns.
        return (_GOAL_REWARD * reached - 1.0 / MAX_STEP).astype(np.float32), reached

    def _touches(self, thing: int) -> BoolArray:
        offset = self._things[:, thing] - self._position
        return np.asarray((offset * offset).sum(axis=1) < TOUCH**2)

    def _push_out(self) -> None:
        """Move agents that have walked into a pyramid to the nearest point of its edge."""
        offset = self._position[:, None] - self._things[:, _PYRAMIDS]
        distance = np.sqrt((offset * offset).sum(axis=2))
        nearest = distance.argmin(axis=1)
        inside = distance[self._agent_id, nearest] < _PUSH
        if inside.any():
            rows, thing = np.flatnonzero(inside), nearest[inside]
            away = offset[rows, thing] / np.maximum(distance[rows, thing], 1e-3)[:, None]
            self._position[rows] = self._things[rows, 3 + thing] + away * np.float32(_PUSH)

    def _observe(self, rows: Rows) -> list[FloatArray]:
        position, heading = self._position[rows], self._heading[rows]
        direction = _RAYS[heading]
        things = rays.to_circles(position, direction, self._things[rows], _RADII)
        body = np.empty((len(position), 5), dtype=np.float32)
        body[:, :2], body[:, 2:4] = position / np.float32(SIDE / 2) - 1.0, _FORWARD[heading]
        body[:, 4] = self._is_on[rows]
        return [rays.encode([_to_walls(position, direction), things], _TAGS, 5, RAY_LENGTH), body]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's rooms: pyramids amber, the switch red until it is on."""
        canvas = drawing.Canvas((-0.3, -0.3), (SIDE + 0.3, SIDE + 0.3))
        canvas.box((-0.3, -0.3), (SIDE + 0.3, SIDE + 0.3), drawing.INK)
        for room in RING * ROOM:
            canvas.box(room + 0.15, room + ROOM - 0.15, drawing.FLOOR)
        for line, door in np.array(np.meshgrid(_LINES, DOORS)).reshape(2, -1).T:
            for way in (np.array((line, door)), np.array((door, line))):
                half = np.where(way == line, 0.2, HALF_DOOR)
                canvas.box(way - half, way + half, drawing.FLOOR)
        colors = [drawing.RED, drawing.GREEN, drawing.GREEN] + [drawing.AMBER] * _N_ROOMS
        for thing, place in enumerate(self._things[agent]):
            if place[0] == rays.HIDDEN:
                continue
            if thing == _GOAL:
                canvas.plus(place, RADIUS, colors[thing])
            else:
                canvas.box(place - 0.7 * RADIUS, place + 0.7 * RADIUS, colors[thing])
        canvas.walker(self._position[agent], _FORWARD[self._heading[agent]], 0.7)
        return canvas.pixels()


def slide(along: FloatArray, across: FloatArray, change: FloatArray) -> FloatArray:
    """Return coordinates `along` [N] after moves by `change` [N], in [-1, 1], within the walls.

    `across` [N] is the other coordinate, which tells whether an agent is at a door.
    """
    aside = np.abs(across - _MIDDLE)
    # The door is a little wider here, because rounding must not stop an agent that touches the
    # side of the door.
    at_door = np.abs(aside - _TO_DOOR) < HALF_DOOR - _MARGIN + 1e-3
    in_door = np.abs(aside - _TO_LINE) < _MARGIN
    # Walls limit a move to the agent's room, except at a door; a move is too short to pass a room.
    cell = np.floor(along / ROOM) * ROOM
    low = np.where(at_door, 0.0, cell) + _MARGIN
    high = np.where(at_door, SIDE, cell + ROOM) - _MARGIN
    if in_door.any():  # between two rooms, agents can move within the door's width only
        door = np.copysign(_TO_DOOR, along - _MIDDLE) + _MIDDLE
        low = np.where(in_door, door - HALF_DOOR + _MARGIN, low)
        high = np.where(in_door, door + HALF_DOOR - _MARGIN, high)
    moved = np.minimum(np.maximum(along + change, low), high)
    return np.asarray(moved, dtype=np.float32)


def _to_walls(position: FloatArray, direction: FloatArray) -> FloatArray:
    """Return [N, R, 5] distances along R rays to the outer wall and the inner walls."""
    outer = rays.to_walls(position, direction, 0.0, SIDE)
    distance = (_LINES - position[:, None, :, None]) / direction[..., None]
    # The other coordinate of the point at which the ray crosses the line of an inner wall.
    across = position[:, None, ::-1, None] + distance * direction[:, :, ::-1, None]
    from_door = np.abs(np.abs(across - _MIDDLE) - _TO_DOOR)
    blocked = (distance > 0.0) & (from_door > HALF_DOOR)
    inner = np.where(blocked, distance, np.float32(np.inf)).reshape(*direction.shape[:2], 4)
    return np.concatenate([outer, inner], axis=2)


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk around the ring of rooms to the switch, then to the goal."""
    body = steps.obs[1]
    position = (body[:, :2] + 1.0) * (SIDE / 2)
    compass = np.degrees(np.arctan2(body[:, 2], body[:, 3]))
    tag, distance = rays.sights(steps.obs[0], RAY_DEGREES, 5)
    target = np.where(body[:, 4] > 0.5, GOAL, SWITCH_OFF)
    absolute = np.radians(compass[:, None] + RAY_DEGREES)
    reach = distance * RAY_LENGTH + RADIUS
    hit = position[:, None] + reach[..., None] * np.stack([np.sin(absolute), np.cos(absolute)], -1)
    room = np.clip(position // ROOM, 0, 2)
    near = (hit // ROOM == room[:, None]).all(axis=2) & (tag == target[:, None])
    is_seen, bearing = rays.nearest_ahead(near, RAY_DEGREES)
    return rays.walk(np.where(is_seen, bearing, _tour(position, room) - compass), TURN_DEGREES)


def _tour(position: FloatArray, room: AnyArray) -> AnyArray:
    """Return headings [N] in degrees for a clockwise walk through the middles of the rooms."""
    index = (room[:, None] == RING).all(axis=2).argmax(axis=1)
    way_out = RING[(index + 1) % len(RING)] - RING[index]
    offset = (room + 0.5) * ROOM - position
    aside = np.abs(offset[:, 0] * way_out[:, 1] - offset[:, 1] * way_out[:, 0])
    target = np.where((aside > 0.8)[:, None], offset, way_out)
    return np.degrees(np.arctan2(target[:, 0], target[:, 1]))
