"""A hunter for good food that burns the bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import collector as game
from pipeline.simulators.experts.sighted import sights

if TYPE_CHECKING:
    from pipeline.protocol.steps import DecisionSteps


def expert(steps: DecisionSteps) -> ActionTuple:
    """Go for the nearest good food, and burn bad food in front."""
    seen, own = steps.obs
    degrees = game.RAY_DEGREES
    tag, distance = sights(seen, degrees, 3)
    reach = distance * game.RAY_LENGTH
    good = np.where(tag == game.GOOD, reach + 0.03 * np.abs(degrees), np.inf)
    roam = np.where(reach[:, 0] < 3.0, 90.0, 10.0)
    bearing = np.where(np.isfinite(good.min(axis=1)), degrees[good.argmin(axis=1)], roam)
    aside = np.abs(np.sin(np.radians(degrees - bearing[:, None]))) * reach
    is_ahead = np.abs(degrees - bearing[:, None]) < 90.0
    danger = (tag == game.BAD) & is_ahead & (reach < 2.0) & (aside < 1.2)
    threat = degrees[np.where(danger, reach, np.inf).argmin(axis=1)]
    waits = danger.any(axis=1)
    bearing = np.where(waits, threat, bearing)
    moves = np.zeros((len(tag), 3), dtype=np.float32)
    moves[:, 0] = np.where(waits, -0.2, np.where(np.abs(bearing) > 45.0, 0.3, 1.0))
    moves[:, 2] = np.clip(bearing / game.TURN_DEGREES, -1.0, 1.0)
    is_aimed = (tag[:, 0] == game.BAD) & (reach[:, 0] < game.BEAM_LENGTH)
    fires = is_aimed & (np.abs(bearing) < 1.0) & (own[:, 2] > 0.5)
    return ActionTuple(moves, fires[:, None].astype(np.int32))
