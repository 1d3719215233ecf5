"""Cloning: the rows of an update, its learning rate, and its state."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algos.bc import BehavioralCloning, hold_out
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.demos.demonstrations import ExpertRows
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, (3,)))


def policy(**network) -> Policy:
    with seeded_weights(1, "a policy"):
        return Policy(SPEC, NetworkSettings(hidden_units=8, num_layers=1, **network))


def expert(n=20, **fields) -> ExpertRows:
    rng = np.random.default_rng(0)
    return ExpertRows(
        obs=[rng.normal(2.0, 3.0, (n, 2)).astype(np.float32)],
        continuous=rng.uniform(-1, 1, (n, 1)).astype(np.float32),
        discrete=rng.integers(3, size=(n, 1)).astype(np.int32),
        **fields,
    )


def cloning(rows=None, *, network=None, **changes) -> BehavioralCloning:
    options = {"batch_size": 6, "num_epoch": 2, "learning_rate": 1e-2, "seed": 1} | changes
    rows = expert() if rows is None else rows
    return BehavioralCloning(policy(**(network or {})), rows, **options)


def taken(bc: BehavioralCloning, monkeypatch) -> list[list[int]]:
    """Return the rows of each minibatch of an update."""
    minibatches, loss = [], bc.loss
    monkeypatch.setattr(
        bc, "loss", lambda batch: (minibatches.append(batch.index.tolist()), loss(batch))[1]
    )
    bc.update()
    return minibatches


def weights(bc: BehavioralCloning) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in bc.policy.parameters()])


def test_each_epoch_shuffles_rows_and_leaves_out_an_incomplete_minibatch(monkeypatch):
    minibatches = taken(cloning(), monkeypatch)
    assert [len(rows) for rows in minibatches] == [6] * 6
    for epoch in (minibatches[:3], minibatches[3:]):
        assert len({row for rows in epoch for row in rows}) == 18
    assert minibatches[:3] != minibatches[3:]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"batch_size": 50}, [20, 20]),
        ({"samples_per_update": 13}, [6] * 4),
        ({"samples_per_update": 3}, [6] * 2),
        ({"samples_per_update": 500, "num_epoch": 1}, [6] * 3),
        ({"batch_size": 1, "samples_per_update": 4, "num_epoch": 1}, [1] * 4),
    ],
)
def test_settings_determine_the_minibatch_sizes_of_a_cloning_update(changes, sizes, monkeypatch):
    assert [len(rows) for rows in taken(cloning(**changes), monkeypatch)] == sizes


def test_cloning_of_a_policy_with_memory_has_whole_sequences_in_each_minibatch(monkeypatch):
    memory = {"memory": MemorySettings(sequence_length=4, memory_size=8)}
    rows = expert(lengths=np.array([7, 9, 4]))
    pieces = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15], [16, 17, 18, 19]]
    minibatches = taken(cloning(rows, network=memory, batch_size=8, num_epoch=1), monkeypatch)
    assert len(minibatches) == 3
    for rows_of_two in minibatches:
        assert [pair for pair in ((a, b) for a in pieces for b in pieces)
                if pair[0] + pair[1] == rows_of_two]  # fmt: skip
    few_samples = {"batch_size": 4, "num_epoch": 1, "samples_per_update": 9}
    assert len(taken(cloning(rows, network=memory, **few_samples), monkeypatch)) == 2
    fewest_samples = {"batch_size": 3, "num_epoch": 1, "samples_per_update": 3}
    assert len(taken(cloning(rows, network=memory, **fewest_samples), monkeypatch)) == 1
    with pytest.raises(ValueError, match="no episode lengths"):
        cloning(network=memory)


def test_rows_are_drawn_by_weight_and_sequences_by_the_weight_of_their_first_row():
    weighed = np.repeat(np.array([1.0, 3.0], np.float32), 10)
    bc = cloning(expert(weights=weighed))
    assert bc.probabilities.tolist() == pytest.approx([1 / 40] * 10 + [3 / 40] * 10)
    memory = {"memory": MemorySettings(sequence_length=4, memory_size=8)}
    bc = cloning(expert(weights=weighed, lengths=np.array([10, 10])), network=memory)
    assert bc.probabilities.tolist() == pytest.approx([1 / 12] * 3 + [3 / 12] * 3)


def test_learning_rate_of_cloning_falls_to_0_within_the_given_steps_and_stays_0():
    bc = cloning(steps=100)
    assert bc.update(step=0) > 0
    assert bc.optimizer.learning_rate == pytest.approx(1e-2)
    bc.update(step=75)
    assert bc.optimizer.learning_rate == pytest.approx(0.25e-2, rel=1e-6)
    before = weights(bc)
    assert bc.update(step=100) == 0.0
    assert bc.update(step=1000) == 0.0
    assert torch.equal(weights(bc), before)
    constant = cloning()
    assert constant.update(step=10**9) > 0
    assert constant.optimizer.learning_rate == 1e-2


def test_reported_cloning_loss_is_the_mean_over_minibatches_and_cloning_lowers_the_loss():
    bc = cloning(batch_size=10, num_epoch=1, learning_rate=1e-9)
    assert bc.update() == pytest.approx(bc.measure(), rel=1e-5)
    learning = cloning(num_epoch=30)
    assert learning.update() > 1.02 * learning.measure()


def test_cloning_loss_computed_in_chunks_equals_the_loss_of_all_rows_at_once(monkeypatch):
    bc = cloning()
    loss = bc.measure()
    assert loss == pytest.approx(bc.loss(bc.rows).item(), rel=1e-6)
    monkeypatch.setattr("pipeline.algos.bc.CHUNK", 7)
    monkeypatch.setattr(bc, "loss", _counted(bc.loss, calls := []))
    assert bc.measure() == pytest.approx(loss, rel=1e-5)
    assert len(calls) == 3


def _counted(function, calls):
    return lambda *args: (calls.append(1), function(*args))[1]


def test_normaliser_counts_observations_of_demonstrations_once():
    bc = cloning(network={"normalize": True})
    bc.observe()
    running = bc.policy.normalizers.by_observation["0"]
    assert float(running.count) == 21
    assert torch.allclose(running.mean.float(), bc.rows.obs[0].sum(0) / 21, atol=1e-5)
    bc.update()
    assert float(running.count) == 21
    expected = bc.loss(replace(bc.rows, obs=bc.policy.normalizers(bc.rows.obs)))
    assert bc.measure() == pytest.approx(expected.item())
    cloning().observe()  # no normalisers, so nothing changes


def test_held_out_rows_are_random_and_disjoint_from_the_training_rows():
    rows = expert(weights=np.arange(20, dtype=np.float32))
    taught, checked = hold_out(rows, 0.3, np.random.default_rng(0))
    assert (len(taught), len(checked)) == (14, 6)
    numbers = [part.weights.astype(int).tolist() for part in (taught, checked)]
    assert sorted(numbers[0] + numbers[1]) == list(range(20))
    assert sorted(numbers[1]) != numbers[1]
    for part, index in zip((taught, checked), numbers, strict=True):
        np.testing.assert_array_equal(part.obs[0], rows.obs[0][index])
        np.testing.assert_array_equal(part.continuous, rows.continuous[index])
        np.testing.assert_array_equal(part.discrete, rows.discrete[index])
        assert part.lengths is None
    repeated = hold_out(rows, 0.3, np.random.default_rng(0))[1]
    np.testing.assert_array_equal(repeated.weights, checked.weights)
    assert hold_out(expert(), 0.0, np.random.default_rng(0))[0].weights is None


def test_with_memory_whole_sequences_are_held_out_from_training():
    lengths = np.array([7, 9, 4])
    rows = expert(lengths=lengths, weights=np.arange(20, dtype=np.float32))
    pieces = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15], [16, 17, 18, 19]]
    taught, checked = hold_out(rows, 0.4, np.random.default_rng(0), sequence_length=4)
    assert (len(taught.lengths), len(checked.lengths)) == (4, 2)
    seen = []
    for part in (taught, checked):
        cuts = np.cumsum(part.lengths)[:-1]
        seen += [piece.astype(int).tolist() for piece in np.split(part.weights, cuts)]
    assert sorted(seen) == pieces
    with pytest.raises(ValueError, match="no episode lengths"):
        hold_out(expert(), 0.4, np.random.default_rng(0), sequence_length=4)
