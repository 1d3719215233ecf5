"""PPO's losses computed by hand, advantages computed slowly, and whole updates."""

import copy
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from golden_cases import demonstration
from golden_training import Training
from hypothesis import strategies as st

from pipeline.algos.algorithm import load_matching
from pipeline.algos.ppo import (
    LARGEST_WEIGHT,
    PPO,
    generalized_advantages,
    policy_loss,
    reweighted_to_current_policy,
    with_clip_range,
)
from pipeline.algos.rows import Rows
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.rollout import Rollout
from pipeline.settings import load_run_settings

CPU = torch.device("cpu")


def trainer_settings(**changes):
    base = {"trainer_type": "ppo", "hyperparameters": {"batch_size": 32, "buffer_size": 128}}
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return load_run_settings(None, overrides={"behaviors": {"B": base}}).behaviors["B"]


def rollout(spec: BehaviorSpec, n_rows: int = 128, *, seed: int = 0, length: int = 32) -> Rollout:
    """Return random steps in trajectories of `length` rows; the last may be shorter."""
    rng, actions = np.random.default_rng(seed), spec.action_spec
    lengths = np.diff([*range(0, n_rows, length), n_rows])

    def numbers(*shape):
        return rng.normal(size=shape).astype(np.float32)

    n_components = actions.continuous_size + actions.discrete_size
    obs = [numbers(n_rows, *obs_spec.shape) for obs_spec in spec.observation_specs]
    fields = {"continuous": numbers(n_rows, actions.continuous_size)}
    choices = [rng.integers(0, size, n_rows) for size in actions.discrete_branches]
    none = np.zeros((n_rows, 0), dtype=np.int64)
    fields["discrete"] = np.stack(choices, axis=1) if choices else none
    fields["log_prob"] = np.full((n_rows, n_components), -1.5, dtype=np.float32)
    fields["reward"] = numbers(n_rows)
    if choices:
        fields["allowed"] = np.ones((n_rows, sum(actions.discrete_branches)), dtype=np.bool_)
    return Rollout(
        obs=obs,
        fields=fields,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=np.zeros(len(lengths), dtype=np.bool_),
        next_obs=[numbers(len(lengths), *obs_spec.shape) for obs_spec in spec.observation_specs],
    )


def loss_of(*, log_prob, old_log_prob, advantage, epsilon):
    """Return `policy_loss` with the bounds of `with_clip_range`."""
    ranged = with_clip_range(Rows(obs=[], fields={"advantage": advantage}), epsilon)
    return policy_loss(log_ratio=log_prob - old_log_prob, **ranged.fields)


def test_rows_of_an_older_policy_are_weighted_and_clipped_relative_to_the_current_policy():
    then, now = (
        torch.log(torch.tensor([[0.5], [0.5], [0.1]])),
        torch.log(torch.tensor([[0.6], [0.4], [0.9]])),
    )
    advantage = torch.tensor([[1.0], [-2.0], [1.0]])
    collected = Rows(obs=[], fields={"log_prob": then, "advantage": advantage})
    rows = reweighted_to_current_policy(collected, now)
    # Hilton et al. 2021, equation 3: A now/then · min(ratio, clipped) with ratio relative to `now`
    torch.testing.assert_close(rows.log_prob, now)
    expected = torch.tensor([[1.2], [-1.6], [LARGEST_WEIGHT]])  # the last ratio, 9, is clamped
    torch.testing.assert_close(rows.advantage, expected)
    arguments = {"old_log_prob": rows.log_prob, "advantage": rows.advantage, "epsilon": 0.2}
    assert float(loss_of(log_prob=now, **arguments)) == pytest.approx(-(1.2 - 1.6 + 2.0) / 3)
    twice = loss_of(log_prob=now + np.log(2.0), **arguments)
    assert float(twice) == pytest.approx(-(1.2 * 1.2 - 1.6 * 2.0 + 2.0 * 1.2) / 3)


