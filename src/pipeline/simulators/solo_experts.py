"""Scripted policies for the simulators built on `solo`; each sees only what an agent sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import collector, hallway, pyramids, sorter

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.protocol.steps import DecisionSteps

_FORWARD, _RIGHT, _LEFT = 1, 3, 4
_AHEAD, _TO_RIGHT = np.array([1, 1, 0, 2, 2, 2, 0, 1]), np.array([0, 1, 1, 1, 0, 2, 2, 2])
"""Sorter's first two branches for moves at 0, 45, ... degrees to the right."""


class HallwayExpert:
    """Looks at the symbol, walks to the end and takes the goal that it remembers."""

    def __init__(self) -> None:
        self._cue = np.zeros(0, dtype=np.int64)

    def __call__(self, steps: DecisionSteps) -> ActionTuple:
        """One move per agent."""
        tag, _ = _sights(steps.obs[0], hallway.RAY_DEGREES, 5)
        cue = self._remember(steps.agent_id, tag)
        goal, bearing = _nearest_ahead(tag == (hallway.GOAL_O + cue)[:, None], hallway.RAY_DEGREES)
        compass = np.degrees(np.arctan2(steps.obs[1][:, 0], steps.obs[1][:, 1]))
        is_past = steps.obs[1][:, 2] > 0.5
        return _walk(np.where(goal & is_past, bearing, -compass), hallway.TURN_DEGREES)

    def _remember(self, agents: AnyArray, tag: AnyArray) -> AnyArray:
        """[N] symbol last seen by each agent: 0 for O, 1 for X."""
        missing = int(agents.max(initial=-1)) + 1 - len(self._cue)
        self._cue = np.pad(self._cue, (0, max(0, missing)))
        for symbol in (hallway.SYMBOL_O, hallway.SYMBOL_X):
            self._cue[agents[(tag == symbol).any(axis=1)]] = symbol - hallway.SYMBOL_O
        return self._cue[agents]


