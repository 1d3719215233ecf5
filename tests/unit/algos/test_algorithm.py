"""Behaviour that all algorithms share."""

import itertools

import numpy as np
import pytest
import torch
from golden_training import Training, sampled

from pipeline.algos import ppo
from pipeline.algos.algorithm import load_matching


def test_matching_weights_are_loaded_and_every_other_tensor_is_named_with_a_reason():
    ours = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(3, 1)})
    theirs = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(4, 1)})
    saved = theirs.state_dict()
    del saved["b.bias"]
    saved["c.bias"] = torch.ones(1)
    bias_before = ours["b"].bias.clone()
    left, n_loaded = load_matching(
        {"policy": ours, "critic": torch.nn.Linear(1, 1)}, {"policy": saved, "critic": None}
    )
    assert left == [
        "policy.b.weight (1x4 saved, 1x3 in this run)",
        "policy.b.bias (not in the checkpoint)",
        "policy.c.bias (not in this run)",
    ]
    assert n_loaded == 2
    assert torch.equal(ours["a"].weight, theirs["a"].weight)
    assert torch.equal(ours["a"].bias, theirs["a"].bias)
    assert torch.equal(ours["b"].bias, bias_before)


def update(training):
    """Run the training; return each update's rollout, numbers of steps left, and statistics."""
    algorithm, updates = training.learner.algorithm, []
    original = algorithm.update_in_parts

    def noting(rollout, *, step):
        parts, left = original(rollout, step=step), []
        while True:
            try:
                left.append(next(parts))
            except StopIteration as end:
                updates.append((rollout, left, end.value))
                return end.value
            yield left[-1]

    algorithm.update_in_parts = noting
    training.run()
    return updates


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("ppo, hybrid", ["Losses/Policy Loss"]),
        ("ppo, curiosity and rnd", ["Losses/Curiosity Forward Loss", "Losses/RND Loss"]),
        ("ppo, cloning, hybrid", ["Losses/Pretraining Loss"]),
        ("poca, hybrid", ["Losses/Baseline Loss"]),
        ("poca, rnd", ["Losses/RND Loss"]),
    ],
)
def test_an_update_yields_the_number_of_gradient_steps_left_and_returns_statistics(
    name, tags, tmp_path
):
    training = Training(name, tmp_path, n_blocks=2)
    h = training.learner.settings.hyperparameters
    for rollout, left, stats in update(training):
        n_parts = h.num_epoch * (rollout.n_rows // h.batch_size)
        n_cloning = 0 if training.learner.algorithm.bc is None else len(left) - n_parts
        assert left[0] == n_parts + n_cloning
        # POCA's minibatches are a little larger, so that there may be fewer of them
        assert left == list(range(left[0], left[0] - len(left), -1))
        assert left[-1] == 1 or name.startswith("poca")
        assert set(tags) <= stats.keys()


@pytest.mark.parametrize("name", ["ppo, hybrid", "poca, hybrid", "sac, discrete"])
def test_max_grad_norm_limits_the_gradients(name, tmp_path):
    changes = ({}, {"max_grad_norm": 1e9}, {"max_grad_norm": 1e-3})
    runs = [Training(name, tmp_path, n_blocks=1, **change) for change in changes]
    for training in runs:
        training.run()
    plain, far, near = (np.concatenate(sampled(run.weights())["policy"], None) for run in runs)
    np.testing.assert_array_equal(plain, far)
    assert np.abs(near - plain).max() > 1e-5


@pytest.mark.parametrize("name", ["ppo, hybrid", "ppo, memory"])
def test_log_probs_computed_in_chunks_equal_log_probs_computed_at_once(name, tmp_path, monkeypatch):
    training = Training(name, tmp_path, n_blocks=1)
    ((rollout, _, _),) = update(training)
    policy, rows = training.learner.algorithm.policy, training.learner.algorithm._rows(rollout)
    sequences = rows.sequences
    if sequences is not None:
        sequences, _ = sequences.split(policy.memory_size)
    log_probs = ppo.log_probs(policy, rows, sequences)
    assert len(log_probs) == rollout.n_rows > 5
    monkeypatch.setattr(ppo, "CHUNK", 5)
    parts = ppo.log_probs(policy, rows, sequences)
    torch.testing.assert_close(parts, log_probs)


@pytest.mark.parametrize("name", ["ppo, continuous", "poca, continuous"])
def test_each_reported_loss_is_the_mean_absolute_loss_of_the_minibatches(name, tmp_path):
    training = Training(name, tmp_path, n_blocks=1, num_epoch=1, batch_size=15)
    algorithm, losses = training.learner.algorithm, itertools.cycle([1.0, -3.0, 0.5])
    learn, used = algorithm.learn_minibatch, []

    def learned(*args, **options):
        result = learn(*args, **options)
        used.append(torch.tensor([next(losses), 4.0, 5.0]))
        return [used[-1]] if name.startswith("poca") else [*used[-1][:2], *result[2:]]

    algorithm.learn_minibatch = learned
    ((_, _, stats),) = update(training)
    policy_loss = float(torch.stack(used)[:, 0].abs().mean())
    for tag, expected in (("Policy", policy_loss), ("Value", 4.0), ("Baseline", 5.0)):
        assert stats.get(f"Losses/{tag} Loss", expected) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "n_rows"), [("ppo, continuous", 47), ("poca, continuous", 59), ("sac, continuous", 0)]
)
def test_an_algorithm_is_ready_for_an_update_only_with_more_than_the_stated_number_of_rows(
    name, n_rows, tmp_path
):
    algorithm = Training(name, tmp_path).learner.algorithm
    assert [algorithm.ready(n) for n in (0, n_rows, n_rows + 1)] == [False, False, True]
