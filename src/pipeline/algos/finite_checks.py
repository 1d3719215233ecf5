"""Refuse observations, actions and rewards that are not finite, before they are saved."""

import math
from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.data.rollout import Rollout
from pipeline.errors import TrainingError, UnityPolicyException


def refuse_non_finite_decision(
    *, obs: Sequence[FloatArray], continuous: FloatArray, log_prob: FloatArray
) -> None:
    """Refuse observations [N, *shape], actions [N, A] and log probabilities that are not finite.

    Raises:
        UnityPolicyException: A number is not finite.
    """
    # The sum of squares is the cheapest test. If it is not finite, a number is not finite or the
    # sum has overflowed, so the code below tests each number.
    squares = 0.0
    for array in (*obs, continuous, log_prob):
        squares += float(np.vdot(array, array))
    if math.isfinite(squares):
        return
    # Observations come first, because a faulty observation makes the action faulty, too.
    for index, values in enumerate(obs):
        if not np.isfinite(values).all():
            raise UnityPolicyException(
                f"observation {index} has a number that is not finite; look in the environment for "
                "a division by zero, or for physics that explode"
            )
    if not (np.isfinite(continuous).all() and np.isfinite(log_prob).all()):
        raise UnityPolicyException(
            "the policy's action is not finite: its weights or its observations have diverged; "
            "lower learning_rate, or set max_grad_norm"
        )


def refuse_non_finite_rollout(rollout: Rollout, *, step: int) -> None:
    """Refuse a rollout if a reward, or an observation after a trajectory, is not finite.

    The policy chose no action at an observation after a trajectory, so `refuse_non_finite_decision`
    was not called for it.

    Raises:
        TrainingError: A number is not finite.
    """
    arrays: list[tuple[str, AnyArray]] = [("a reward", rollout.fields["reward"])]
    arrays += [(f"observation {i}", values) for i, values in enumerate(rollout.next_obs)]
    for name, values in arrays:
        if not np.isfinite(values).all():
            raise TrainingError(
                f"step {step}: the environment gave {name} that is not finite; look for a division "
                "by zero, or for physics that explode"
            )
