"""Values of rows ordered by sequence, in chunks and at once."""

import numpy as np
import pytest
import torch

from pipeline.algos import rows
from pipeline.algos.rows import forgetful_sequences, stored_sequences, values_in_sequence
from pipeline.data.rollout import Rollout

CPU = torch.device("cpu")
LENGTHS = np.array([5, 3, 8, 1, 6])
L = 3


def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    n = int(LENGTHS.sum())
    return Rollout(
        obs=[rng.random((n, 2)).astype(np.float32)],
        fields={"reward": np.zeros(n)},
        starts=np.cumsum(LENGTHS) - LENGTHS,
        lengths=LENGTHS,
        terminated=np.zeros(5, np.bool_),
        next_obs=[rng.random((5, 2)).astype(np.float32)],
        memory=rng.random((5, 3, 4)).astype(np.float32),
    )


def critic(obs, sequences):
    """Return for each row the sum of its sequence's observations so far, and of its memory."""
    rows = torch.split(obs[0].sum(1, keepdim=True), sequences.lengths.tolist())
    starts = sequences.memory.sum(1)
    return torch.cat([start + row.cumsum(0) for start, row in zip(starts, rows, strict=True)])


@pytest.mark.parametrize("chunk", [1, 6, 7, 1000])
def test_values_of_rows_and_bootstrap_values_continue_from_the_memory_of_each_sequence(
    chunk, monkeypatch
):
    monkeypatch.setattr(rows, "_CHUNK", chunk)
    experience = rollout()
    sequences = stored_sequences(experience, L, CPU)
    tensors = [torch.from_numpy(obs) for obs in (experience.obs[0], experience.next_obs[0])]
    actual = values_in_sequence(critic, tensors[:1], tensors[1:], experience, sequences=sequences)
    values, following, pieces, row = [], [], [], 0
    for k, length in enumerate(LENGTHS):
        for t in range(length):
            if t % L == 0:
                total = float(experience.memory[k, t // L].sum())
                pieces.append(min(L, length - t))
            total += float(experience.obs[0][row].sum())
            values.append(total)
            row += 1
        following.append(total + float(experience.next_obs[0][k].sum()))
    assert sequences.lengths.tolist() == pieces
    assert actual[0][:, 0].tolist() == pytest.approx(values, rel=1e-5)
    assert actual[1][:, 0].tolist() == pytest.approx(following, rel=1e-5)


def test_forgetful_sequences_have_memories_of_zeros_and_the_lengths_of_stored_sequences():
    sequences = forgetful_sequences(LENGTHS, L, 4, CPU)
    assert sequences.lengths.tolist() == stored_sequences(rollout(), L, CPU).lengths.tolist()
    assert sequences.memory.shape == (len(sequences.lengths), 4)
    assert not sequences.memory.any()
