"""A controller that keeps the ball in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple

if TYPE_CHECKING:
    from pipeline.protocol.steps import DecisionSteps

_GAIN, _DAMPING = 0.1, 0.15
_MAX_TILT, _TURN_PER_DECISION = 0.5, np.radians(10.0)


def expert(steps: DecisionSteps) -> ActionTuple:
    """Tilt the platform against the ball's offset and velocity (a PD controller).

    About z, a positive tilt rolls the ball towards -x; about x, one rolls it towards +z.
    """
    obs = steps.obs[0]
    wanted = _GAIN * obs[:, [2, 4]] + _DAMPING * obs[:, [5, 7]]
    wanted = np.clip(wanted * (1.0, -1.0), -_MAX_TILT, _MAX_TILT)
    tilt = 2.0 * obs[:, :2]
    return ActionTuple(continuous=np.clip((wanted - tilt) / _TURN_PER_DECISION, -1.0, 1.0))