@pytest.mark.parametrize("actions", [ActionSpec(2, ()), ActionSpec(1, (3, 2))])
@pytest.mark.parametrize("memory", [None, {"sequence_length": 8, "memory_size": 8}])
def test_threaded_updates_weight_rows_by_the_ratio_of_the_current_to_the_acting_policy(
    actions, memory
):
    """Rows of the policy itself have weight 1 up to rounding; rows of another policy do not."""
    spec = BehaviorSpec([ObservationSpec.vector(4)], actions)
    settings = trainer_settings(threaded=True, network_settings={"memory": memory})
    algorithm = PPO(spec, settings, seed=1, device=CPU)
    experience = rollout(spec)
    if memory is not None:
        experience = replace(experience, memory=np.zeros((4, 4, algorithm.memory_size), np.float32))
    older = algorithm._rows(experience)
    assert not torch.equal(older.log_prob, torch.full_like(older.log_prob, -1.5))
    experience.fields["log_prob"] = older.log_prob.numpy()
    current = algorithm._rows(experience)
    torch.testing.assert_close(current.log_prob, older.log_prob)
    torch.testing.assert_close(
        current.advantage, current.advantage[:, :1].expand_as(current.advantage)
    )
    plain = PPO(spec, replace(settings, threaded=False), seed=1, device=CPU)._rows(experience)
    torch.testing.assert_close(plain.advantage.expand_as(current.advantage), current.advantage)
    assert not torch.allclose(older.advantage, current.advantage)


def test_ppo_loads_states_that_were_saved_with_or_without_cloning(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(5)], ActionSpec(2, ()))  # of the demonstration
    cloned = {"demo_path": str(demonstration("ppo, continuous", tmp_path))}
    signals = {"reward_signals": {"extrinsic": {}, "rnd": {}}}
    both = PPO(spec, trainer_settings(**signals, behavioral_cloning=cloned), seed=1, device=CPU)
    both.update(rollout(spec), step=0)
    without = PPO(spec, trainer_settings(**signals), seed=3, device=CPU)
    without.load_state_dict(copy.deepcopy(both.state_dict()))
    both.load_state_dict(without.state_dict())  # keeps its cloning state


def test_actions_sent_to_the_environment_are_a_third_of_the_clipped_sample():
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    decision = algorithm.act([np.zeros((500, 2), np.float32)], None)
    drawn = decision.rows["continuous"]
    assert np.abs(drawn).max() > 3.0
    expected = np.clip(drawn, -3, 3) / 3
    np.testing.assert_allclose(decision.action.continuous, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "batch_size", "n_steps"),
    [
        ("ppo, continuous", 16, 3),
        ("ppo, continuous", 17, 2),
        ("ppo, continuous", 49, 1),
        ("ppo, memory", 7, 8),  # 16 sequences of 3 rows
        ("ppo, memory", 5, 16),
        ("ppo, memory", 3, 16),
    ],
)
def test_number_of_gradient_steps_is_the_number_of_minibatches_of_all_epochs(
    name, batch_size, n_steps, tmp_path
):
    training = Training(name, tmp_path, n_blocks=1, batch_size=batch_size, num_epoch=2)
    training.run()
    (moments,) = training.learner.algorithm.optimizer.state_dict()["state"].values()
    assert int(moments["step"]) == 2 * n_steps


def test_values_computed_in_chunks_equal_values_of_all_rows_computed_at_once():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    large_rollout = rollout(spec, 4096 + 32)
    batch = algorithm._rows(large_rollout)
    obs = torch.from_numpy(large_rollout.obs[0])
    with torch.no_grad():
        expected = algorithm.critic([obs], obs)
    torch.testing.assert_close(batch.value, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_for_acting_keeps_its_weights_until_new_weights_are_loaded(shared):
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    settings = trainer_settings(hyperparameters={"shared_critic": shared, "buffer_size": 128})
    algorithm = PPO(spec, settings, seed=1, device=CPU)
    acting, before = algorithm.copy_for_acting(), algorithm.weights()
    algorithm.update(rollout(spec), step=0)

    def same(weights, other) -> bool:
        return all(
            torch.equal(value, other[name][key])
            for name, values in weights.items()
            for key, value in values.items()
        )

    assert not same(algorithm.weights(), before)
    assert same({"policy": acting.policy.state_dict()}, before)
    load_matching(acting.own_networks, algorithm.weights())
    assert same({"policy": acting.policy.state_dict()}, algorithm.weights())


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


@hypothesis.settings(max_examples=60)
@hypothesis.given(
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
