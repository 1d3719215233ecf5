"""Three agents who know their parts: the nearest fills the pit, the others push."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import push_together as game

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray
    from pipeline.protocol.steps import DecisionSteps

_NOTHING, _UP, _DOWN, _LEFT, _RIGHT = range(5)
_MIDDLE_ROW = (game.ROWS - 1) // 2


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk into the pit if nobody is nearer to it, else to the block's left side, and push.

    Two who are equally near both walk to the pit; the second finds it filled.
    """
    obs = steps.obs[0]
    cell = np.rint((obs[:, :2] + 1) * (game.ROWS - 1, game.COLUMNS - 1) / 2).astype(np.int64)
    block = cell[:, 1] + np.rint(game.SCALE * obs[:, 2]).astype(np.int64)
    to_pit = np.rint(game.SCALE * obs[:, 3:5]).astype(np.int64)
    mates = obs[:, 6:].reshape(-1, game.TEAM - 1, 3)
    theirs = cell[:, None] + np.rint(game.SCALE * mates[..., 1:]).astype(np.int64)
    pit = cell + to_pit
    way = _way(theirs, block[:, None], pit[:, None]) + 100 * (mates[..., 0] == 0)
    fills = (obs[:, 5] > 0) & (_way(cell, block, pit) <= way.min(axis=1))
    action = np.where(fills, _to_pit(cell, block, to_pit), _to_block(cell, block))
    return ActionTuple(discrete=action[:, None])


def _way(cell: AnyArray, block: AnyArray, pit: AnyArray) -> AnyArray:
    """[...] moves that `_to_pit` takes from `cell` [..., 2]; every one leaves one less."""
    offset = np.abs(pit - cell)
    edge = np.where(cell[..., 0] <= _MIDDLE_ROW, 0, game.ROWS - 1)
    around = np.abs(cell[..., 0] - edge) + np.abs(pit[..., 0] - edge)
    must_leave = _on_rail(cell) & (cell[..., 1] < block)
    return np.asarray(np.where(must_leave, around, offset[..., 0]) + offset[..., 1])


def _to_pit(cell: AnyArray, block: AnyArray, to_pit: AnyArray) -> AnyArray:
    """[N] moves around the block and into the pit, which is always to the right of it."""
    sideways = np.where(to_pit[:, 1] > 0, _RIGHT, _LEFT)
    straight = np.where(to_pit[:, 0] > 0, _DOWN, _UP)
    action = np.where(to_pit[:, 1] != 0, sideways, straight)
    must_leave = _on_rail(cell) & (cell[:, 1] < block)
    return np.where(must_leave, _to_edge(cell), action)


def _to_block(cell: AnyArray, block: AnyArray) -> AnyArray:
    """[N] moves around the block to its left side, where pushing is moving right."""
    enter = np.where(cell[:, 0] < game.FIRST_ROW, _DOWN, _UP)
    from_left = np.where(_on_rail(cell), _RIGHT, enter)
    from_right = np.where(_on_rail(cell), _to_edge(cell), _LEFT)
    return np.where(cell[:, 1] < block, from_left, from_right)


def _to_edge(cell: AnyArray) -> AnyArray:
    return np.where(cell[:, 0] <= _MIDDLE_ROW, _UP, _DOWN)


def _on_rail(cell: AnyArray) -> AnyArray:
    return (cell[..., 0] >= game.FIRST_ROW) & (cell[..., 0] <= game.LAST_ROW)
