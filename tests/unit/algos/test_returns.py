"""Advantages equal a slow computation and a hand-worked case."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.algos.ppo import generalized_advantages


def _slowly(rewards, values, bootstrap, lengths, gamma, lambda_):
    advantages = np.zeros_like(values)
    start = 0
    for k, length in enumerate(lengths):
        for t in range(length):
            total, weight = np.zeros(values.shape[1]), np.ones(values.shape[1])
            for later in range(t, length):
                after = bootstrap[k] if later == length - 1 else values[start + later + 1]
                total += weight * (rewards[start + later] + gamma * after - values[start + later])
                weight *= gamma * lambda_
            advantages[start + t] = total
        start += length
    return advantages


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    n_signals=st.integers(1, 3),
    lambda_=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_advantages_equal_discounted_sums_of_later_temporal_differences(
    lengths, n_signals, lambda_, seed
):
    rng = np.random.default_rng(seed)
    n_rows = sum(lengths)
    rewards, values = rng.normal(size=(2, n_rows, n_signals)).astype(np.float32)
    bootstrap = rng.normal(size=(len(lengths), n_signals)).astype(np.float32)
    gamma = rng.uniform(0.5, 1.0, n_signals).astype(np.float32)
    sizes = np.array(lengths)

    advantages = generalized_advantages(
        rewards=rewards,
        values=values,
        bootstrap=bootstrap,
        starts=np.cumsum(sizes) - sizes,
        lengths=sizes,
        gamma=gamma,
        lambda_=lambda_,
    )

    expected = _slowly(rewards, values, bootstrap, lengths, gamma, lambda_)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


def test_advantages_of_a_trajectory_of_two_steps_equal_numbers_computed_by_hand():
    # delta_1 = 2 + 0.5 * 4 - 1 = 3; delta_0 = 1 + 0.5 * 1 - 3 = -1.5; A_0 = -1.5 + 0.25 * 3
    advantages = generalized_advantages(
        rewards=np.array([[1.0], [2.0]], dtype=np.float32),
        values=np.array([[3.0], [1.0]], dtype=np.float32),
        bootstrap=np.array([[4.0]], dtype=np.float32),
        starts=np.array([0]),
        lengths=np.array([2]),
        gamma=np.array([0.5], dtype=np.float32),
        lambda_=0.5,
    )
    assert advantages[:, 0].tolist() == pytest.approx([-0.75, 3.0])
