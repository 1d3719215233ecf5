"""PPO's losses by hand, and its update as a whole."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_cases import demonstration
from golden_training import Training

from pipeline.algos.algorithm import load_matching
from pipeline.algos.ppo import (
    LARGEST_WEIGHT,
    PPO,
    clipped_value_loss,
    decoupled,
    policy_loss,
    with_clip_range,
)
from pipeline.algos.rows import Rows
from pipeline.data.rollout import Rollout
from pipeline.errors import TrainingError
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

CPU = torch.device("cpu")


def trainer_settings(**changes):
    base = {"trainer_type": "ppo", "hyperparameters": {"batch_size": 32, "buffer_size": 128}}
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return load_run_settings(None, overrides={"behaviors": {"B": base}}).behaviors["B"]


def rollout(spec: BehaviorSpec, n_rows: int = 128, *, seed: int = 0) -> Rollout:
    rng = np.random.default_rng(seed)
    actions = spec.action_spec
    shapes = [obs.shape for obs in spec.observation_specs]
    obs = [rng.normal(size=(n_rows, *shape)).astype(np.float32) for shape in shapes]
    fields = {}
    n_components = actions.continuous_size + actions.discrete_size
    fields["continuous"] = rng.normal(size=(n_rows, actions.continuous_size)).astype(np.float32)
    fields["discrete"] = (
        np.stack([rng.integers(0, size, n_rows) for size in actions.discrete_branches], axis=1)
        if actions.discrete_size
        else np.zeros((n_rows, 0), dtype=np.int64)
    )
    fields["log_prob"] = np.full((n_rows, n_components), -1.5, dtype=np.float32)
    fields["reward"] = rng.normal(size=n_rows).astype(np.float32)
    if actions.discrete_size:
        fields["allowed"] = np.ones((n_rows, sum(actions.discrete_branches)), dtype=np.bool_)
    lengths = np.full(n_rows // 32, 32)
    return Rollout(
        obs=obs,
        fields=fields,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=np.zeros(len(lengths), dtype=np.bool_),
        next_obs=[
            rng.normal(size=(len(lengths), *obs.shape)).astype(np.float32)
            for obs in spec.observation_specs
        ],
    )


def loss_of(*, log_prob, old_log_prob, advantage, epsilon):
    """`policy_loss` with the range that rows get."""
    ranged = with_clip_range(Rows(obs=[], fields={"advantage": advantage}), epsilon)
    return policy_loss(log_ratio=log_prob - old_log_prob, **ranged.fields)


def test_policy_loss_takes_the_smaller_of_plain_and_clipped_ratio():
    log_prob = torch.log(torch.tensor([[1.5], [0.5], [1.5], [0.5]]))
    advantage = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    loss = loss_of(
        log_prob=log_prob,
        old_log_prob=torch.zeros(4, 1),
        advantage=advantage,
        epsilon=0.2,
    )
    # clipped at 1.2 for a gain, kept at 0.5; for a loss 1.5 counts in full, 0.5 is clipped to 0.8
    assert float(loss) == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)


def test_rows_of_an_older_policy_are_weighted_and_clipped_from_the_policy_as_it_is():
    then, now = (
        torch.log(torch.tensor([[0.5], [0.5], [0.1]])),
        torch.log(torch.tensor([[0.6], [0.4], [0.9]])),
    )
    advantage = torch.tensor([[1.0], [-2.0], [1.0]])
    rows = decoupled(Rows(obs=[], fields={"log_prob": then, "advantage": advantage}), now)
    # Hilton et al. 2021, equation 3: A now/then · min(ratio, clipped) with ratio relative to `now`
    torch.testing.assert_close(rows.log_prob, now)
    expected = torch.tensor([[1.2], [-1.6], [LARGEST_WEIGHT]])  # the last would weigh nine times
    torch.testing.assert_close(rows.advantage, expected)
    arguments = {"old_log_prob": rows.log_prob, "advantage": rows.advantage, "epsilon": 0.2}
    assert float(loss_of(log_prob=now, **arguments)) == pytest.approx(-(1.2 - 1.6 + 2.0) / 3)
    twice = loss_of(log_prob=now + np.log(2.0), **arguments)
    assert float(twice) == pytest.approx(-(1.2 * 1.2 - 1.6 * 2.0 + 2.0 * 1.2) / 3)


@pytest.mark.parametrize("actions", [ActionSpec(2, ()), ActionSpec(1, (3, 2))])
@pytest.mark.parametrize("memory", [None, {"sequence_length": 8, "memory_size": 8}])
def test_threaded_learning_is_relative_to_the_policy_that_learns(actions, memory):
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


def test_value_loss_counts_moves_beyond_the_clip_from_where_they_started():
    loss = clipped_value_loss(
        value=torch.tensor([[1.0], [0.1]]),
        old_value=torch.zeros(2, 1),
        returns=torch.tensor([[1.0], [1.0]]),
        clip=torch.tensor([0.2]),
    )
    # moved to 1.0 but credited with 0.2: 0.8 squared; moved to 0.1 within the clip: 0.9 squared
    assert float(loss) == pytest.approx((0.64 + 0.81) / 2)


def test_policy_loss_has_a_derivative_only_where_the_clip_does_not_hold_it():
    log_prob = torch.log(torch.tensor([[1.5], [0.5], [1.5], [0.5], [1.0]])).requires_grad_()
    advantage = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [2.0]])
    loss_of(
        log_prob=log_prob, old_log_prob=torch.zeros(5, 1), advantage=advantage, epsilon=0.2
    ).backward()
    # -ratio A / 5 where the minimum is the unclipped term
    expected = -torch.tensor([[0.0], [0.5], [-1.5], [0.0], [2.0]]) / 5
    torch.testing.assert_close(log_prob.grad, expected)


def test_clipped_value_loss_has_no_derivative_beyond_the_clip_unless_it_is_the_larger_error():
    value = torch.tensor([[1.0], [0.1], [-1.0]], requires_grad=True)
    clipped_value_loss(
        value=value,
        old_value=torch.zeros(3, 1),
        returns=torch.ones(3, 1),
        clip=torch.tensor([0.2]),
    ).backward()
    # held at 0.2 it has the larger error; within the clip; moved away from the return
    torch.testing.assert_close(value.grad, 2.0 * torch.tensor([[0.0], [-0.9], [-2.0]]) / 3)


def test_same_seed_gives_the_same_weights_after_an_update():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(1, (3,)))
    results = []
    for seed in (5, 5, 6):
        algorithm = PPO(spec, trainer_settings(), seed=seed, device=CPU)
        algorithm.act([np.ones((3, 4), np.float32)], None)
        algorithm.update(rollout(spec), step=0)
        results.append(torch.cat([p.detach().flatten() for p in algorithm.optimizer.parameters]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_state_continues_exactly_where_it_was_taken():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    settings = trainer_settings(network_settings={"normalize": True})
    original = PPO(spec, settings, seed=1, device=CPU)
    original.observe([np.random.default_rng(3).normal(2, 3, (50, 4)).astype(np.float32)])
    original.update(rollout(spec), step=0)
    restored = PPO(spec, settings, seed=2, device=CPU)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    obs = [np.ones((3, 4), np.float32)]
    np.testing.assert_array_equal(
        original.act(obs, None).rows["continuous"], restored.act(obs, None).rows["continuous"]
    )
    original.update(rollout(spec, seed=4), step=10)
    restored.update(rollout(spec, seed=4), step=10)
    for a, b in zip(original.optimizer.parameters, restored.optimizer.parameters, strict=True):
        assert torch.equal(a, b)


def test_state_of_signals_and_cloning_continues_where_it_was_taken_if_it_is_there(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(5)], ActionSpec(2, ()))  # that of the demonstration
    cloned = {"demo_path": str(demonstration("ppo, continuous", tmp_path))}
    with_all = trainer_settings(
        reward_signals={"extrinsic": {}, "rnd": {}}, behavioral_cloning=cloned
    )
    algorithms = [PPO(spec, with_all, seed=seed, device=CPU) for seed in (1, 2)]
    original, restored = algorithms
    original.update(rollout(spec), step=0)
    state = copy.deepcopy(original.state_dict())
    restored.load_state_dict(state)
    for algorithm in algorithms:
        algorithm.update(rollout(spec, seed=4), step=10)
    for name, network in original.networks.items():
        for a, b in zip(network.parameters(), restored.networks[name].parameters(), strict=True):
            assert torch.equal(a, b), name
    signals_only = trainer_settings(reward_signals={"extrinsic": {}, "rnd": {}})
    without = PPO(spec, signals_only, seed=3, device=CPU)
    without.load_state_dict(state)
    restored.load_state_dict(without.state_dict())  # goes on cloning with what it has


def test_actions_sent_to_the_environment_are_a_third_of_the_clipped_sample():
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    decision = algorithm.act([np.zeros((500, 2), np.float32)], None)
    drawn = decision.rows["continuous"]
    assert np.abs(drawn).max() > 3.0
    expected = np.clip(drawn, -3, 3) / 3
    np.testing.assert_allclose(decision.action.continuous, expected, rtol=1e-6)


def test_forbidden_choices_are_never_drawn():
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(0, (3, 2)))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    masks = [np.tile([True, False, True], (400, 1)), np.zeros((400, 2), np.bool_)]
    decision = algorithm.act([np.zeros((400, 2), np.float32)], masks)
    assert set(decision.action.discrete[:, 0]) == {1}
    assert set(decision.action.discrete[:, 1]) == {0, 1}


def test_loss_that_is_not_finite_stops_with_the_step():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    broken = rollout(spec)
    broken.fields["reward"][7] = np.inf
    with np.errstate(invalid="ignore"), pytest.raises(TrainingError, match="step 640: the PPO"):
        algorithm.update(broken, step=640)


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
def test_number_of_gradient_steps_follows_the_minibatches(name, batch_size, n_steps, tmp_path):
    training = Training(name, tmp_path, n_blocks=1, batch_size=batch_size, num_epoch=2)
    training.run()
    (moments,) = training.learner.algorithm.optimizer.state_dict()["state"].values()
    assert int(moments["step"]) == 2 * n_steps


def test_values_of_many_rows_are_those_of_each_alone():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    large_rollout = rollout(spec, 4096 + 32)
    batch = algorithm._rows(large_rollout)
    obs = torch.from_numpy(large_rollout.obs[0])
    with torch.no_grad():
        expected = algorithm.critic([obs], obs)
    torch.testing.assert_close(batch.value, expected)


def test_rows_that_are_enough_are_more_than_the_buffers_size():
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    assert [algorithm.ready(n) for n in (127, 128, 129)] == [False, False, True]


def test_policy_loss_is_the_mean_of_those_of_minibatches_without_their_signs(monkeypatch):
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    algorithm = PPO(spec, trainer_settings(), seed=1, device=CPU)
    learn, losses = algorithm._learn, itertools.cycle([1.0, -3.0])

    def learned(batch, **options):
        stats = learn(batch, **options)
        return [torch.tensor(next(losses)), *stats[1:]]

    monkeypatch.setattr(algorithm, "_learn", learned)
    assert algorithm.update(rollout(spec), step=0)["Losses/Policy Loss"] == 2.0


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_for_acting_keeps_its_weights_until_it_is_given_others(shared):
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
