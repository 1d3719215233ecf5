"""Named columns of rows: their shapes, arrays that grow, and the cut into sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from pipeline.arrays import AnyArray, BoolArray

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One quantity that every row has."""

    shape: tuple[int, ...]
    dtype: type = np.float32
    every: int = 0
    """Stored only at rows 0, every, 2 every, ... of a trajectory, beside its rows; 0: in all."""
    at_end: bool = False
    """Stored once for each trajectory, given with the reward that may close it."""


@dataclass(frozen=True, slots=True)
class Columns(Generic[T]):
    """Arrays, or their `Field`s, of the same rows: observations by number, the rest by name."""

    fields: Mapping[str, T]
    obs: list[T] = field(default_factory=list)
    """In the order of the behavior's specification."""

    def map(self, change: Callable[..., U], other: Columns[Any] | None = None) -> Columns[U]:
        """Columns of `change(this)`, or of `change(this, other)`, column by column."""
        if other is None:  # it is called several times a message
            fields = {name: change(values) for name, values in self.fields.items()}
            return Columns(fields, [change(values) for values in self.obs])
        theirs = other.fields
        fields = {name: change(values, theirs[name]) for name, values in self.fields.items()}
        return Columns(fields, [*map(change, self.obs, other.obs)])

    def pairs(self, other: Columns[U]) -> list[tuple[T, U]]:
        """Each column together with the other's."""
        pairs = [*zip(self.obs, other.obs, strict=True)]
        for name, values in self.fields.items():
            pairs.append((values, other.fields[name]))  # no call of its own
        return pairs

    def to_saved(self) -> dict[str, T]:
        """All columns by the names that checkpoints have."""
        return {**{f"obs_{i}": values for i, values in enumerate(self.obs)}, **self.fields}

    @staticmethod
    def from_saved(saved: Mapping[str, U]) -> Columns[U]:
        """Columns of what `to_saved` returned."""
        fields = dict(saved)
        obs: list[U] = []
        while (name := f"obs_{len(obs)}") in fields:
            obs.append(fields.pop(name))
        return Columns(fields, obs)


class GrowableRows:
    """Rows appended to arrays that double when full."""

    def __init__(self, specs: Columns[Field], capacity: int) -> None:
        self.arrays: Columns[AnyArray] = specs.map(
            lambda spec: np.zeros((capacity, *spec.shape), dtype=spec.dtype)
        )
        self.used = 0
        self.capacity = capacity

    def append(self, n: int, rows: Columns[AnyArray]) -> None:
        """Add `n` rows of every column."""
        place = self._room_for(n)
        for array, values in self.arrays.pairs(rows):
            array[place] = values

    def append_from(self, blocks: Columns[AnyArray], index: AnyArray) -> list[AnyArray]:
        """Add rows of blocks [slots, rows, ...]; return views of their observations.

        Args:
            blocks: at least the columns that are here.
            index: int64 [N] places of the rows, counted through all slots.
        """
        place = self._room_for(len(index))
        for array, block in self.arrays.pairs(blocks):
            rows = block.reshape(block.shape[0] * block.shape[1], *block.shape[2:])
            # "clip", because NumPy would check the index on a copy of the rows otherwise.
            rows.take(index, axis=0, out=array[place], mode="clip")
        return [array[place] for array in self.arrays.obs]

    def _room_for(self, n: int) -> slice:
        """Return the place of `n` more rows."""
        first, self.used = self.used, self.used + n
        if self.used > self.capacity:
            # Doubled, so that appending costs the same on average however many rows there are.
            self.capacity = max(2 * self.capacity, self.used)
            self.arrays = self.arrays.map(lambda old: enlarged(old[:first], self.capacity))
        return slice(first, self.used)

    def filled(self) -> Columns[AnyArray]:
        """Views of the rows that were added."""
        return self.arrays.map(lambda array: array[: self.used])

    def replace(self, n: int, rows: Columns[AnyArray]) -> None:
        """Put `n` rows of every column in place of the present rows."""
        self.used = 0
        self.append(n, rows)

    def state_dict(self) -> dict[str, AnyArray]:
        """Copies of the rows that were added."""
        return self.filled().map(np.copy).to_saved()

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Restore what `state_dict` returned, in place of the present rows.

        Raises:
            ValueError: They are rows of other columns.
        """
        present = self.arrays.to_saved()
        if state.keys() != present.keys():
            raise ValueError(f"rows of {', '.join(state)} in place of {', '.join(present)}")
        self.replace(len(next(iter(state.values()))), Columns.from_saved(state))


def enlarged(values: AnyArray, n: int) -> AnyArray:
    """Return an array [n, ...] that begins with `values` [at most n, ...], zeros behind them."""
    larger: AnyArray = np.zeros((n, *values.shape[1:]), dtype=values.dtype)
    larger[: len(values)] = values
    return larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """S sequences of K trajectories, in the order of their rows; every row is in one of them.

    They are the pieces that a recurrent network is trained on.
    """

    starts: AnyArray
    """int64 [S] first row of each sequence."""
    lengths: AnyArray
    """int64 [S] rows of each sequence, 1 to the sequence length."""
    trajectory: AnyArray
    """int64 [S] trajectory of each sequence."""
    number: AnyArray
    """int64 [S] how many sequences of the same trajectory come before each sequence."""

    def __len__(self) -> int:
        return len(self.starts)


def cut(lengths: AnyArray, sequence_length: int) -> Sequences:
    """Cut trajectories that lie one after another into consecutive sequences.

    Args:
        lengths: integers [K], rows of each trajectory, all at least 1.
        sequence_length: rows of a sequence; a trajectory's last one may be shorter.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # Division rounded up: the last sequence of a trajectory may be short.
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
    """Return the rows, int64 [sum of lengths], of pieces [S] from `starts`, piece after piece."""
    lengths = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    # One counter through all pieces, shifted for each to where it begins: no loop over pieces.
    rows: AnyArray = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    return rows


def followed(*, lengths: AnyArray, is_last: BoolArray) -> AnyArray:
    """Return the rows of consecutive sequences, with the row that follows each trajectory.

    Args:
        lengths: [S] rows of each sequence, R in all.
        is_last: [S] whether a sequence is the last of its trajectory; True for K of them.

    Returns:
        [R + K] row numbers, sequence after sequence: numbers below R are rows of the sequences,
        numbers from R on are the rows that follow the trajectories, in their order.
    """
    longer = lengths + is_last
    rows = rows_of(np.cumsum(lengths) - lengths, longer)
    rows[(np.cumsum(longer) - 1)[is_last]] = lengths.sum() + np.arange(is_last.sum())
    return rows
