"""Trajectories cut into sequences, the pieces that a recurrent network is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, BoolArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """S sequences of K trajectories, in the order of their rows; every row is in one of them."""

    starts: AnyArray
    """int64 [S] first row of each."""
    lengths: AnyArray
    """int64 [S] rows of each, 1 to the sequence length."""
    trajectory: AnyArray
    """int64 [S] which trajectory each is of."""
    number: AnyArray
    """int64 [S] how many sequences of the same trajectory come before it."""

    def __len__(self) -> int:
        return len(self.starts)


def cut(lengths: AnyArray, sequence_length: int) -> Sequences:
    """Cut trajectories that lie one after another into consecutive sequences.

    Args:
        lengths: integers [K], rows of each trajectory, all at least 1.
        sequence_length: rows of a sequence; a trajectory's last one may be shorter.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = -(-lengths // sequence_length)
    trajectory = np.repeat(np.arange(len(lengths)), counts)
    number = rows_of(np.zeros_like(counts), counts)
    before = number * sequence_length
    return Sequences(
        starts=(np.cumsum(lengths) - lengths)[trajectory] + before,
        lengths=np.minimum(lengths[trajectory] - before, sequence_length),
        trajectory=trajectory,
        number=number,
    )


def rows_of(starts: AnyArray, lengths: AnyArray) -> AnyArray:
    """The rows, int64 [sum of lengths], of pieces [S] that begin at `starts`, piece after piece."""
    lengths = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    rows: AnyArray = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    return rows


def followed(*, lengths: AnyArray, is_last: BoolArray) -> AnyArray:
    """Rows of sequences that lie one after another, each trajectory's with the row that follows it.

    Args:
        lengths: [S] rows of each sequence, R in all.
        is_last: [S] whether it is the last of a trajectory, of which K are.

    Returns:
        [R + K] numbers of rows, sequence after sequence: below R those of the sequences, from R on
        those that follow a trajectory, in the order of the trajectories.
    """
    longer = lengths + is_last
    rows = rows_of(np.cumsum(lengths) - lengths, longer)
    rows[(np.cumsum(longer) - 1)[is_last]] = lengths.sum() + np.arange(is_last.sum())
    return rows
