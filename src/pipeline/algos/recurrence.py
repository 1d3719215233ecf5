"""What recurrent networks learn from: whole sequences, each with the memory that it began with."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.data.sequences import cut, followed, rows_of
from pipeline.nets.memory import Recall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from pipeline.arrays import AnyArray
    from pipeline.data.rollout import Rollout

# Rows that a value is computed for at once: few, because their observations are copied.
_CHUNK = 1024


def stored_recall(rollout: Rollout, sequence_length: int, device: torch.device) -> Recall | None:
    """The sequences of a rollout with the memories stored while acting; None without memory."""
    if rollout.memory is None:
        return None
    sequences = cut(rollout.lengths, sequence_length)
    memory = rollout.memory[sequences.trajectory, sequences.number]
    return Recall(
        memory=torch.from_numpy(memory).to(device), lengths=torch.from_numpy(sequences.lengths)
    )


def forgetful_recall(
    lengths: AnyArray, sequence_length: int, memory_size: int, device: torch.device
) -> Recall:
    """Sequences of trajectories of `lengths` [K] that all begin without any memory."""
    sequences = cut(lengths, sequence_length)
    return Recall(
        memory=torch.zeros(len(sequences), memory_size, device=device),
        lengths=torch.from_numpy(sequences.lengths),
    )


def minibatches(
    recall: Recall | None, order: AnyArray, sizes: Sequence[int]
) -> tuple[AnyArray, list[int], Iterable[Recall | None]]:
    """Rows, or with memory whole sequences, in the given order: `sizes` [P] in each minibatch.

    Args:
        recall: of all sequences; None without memory.
        order: numbers of rows, or of sequences: as many as `sizes` add up to.
        sizes: [P] rows, or sequences, of each minibatch.

    Returns:
        Rows of all minibatches, rows of each [P], and its sequences with their memories.
    """
    if recall is None:
        return order, list(sizes), repeat(None, len(sizes))
    lengths = recall.lengths.numpy()
    rows = rows_of((lengths.cumsum() - lengths)[order], lengths[order])
    per_minibatch = np.split(lengths[order], np.cumsum(sizes)[:-1])
    picked = torch.from_numpy(order)
    memories = torch.split(recall.memory[picked.to(recall.memory.device)], list(sizes))
    recalls = (
        Recall(memory=memory, lengths=torch.from_numpy(one))
        for memory, one in zip(memories, per_minibatch, strict=True)
    )
    return rows, [int(one.sum()) for one in per_minibatch], recalls


def values_in_sequence(
    critic: Callable[[list[Tensor], Recall], Tensor],
    obs: Sequence[Tensor],
    next_obs: Sequence[Tensor],
    rollout: Rollout,
    *,
    recall: Recall,
) -> tuple[Tensor, Tensor]:
    """Values of all rows, and of what follows each trajectory, read on from its last sequence.

    Args:
        critic: values [B, signals] of rows that lie sequence after sequence.
        obs: [R, *shape] per observation, normalised.
        next_obs: [K, *shape] after each trajectory, normalised.
        rollout: where those are from.
        recall: the sequences of the rollout.

    Returns:
        [R, signals] and [K, signals].
    """
    lengths = recall.lengths.numpy()
    starts, ends = lengths.cumsum() - lengths, lengths.cumsum()
    is_last = np.isin(ends, rollout.starts + rollout.lengths)
    values, following = [], []
    n = max(_CHUNK // int(lengths.max()), 1)
    n_ended = 0
    for first in range(0, len(lengths), n):
        part = slice(first, first + n)
        rows = followed(lengths=lengths[part], is_last=is_last[part])
        span = slice(starts[part][0], ends[part][-1])
        ended = slice(n_ended, n_ended + int(is_last[part].sum()))
        n_ended = ended.stop
        index = torch.from_numpy(rows).to(recall.memory.device)
        inputs = [
            torch.cat((now[span], after[ended]))[index]
            for now, after in zip(obs, next_obs, strict=True)
        ]
        longer = torch.from_numpy(lengths[part] + is_last[part])
        found = critic(inputs, Recall(memory=recall.memory[part], lengths=longer))
        is_next = index >= span.stop - span.start
        values.append(found[~is_next])
        following.append(found[is_next])
    return torch.cat(values), torch.cat(following)
