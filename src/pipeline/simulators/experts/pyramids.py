"""A walker on a tour of the rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.simulators import pyramids as game
from pipeline.simulators.experts.sighted import nearest_ahead, sights, walk

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, FloatArray
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import DecisionSteps


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk round the ring of rooms until the switch, then until the goal is in the same room."""
    own = steps.obs[1]
    position = (own[:, :2] + 1.0) * (game.SIDE / 2)
    compass = np.degrees(np.arctan2(own[:, 2], own[:, 3]))
    tag, distance = sights(steps.obs[0], game.RAY_DEGREES, 5)
    wanted = np.where(own[:, 4] > 0.5, game.GOAL, game.SWITCH_OFF)
    absolute = np.radians(compass[:, None] + game.RAY_DEGREES)
    reach = distance * game.RAY_LENGTH + game.RADIUS
    hit = position[:, None] + reach[..., None] * np.stack([np.sin(absolute), np.cos(absolute)], -1)
    room = np.clip(position // game.ROOM, 0, 2)
    near = (hit // game.ROOM == room[:, None]).all(axis=2) & (tag == wanted[:, None])
    found, bearing = nearest_ahead(near, game.RAY_DEGREES)
    tour = _tour(position, room) - compass
    return walk(np.where(found, bearing, tour), game.TURN_DEGREES)


def _tour(position: FloatArray, room: AnyArray) -> AnyArray:
    """[N] heading in degrees that leads round the ring clockwise, by the middles of the rooms."""
    index = (room[:, None] == game.RING).all(axis=2).argmax(axis=1)
    ring = game.RING
    way_out = ring[(index + 1) % len(ring)] - ring[index]
    offset = (room + 0.5) * game.ROOM - position
    aside = np.abs(offset[:, 0] * way_out[:, 1] - offset[:, 1] * way_out[:, 0])
    target = np.where((aside > 0.8)[:, None], offset, way_out)
    return np.degrees(np.arctan2(target[:, 0], target[:, 1]))