def pyramids_tour(steps: DecisionSteps) -> ActionTuple:
    """Walk round the ring of rooms until the switch, then until the goal is in the same room."""
    own = steps.obs[1]
    position = (own[:, :2] + 1.0) * (pyramids.SIDE / 2)
    compass = np.degrees(np.arctan2(own[:, 2], own[:, 3]))
    tag, distance = _sights(steps.obs[0], pyramids.RAY_DEGREES, 5)
    wanted = np.where(own[:, 4] > 0.5, pyramids.GOAL, pyramids.SWITCH_OFF)
    absolute = np.radians(compass[:, None] + pyramids.RAY_DEGREES)
    reach = distance * pyramids.RAY_LENGTH + pyramids.RADIUS
    hit = position[:, None] + reach[..., None] * np.stack([np.sin(absolute), np.cos(absolute)], -1)
    room = np.clip(position // pyramids.ROOM, 0, 2)
    near = (hit // pyramids.ROOM == room[:, None]).all(axis=2) & (tag == wanted[:, None])
    found, bearing = _nearest_ahead(near, pyramids.RAY_DEGREES)
    tour = _tour(position, room) - compass
    return _walk(np.where(found, bearing, tour), pyramids.TURN_DEGREES)


def _tour(position: FloatArray, room: AnyArray) -> AnyArray:
    """[N] heading in degrees that leads round the ring clockwise, by the middles of the rooms."""
    index = (room[:, None] == pyramids.RING).all(axis=2).argmax(axis=1)
    ring = pyramids.RING
    way_out = ring[(index + 1) % len(ring)] - ring[index]
    offset = (room + 0.5) * pyramids.ROOM - position
    aside = np.abs(offset[:, 0] * way_out[:, 1] - offset[:, 1] * way_out[:, 0])
    target = np.where((aside > 0.8)[:, None], offset, way_out)
    return np.degrees(np.arctan2(target[:, 0], target[:, 1]))


def sorter_rounds(steps: DecisionSteps) -> ActionTuple:
    """Walk to the unvisited tile with the least number by way of an inner circle."""
    tiles, own = steps.obs
    size = sorter.MAX_TILES
    waits = tiles[:, :, :size].any(axis=2) & (tiles[:, :, -1] < 0.5)
    number = np.where(waits, tiles[:, :, :size].argmax(axis=2), size)
    place = tiles[np.arange(len(tiles)), number.argmin(axis=1), size : size + 2]
    position = own[:, :2]
    radius = np.sqrt((position * position).sum(axis=1))
    beside = np.abs(position[:, 0] * place[:, 1] - position[:, 1] * place[:, 0])
    is_before = (beside < 0.1) & ((position * place).sum(axis=1) > 0.0)
    target = np.where((radius > 0.75)[:, None], 0.0, 0.45 * place)
    target = np.where((is_before & (radius > 0.35))[:, None], place, target)
    change = target - position
    bearing = np.degrees(np.arctan2(change[:, 0], change[:, 1]) - np.arctan2(own[:, 2], own[:, 3]))
    bearing = (bearing + 180.0) % 360.0 - 180.0
    turn = np.where(np.abs(bearing) > 0.5 * sorter.TURN_DEGREES, np.sign(bearing), 0.0)
    eighth = np.round((bearing - sorter.TURN_DEGREES * turn) / 45.0).astype(np.int64) % 8
    moves = [_AHEAD[eighth], _TO_RIGHT[eighth], np.where(turn > 0.0, 2, np.abs(turn))]
    return ActionTuple(discrete=np.stack(moves, axis=1))


def collector_hunt(steps: DecisionSteps) -> ActionTuple:
    """Go for the nearest good food, and burn bad food in front."""
    seen, own = steps.obs
    degrees = collector.RAY_DEGREES
    tag, distance = _sights(seen, degrees, 3)
    reach = distance * collector.RAY_LENGTH
    good = np.where(tag == collector.GOOD, reach + 0.03 * np.abs(degrees), np.inf)
    roam = np.where(reach[:, 0] < 3.0, 90.0, 10.0)
    bearing = np.where(np.isfinite(good.min(axis=1)), degrees[good.argmin(axis=1)], roam)
    aside = np.abs(np.sin(np.radians(degrees - bearing[:, None]))) * reach
    is_ahead = np.abs(degrees - bearing[:, None]) < 90.0
    danger = (tag == collector.BAD) & is_ahead & (reach < 2.0) & (aside < 1.2)
    threat = degrees[np.where(danger, reach, np.inf).argmin(axis=1)]
    waits = danger.any(axis=1)
    bearing = np.where(waits, threat, bearing)
    moves = np.zeros((len(tag), 3), dtype=np.float32)
    moves[:, 0] = np.where(waits, -0.2, np.where(np.abs(bearing) > 45.0, 0.3, 1.0))
    moves[:, 2] = np.clip(bearing / collector.TURN_DEGREES, -1.0, 1.0)
    is_aimed = (tag[:, 0] == collector.BAD) & (reach[:, 0] < collector.BEAM_LENGTH)
    fires = is_aimed & (np.abs(bearing) < 1.0) & (own[:, 2] > 0.5)
    return ActionTuple(moves, fires[:, None].astype(np.int32))


def _sights(rays: FloatArray, degrees: AnyArray, n_tags: int) -> tuple[AnyArray, FloatArray]:
    """[N, R] tag that each ray hits, -1 if none, and its distance as a part of the ray's length."""
    values = rays.reshape(len(rays), len(degrees), n_tags + 2)
    tag = np.where(values[..., n_tags] > 0.5, -1, values[..., :n_tags].argmax(axis=2))
    return tag, values[..., -1]


def _nearest_ahead(seen: BoolArray, degrees: AnyArray) -> tuple[BoolArray, AnyArray]:
    """[N] whether a ray sees it, and the angle of the one that does nearest to straight ahead."""
    angle = np.where(seen, np.abs(degrees), np.inf)
    return np.asarray(seen.any(axis=1)), degrees[angle.argmin(axis=1)]


def _walk(bearing: AnyArray, turn_degrees: float) -> ActionTuple:
    """Go forward where that leads towards `bearing` [N] degrees to the right, else turn to it."""
    bearing = (bearing + 180.0) % 360.0 - 180.0
    turn = np.where(bearing > 0.0, _RIGHT, _LEFT)
    choice = np.where(np.abs(bearing) <= 0.55 * turn_degrees, _FORWARD, turn)
    return ActionTuple(discrete=choice[:, None])
