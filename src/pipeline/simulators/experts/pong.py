"""An opponent that foresees where the ball arrives, and returns it away from the other paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import pong as game

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray
    from pipeline.protocol.steps import DecisionSteps

_AIM = 0.7
_STAY, _UP, _DOWN = 0, 1, 2


def expert(steps: DecisionSteps) -> ActionTuple:
    """Go where the ball will arrive; wait in the middle while it flies away."""
    own, other, x, y, vx, vy = steps.obs[0].T
    comes = vx < 0
    n_decisions = (x + 1.0) / np.where(comes, -vx * game.MAX_SPEED, 1.0)
    arrival = folded(y + vy * game.MAX_SPEED * n_decisions)
    # A ball that meets the paddle above its middle flies up: away from a paddle that is below.
    aim = np.where(other > 0, _AIM, -_AIM) * game.HALF_PADDLE
    target = np.where(comes, arrival + aim, 0.0)
    limit = 1.0 - game.HALF_PADDLE
    off = np.clip(target, -limit, limit) - own
    action = np.where(off > 0, _UP, _DOWN)
    action = np.where(np.abs(off) <= game.PADDLE_SPEED / 2, _STAY, action)
    return ActionTuple(discrete=action[:, None])


def folded(y: AnyArray) -> AnyArray:
    """Height of a ball between the walls at -1 and 1 that would be at `y` without them."""
    phase = np.mod(y + 1.0, 4.0)
    return np.where(phase > 2.0, 4.0 - phase, phase) - 1.0
