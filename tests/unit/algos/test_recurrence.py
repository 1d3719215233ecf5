"""Values of rows that lie sequence after sequence, with few at a time and with all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.algos import recurrence
from pipeline.algos.recurrence import forgetful_recall, stored_recall, values_in_sequence
from pipeline.data.rollout import Rollout

CPU = torch.device("cpu")
LENGTHS = np.array([5, 3, 8, 1, 6])
L = 3


def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    n = int(LENGTHS.sum())
    return Rollout(
        fields={"obs_0": rng.random((n, 2)).astype(np.float32), "reward": np.zeros(n)},
        starts=np.cumsum(LENGTHS) - LENGTHS,
        lengths=LENGTHS,
        terminated=np.zeros(5, np.bool_),
        next_obs=[rng.random((5, 2)).astype(np.float32)],
        memory=rng.random((5, 3, 4)).astype(np.float32),
    )


def critic(obs, recall):
    """For each row the sum of what its sequence has seen so far, and of its memory."""
    rows = torch.split(obs[0].sum(1, keepdim=True), recall.lengths.tolist())
    starts = recall.memory.sum(1)
    return torch.cat([start + row.cumsum(0) for start, row in zip(starts, rows, strict=True)])


@pytest.mark.parametrize("chunk", [1, 6, 7, 1000])
def test_values_go_on_from_the_memory_of_each_sequence_and_after_the_last(chunk, monkeypatch):
    monkeypatch.setattr(recurrence, "_CHUNK", chunk)
    given = rollout()
    recall = stored_recall(given, L, CPU)
    tensors = [torch.from_numpy(one) for one in (given.fields["obs_0"], given.next_obs[0])]
    found = values_in_sequence(critic, tensors[:1], tensors[1:], given, recall=recall)
    values, following, pieces, row = [], [], [], 0
    for k, length in enumerate(LENGTHS):
        for t in range(length):
            if t % L == 0:
                total = float(given.memory[k, t // L].sum())
                pieces.append(min(L, length - t))
            total += float(given.fields["obs_0"][row].sum())
            values.append(total)
            row += 1
        following.append(total + float(given.next_obs[0][k].sum()))
    assert recall.lengths.tolist() == pieces
    assert found[0][:, 0].tolist() == pytest.approx(values, rel=1e-5)
    assert found[1][:, 0].tolist() == pytest.approx(following, rel=1e-5)


def test_sequences_that_forget_begin_with_zeros_and_are_cut_alike():
    recall = forgetful_recall(LENGTHS, L, 4, CPU)
    assert recall.lengths.tolist() == stored_recall(rollout(), L, CPU).lengths.tolist()
    assert recall.memory.shape == (len(recall.lengths), 4)
    assert not recall.memory.any()
