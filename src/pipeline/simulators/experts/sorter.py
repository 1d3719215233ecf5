"""A walker that keeps away from the tiles whose turn has not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import sorter as game

if TYPE_CHECKING:
    from pipeline.protocol.steps import DecisionSteps

_AHEAD, _TO_RIGHT = np.array([1, 1, 0, 2, 2, 2, 0, 1]), np.array([0, 1, 1, 1, 0, 2, 2, 2])
"""The first two branches for moves at 0, 45, ... degrees to the right."""


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk to the unvisited tile with the least number by way of an inner circle."""
    tiles, own = steps.obs
    size = game.MAX_TILES
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
    turn = np.where(np.abs(bearing) > 0.5 * game.TURN_DEGREES, np.sign(bearing), 0.0)
    eighth = np.round((bearing - game.TURN_DEGREES * turn) / 45.0).astype(np.int64) % 8
    moves = [_AHEAD[eighth], _TO_RIGHT[eighth], np.where(turn > 0.0, 2, np.abs(turn))]
    return ActionTuple(discrete=np.stack(moves, axis=1))
