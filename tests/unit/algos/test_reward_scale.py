"""The spread of returns, against sums that are computed agent by agent."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.algos.reward_scale import EPSILON, RewardScale

GAMMA, LARGEST = 0.8, 5.0


def rollouts(rng, n_agents=4, n_messages=30, horizon=3):
    """Yield closed trajectories after every few messages, with their rewards [R, 2]."""
    open_rows = [[] for _ in range(n_agents)]
    result, closed = [], []
    for message in range(n_messages):
        for agent in range(n_agents):
            open_rows[agent].append(rng.normal(size=2) * [1.0, 7.0] + 0.5)
            ended = rng.random() < 0.2
            if ended or len(open_rows[agent]) == horizon:
                closed.append((agent, open_rows[agent], ended and rng.random() < 0.5))
                open_rows[agent] = []
        if message % 4 == 3 and closed:
            lengths = np.array([len(rows) for _, rows, _ in closed])
            rollout = SimpleNamespace(
                lengths=lengths,
                starts=np.cumsum(lengths) - lengths,
                slots=np.array([agent for agent, _, _ in closed]),
                terminated=np.array([terminated for _, _, terminated in closed]),
            )
            result.append((rollout, np.concatenate([rows for _, rows, _ in closed])))
            closed = []
    return result


def slow_sums(parts):
    """Return every agent's discounted sums after each row, in the order of rows."""
    sums, running = [], {}
    for rollout, rewards in parts:
        for k, start in enumerate(rollout.starts):
            slot = int(rollout.slots[k])
            total = running.get(slot, np.zeros(2))
            for reward in rewards[start : start + rollout.lengths[k]]:
                total = GAMMA * total + reward
                sums.append(total)
            running[slot] = np.zeros(2) if rollout.terminated[k] else total
    return np.array(sums)


@pytest.mark.parametrize("is_restored", [False, True])
def test_divisor_is_the_larger_of_the_deviation_and_the_scaled_largest_sum_of_rewards(is_restored):
    scale = RewardScale(2, gamma=GAMMA)
    parts = rollouts(np.random.default_rng(3))
    for rollout, rewards in parts:
        if is_restored:
            state, scale = scale.state_dict(), RewardScale(2, gamma=GAMMA)
            scale.load_state_dict(state)
        scale.observe(rollout, rewards)
    sums = slow_sums(parts)
    assert len(sums) == scale.count
    np.testing.assert_allclose(scale.mean, sums.mean(0))
    spread = np.maximum(sums.std(0), np.abs(sums).max(0) / LARGEST)
    np.testing.assert_allclose(scale.divisor, spread, rtol=1e-6)


def test_the_largest_reward_sum_divided_by_the_divisor_equals_the_bound():
    scale = RewardScale(1, gamma=GAMMA)
    rollout = SimpleNamespace(
        lengths=np.array([200]),
        starts=np.array([0]),
        slots=np.array([0]),
        terminated=np.array([True]),
    )
    scale.observe(rollout, np.eye(200, 1, -150) * 40.0)  # one reward, all others 0
    assert 40.0 / scale.divisor[0] == pytest.approx(LARGEST)


def test_divisor_before_the_first_reward_is_epsilon():
    scale = RewardScale(1, gamma=GAMMA)
    assert scale.divisor[0] == EPSILON
