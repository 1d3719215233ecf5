"""A walker that reads the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import grid_world as game

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray
    from pipeline.protocol.steps import DecisionSteps


def expert(steps: DecisionSteps) -> ActionTuple:
    """Move along a shortest path to the wanted goal that does not touch the other one."""
    agent, plus, ex = (_find(steps.obs[0], c) for c in (2, 1, 0))
    wants_plus = steps.obs[1].argmax(axis=1)[:, None] == 0
    wanted, other = np.where(wants_plus, plus, ex), np.where(wants_plus, ex, plus)
    target = agent[:, None] + game.MOVES
    inside = ((target >= 0) & (target < game.SIZE)).all(axis=2)
    open_ = inside & (target != other[:, None]).any(axis=2)
    offset = np.abs(target - wanted[:, None])
    # Nearer first; of two equally near cells the one farther from a shared row or column, so that
    # the other goal can never come to stand in the only way.
    cost = offset.sum(axis=2) + 0.1 * offset.max(axis=2) + 100.0 * ~open_
    cost[:, 0] = 50.0
    return ActionTuple(discrete=cost.argmin(axis=1)[:, None])


def _find(image: AnyArray, channel: int) -> AnyArray:
    """[N, 2] row and column of the cell with the most of a colour, of images [N, 3, 20, 20]."""
    size, cell = game.SIZE, game.CELL
    cells = image[:, channel].reshape(-1, size, cell, size, cell).sum(axis=(2, 4))
    return np.stack(np.divmod(cells.reshape(len(image), -1).argmax(axis=1), size), axis=1)
