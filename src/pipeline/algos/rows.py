"""Rows of experience as tensors, and their minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup
from pipeline.core.arrays import AnyArray
from pipeline.data.columns import cut, followed, rows_of
from pipeline.data.rollout import Rollout
from pipeline.nets.memory import SequenceState

# Approximate number of rows that `values_in_sequence` evaluates at once; it is small, because the
# observations of these rows are copied.
_CHUNK = 1024


class _Column:
    """Attribute of `Rows` that returns the field with the attribute's name."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, rows: Rows, _: type) -> Tensor:
        return rows.fields[self._name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R steps from a rollout, a replay or a demonstration, as input of losses.

    The fields depend on the source of the rows and on the algorithm; the attributes below name the
    usual fields, with their shapes.
    """

    obs: list[Tensor]
    """Observations of the rows, a tensor [R, *shape] for each observation."""
    next_obs: list[Tensor] = field(default_factory=list)
    """Observations after each step, in the form of `obs`; empty if they are not stored."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """All other columns of the rows by name, as tensors [R, ...]."""
    sequences: SequenceState | None = None
    """The sequences that the rows form, with the memory at each start; None without memory."""
    steps: Rows | None = None
    """The same rows in the form that reward signals learn from; None if no signal learns."""

    def __len__(self) -> int:
        return len(self.obs[0])

    @staticmethod
    def of(inputs: Mapping[str, Any], sequences: SequenceState | None) -> Rows:
        """Return rows with the inputs of a loss: `obs`, `next_obs` if there are any, and fields."""
        fields = dict(inputs)
        obs, next_obs = fields.pop("obs"), fields.pop("next_obs", [])
        return Rows(obs=obs, next_obs=next_obs, fields=fields, sequences=sequences)

    @property
    def inputs(self) -> dict[str, Any]:
        """All tensors by name, observations in lists, in the form that `FlatAdam.descend` takes."""
        return {"obs": self.obs, "next_obs": self.next_obs, **self.fields}

    continuous = _Column()
    """[R, A] continuous actions."""
    discrete = _Column()
    """int64 [R, branches] index of each branch's chosen action."""
    log_prob = _Column()
    """[R, A + branches] log probabilities of the actions when they were taken."""
    reward = _Column()
    """[R] the environment's reward."""
    rewards = _Column()
    """[R, S] rewards of each signal times the signal's strength."""
    done = _Column()
    """Bool [R] whether the task ended with the step; False where the episode was cut short."""
    value = _Column()
    """[R, S] critic's value for each reward signal, computed when the rollout was complete."""
    baseline = _Column()
    """[R, S] counterfactual baseline: a group value that is independent of the row's action."""
    returns = _Column()
    """[R, S] lambda-returns of each reward signal."""
    advantage = _Column()
    """[R, 1] normalised advantage; [R, C] per action component with `threaded`."""
    index = _Column()
    """int64 [R] indices of these rows in their rollout, always on the CPU."""

    @property
    def allowed(self) -> Tensor | None:
        """Bool [R, sum of branch sizes] whether each choice was allowed; None without branches."""
        return self.fields.get("allowed")

    def take(self, index: Tensor) -> Rows:
        """Return copies of the rows with the indices `index`, int64 [B], without sequences."""
        # `index_select` takes a third of the time of `values[index]`, also for images.
        return Rows(
            obs=[values.index_select(0, index) for values in self.obs],
            next_obs=[values.index_select(0, index) for values in self.next_obs],
            fields={name: values.index_select(0, index) for name, values in self.fields.items()},
            steps=None if self.steps is None else self.steps.take(index),
        )

    def split(self, sizes: int | list[int]) -> Iterator[Rows]:
        """Yield the rows in order, in pieces of the given size or sizes, without sequences."""
        n_obs, n_seen = len(self.obs), len(self.obs) + len(self.next_obs)
        tensors = [*self.obs, *self.next_obs, *self.fields.values()]
        pieces = zip(*(torch.split(values, sizes) for values in tensors), strict=True)
        # `repeat` has no end, so `zip` stops after the last piece of rows.
        pieces_of_steps = repeat(None) if self.steps is None else self.steps.split(sizes)
        for parts, steps in zip(pieces, pieces_of_steps, strict=False):
            yield Rows(
                obs=list(parts[:n_obs]),
                next_obs=list(parts[n_obs:n_seen]),
                fields=dict(zip(self.fields, parts[n_seen:], strict=True)),
                steps=steps,
            )

    def minibatches(
        self, stream: np.random.Generator, size: int, group: ProcessGroup = SINGLE_PROCESS
    ) -> Iterator[Rows]:
        """Yield minibatches of `size` rows in random order; a remainder below `size` is left out.

        With memory whole sequences are shuffled, and `size` is a number of sequences. Each process
        has a part of each minibatch. The field `index` of a minibatch has the indices of its rows.
        """
        n = len(self) if self.sequences is None else len(self.sequences.lengths)
        sizes = group.minibatch_sizes(n, size)
        return self.in_order(stream.permutation(n)[: sum(sizes)], sizes, group)

    def in_order(
        self, order: AnyArray, sizes: Sequence[int], group: ProcessGroup = SINGLE_PROCESS
    ) -> Iterator[Rows]:
        """Yield P minibatches of `sizes` [P] units; a unit is a row, or with memory a sequence.

        `order` has the indices of the units of all minibatches, one minibatch after another.
        """
        index, n_rows, states = _sequences(self.sequences, order, sizes)
        at = torch.from_numpy(index)
        # All minibatches are looked up at once, so that each minibatch is a view.
        rows = self.take(at.to(self.obs[0].device))
        # The index stays on the CPU, where rollouts and groups are looked up.
        pieces = replace(rows, fields={**rows.fields, "index": at}).split(n_rows)
        for _, sequences, piece in zip(group.weighted(n_rows), states, pieces, strict=True):
            yield piece if sequences is None else replace(piece, sequences=sequences)


def _sequences(
    sequences: SequenceState | None, order: AnyArray, sizes: Sequence[int]
) -> tuple[AnyArray, list[int], Iterable[SequenceState | None]]:
    """Return for `Rows.in_order` the row indices of P minibatches, and their sizes and sequences.

    Sizes are numbers of rows [P]; the sequences of each minibatch are None without memory.
    """
    if sequences is None:
        return order, list(sizes), repeat(None, len(sizes))
    lengths = sequences.lengths.numpy()
    # The index of a sequence's first row is the number of rows in all sequences before it.
    rows = rows_of((lengths.cumsum() - lengths)[order], lengths[order])
    per_minibatch = np.split(lengths[order], np.cumsum(sizes)[:-1])
    picked = torch.from_numpy(order)
    memories = torch.split(sequences.memory[picked.to(sequences.memory.device)], list(sizes))
    states = (
        SequenceState(memory=memory, lengths=torch.from_numpy(minibatch_lengths))
        for memory, minibatch_lengths in zip(memories, per_minibatch, strict=True)
    )
    return rows, [int(minibatch_lengths.sum()) for minibatch_lengths in per_minibatch], states


def tensors(arrays: Sequence[AnyArray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`, which share the arrays' memory where possible."""
    return [
        # Read-only arrays are copied, because torch would warn about them.
        torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
        for array in arrays
    ]


def named_tensors(
    arrays: Mapping[str, AnyArray], names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Return the arrays in `names` as tensors, by name; names without an array are left out."""
    present = [name for name in names if name in arrays]
    return dict(zip(present, tensors([arrays[name] for name in present], device), strict=True))


def stored_sequences(
    rollout: Rollout, sequence_length: int, device: torch.device
) -> SequenceState | None:
    """Return a rollout's sequences with the memories stored while acting; None without memory."""
    if rollout.memory is None:
        return None
    # Trajectories are cut at the same rows as while acting, when the memory at the start of each
    # sequence was stored.
    sequences = cut(rollout.lengths, sequence_length)
    memory = rollout.memory[sequences.trajectory, sequences.number]
    return SequenceState(
        memory=torch.from_numpy(memory).to(device), lengths=torch.from_numpy(sequences.lengths)
    )


def forgetful_sequences(
    lengths: AnyArray, sequence_length: int, memory_size: int, device: torch.device
) -> SequenceState:
    """Cut K trajectories of `lengths` [K] into sequences, each with an initial memory of zeros."""
    sequences = cut(lengths, sequence_length)
    return SequenceState(
        memory=torch.zeros(len(sequences), memory_size, device=device),
        lengths=torch.from_numpy(sequences.lengths),
    )


def values_in_sequence(
    critic: Callable[[list[Tensor], SequenceState], Tensor],
    obs: Sequence[Tensor],
    next_obs: Sequence[Tensor],
    rollout: Rollout,
    *,
    sequences: SequenceState,
) -> tuple[Tensor, Tensor]:
    """Return values [R, signals] of all rows, and [K, signals] after each of K trajectories.

    Args:
        critic: function that returns values [B, signals] of rows that are ordered by sequence.
        obs: [R, *shape] per observation of `rollout`, normalised.
        next_obs: [K, *shape] per observation after each trajectory, normalised.
        rollout: the rollout of the observations.
        sequences: the sequences of the rollout.
    """
    lengths = sequences.lengths.numpy()
    starts, ends = lengths.cumsum() - lengths, lengths.cumsum()
    # The observation after a trajectory is added to the trajectory's last sequence, so that the
    # critic evaluates it with the right memory.
    is_last = np.isin(ends, rollout.starts + rollout.lengths)
    values, following = [], []
    # Number of sequences that are evaluated at once: they have about `_CHUNK` rows.
    n = max(_CHUNK // int(lengths.max()), 1)
    n_ended = 0
    for first in range(0, len(lengths), n):
        part = slice(first, first + n)
        rows = followed(lengths=lengths[part], is_last=is_last[part])
        span = slice(starts[part][0], ends[part][-1])
        ended = slice(n_ended, n_ended + int(is_last[part].sum()))
        n_ended = ended.stop
        index = torch.from_numpy(rows).to(sequences.memory.device)
        inputs = [
            torch.cat((now[span], after[ended]))[index]
            for now, after in zip(obs, next_obs, strict=True)
        ]
        longer = torch.from_numpy(lengths[part] + is_last[part])
        estimates = critic(inputs, SequenceState(memory=sequences.memory[part], lengths=longer))
        # In the indices of `followed`, the observations after trajectories come after all rows.
        is_next = index >= span.stop - span.start
        values.append(estimates[~is_next])
        following.append(estimates[is_next])
    return torch.cat(values), torch.cat(following)
