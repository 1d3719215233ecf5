"""Advantages and returns of many trajectories in one vectorised pass."""

from __future__ import annotations

import numpy as np

from pipeline.arrays import AnyArray, FloatArray, IntArray


def generalized_advantages(
    *,
    rewards: FloatArray,
    values: FloatArray,
    bootstrap: FloatArray,
    starts: IntArray,
    lengths: IntArray,
    gamma: FloatArray,
    lambda_: float,
) -> FloatArray:
    """Generalised advantage estimates of K trajectories that lie one after another in R rows.

    delta_t = r_t + gamma V(s_t+1) - V(s_t); A_t = delta_t + gamma lambda A_t+1, where V(s_t+1) of a
    trajectory's last row is its bootstrap value. Source: Schulman et al. 2015, arXiv 1506.02438,
    equations 11 and 16. All trajectories go backwards together, the longest ones first.

    Args:
        rewards: [R, S] for each of S reward signals.
        values: [R, S] critic's estimates.
        bootstrap: [K, S] value after each trajectory's last row, 0 where it terminated.
        starts: [K] first row of each trajectory.
        lengths: [K] rows of each trajectory, all at least 1.
        gamma: [S] discount per step.
        lambda_: weight of longer estimates, in [0, 1].

    Returns:
        [R, S] advantages; returns are advantages plus values.
    """
    following = np.empty_like(values)
    following[:-1] = values[1:]
    ends = starts + lengths - 1
    # Overwrites what belonged to the next trajectory's first row.
    following[ends] = bootstrap
    advantages = rewards + gamma * following - values
    # Longest first, so that those still going at each step back are the first ones of `carry`.
    order = np.argsort(-lengths, kind="stable")
    last_rows = ends[order]
    carry = np.zeros_like(bootstrap)
    decay = (gamma * lambda_).astype(np.float32)
    for back, n_active in enumerate(_active_counts(lengths)):
        rows = last_rows[:n_active] - back
        carry = advantages[rows] + decay * carry[:n_active]
        advantages[rows] = carry
    return advantages


def _active_counts(lengths: IntArray) -> AnyArray:
    """How many trajectories reach at least t + 1 rows, for t from 0 to the longest."""
    longest = int(lengths.max(initial=0))
    histogram = np.bincount(lengths, minlength=longest + 1)
    return len(lengths) - np.cumsum(histogram)[:longest]
