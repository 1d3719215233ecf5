"""Columns of experience: shapes, arrays that grow, and how trajectories are cut into sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Shape and dtype of one column, and in which rows of a trajectory it is stored."""

    shape: tuple[int, ...]
    dtype: type = np.float32
    every: int = 0
    """If above 0, the column is stored only at every `every`-th row of a trajectory, from row 0."""
    at_end: bool = False
    """Whether the column is stored once for each trajectory, at the trajectory's end."""


@dataclass(frozen=True, slots=True)
class Columns(Generic[T]):
    """The columns of one set of rows: observations by index, all other columns by name.

    The type T of a column is an array, or the `Field` that describes the array.
    """

    fields: Mapping[str, T]
    obs: list[T] = field(default_factory=list)
    """Observations, in the order of the behavior's specification."""

    def map(self, change: Callable[..., U], other: Columns[Any] | None = None) -> Columns[U]:
        """Return the results of `change` for each column, by the column's name or index.

        With `other`, `change` gets each column and the same column of `other`.
        """
        # The case without `other` is separate, because `map` is called several times for each
        # message and must be fast.
        if other is None:
            fields = {name: change(values) for name, values in self.fields.items()}
            return Columns(fields, [change(values) for values in self.obs])
        other_fields = other.fields
        fields = {name: change(values, other_fields[name]) for name, values in self.fields.items()}
        return Columns(fields, [*map(change, self.obs, other.obs)])

    def pairs(self, other: Columns[U]) -> list[tuple[T, U]]:
        """Return pairs of columns: each column of this object and the same column of `other`."""
        pairs = [*zip(self.obs, other.obs, strict=True)]
        for name, values in self.fields.items():
            # A loop is faster than a comprehension, which is a function call in Python 3.11.
            pairs.append((values, other.fields[name]))
        return pairs

    def to_saved(self) -> dict[str, T]:
        """Return all columns by their names in checkpoints."""
        return {**{f"obs_{i}": values for i, values in enumerate(self.obs)}, **self.fields}

    @staticmethod
    def from_saved(saved: Mapping[str, U]) -> Columns[U]:
        """Return the columns in a dict that `to_saved` returned."""
        fields = dict(saved)
        obs: list[U] = []
        while (name := f"obs_{len(obs)}") in fields:
            obs.append(fields.pop(name))
        return Columns(fields, obs)


class GrowableRows:
    """Appends rows to arrays, which are enlarged to twice their size when they are full."""

    def __init__(self, specs: Columns[Field], capacity: int) -> None:
        self.arrays: Columns[AnyArray] = specs.map(
            lambda spec: np.zeros((capacity, *spec.shape), dtype=spec.dtype)
        )
        self.used = 0
        self.capacity = capacity

    def append(self, n: int, rows: Columns[AnyArray]) -> None:
        """Append `n` rows of every column."""
        place = self._reserve(n)
        for array, values in self.arrays.pairs(rows):
            array[place] = values

    def append_from(self, blocks: Columns[AnyArray], index: AnyArray) -> list[AnyArray]:
        """Append copies of rows of blocks; return views of the observations of the new rows.

        The blocks are [slots, rows, ...], with at least the columns of this object. `index`, int64
        [N], numbers their rows; the first row of slot 1 follows the last row of slot 0.
        """
        place = self._reserve(len(index))
        # Blocks may have further columns; `pairs` lists only the columns of this object.
        for array, block in self.arrays.pairs(blocks):
            # Blocks are contiguous, so this is a view, in which a row has a single index.
            rows = block.reshape(block.shape[0] * block.shape[1], *block.shape[2:])
            # With the mode "raise", NumPy would first copy the rows into a buffer.
            rows.take(index, axis=0, out=array[place], mode="clip")
        return [array[place] for array in self.arrays.obs]

    def _reserve(self, n: int) -> slice:
        """Take the next `n` rows, enlarge the arrays if needed, and return a slice of the rows."""
        first, self.used = self.used, self.used + n
        if self.used > self.capacity:
            # The capacity is doubled, so that the average time of appending a row is constant.
            self.capacity = max(2 * self.capacity, self.used)
            self.arrays = self.arrays.map(lambda old: enlarged(old[:first], self.capacity))
        return slice(first, self.used)

    def filled(self) -> Columns[AnyArray]:
        """Return views of the rows that were appended."""
        return self.arrays.map(lambda array: array[: self.used])

    def replace(self, n: int, rows: Columns[AnyArray]) -> None:
        """Replace all rows by `n` rows of every column."""
        self.used = 0
        self.append(n, rows)

    def state_dict(self) -> dict[str, AnyArray]:
        """Return copies of the rows that were appended."""
        return self.filled().map(np.copy).to_saved()

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Replace all rows by the rows that `state_dict` returned.

        Raises:
            ValueError: The columns of `state` are not the columns of this object.
        """
        # A checkpoint of another algorithm, or of another version, has other columns.
        present = self.arrays.to_saved()
        if state.keys() != present.keys():
            raise ValueError(
                f"the saved rows have the columns {', '.join(state)}, but the algorithm needs "
                f"{', '.join(present)}; another algorithm or version saved the rows"
            )
        self.replace(len(next(iter(state.values()))), Columns.from_saved(state))


def enlarged(values: AnyArray, n: int) -> AnyArray:
    """Return an array [n, ...] that begins with `values` [at most n, ...]; zeros follow."""
    larger: AnyArray = np.zeros((n, *values.shape[1:]), dtype=values.dtype)
    larger[: len(values)] = values
    return larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """S sequences, cut from K trajectories for recurrent networks, in the order of the rows.

    Every row of the trajectories is in exactly one sequence.
    """

    starts: AnyArray
    """int64 [S] first row of each sequence."""
    lengths: AnyArray
    """int64 [S] number of rows of each sequence, 1 to the sequence length."""
    trajectory: AnyArray
    """int64 [S] index of each sequence's trajectory."""
    number: AnyArray
    """int64 [S] index of each sequence among the sequences of its trajectory."""

    def __len__(self) -> int:
        return len(self.starts)


def cut(lengths: AnyArray, sequence_length: int) -> Sequences:
    """Return the sequences into which trajectories, stored one after another, are cut.

    The trajectories have `lengths` [K] rows, at least 1. A sequence has `sequence_length` rows; a
    trajectory's last sequence may be shorter.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # The quotient is rounded up, because the last sequence of a trajectory may be short.
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
    """Return the numbers of the rows in pieces of an array, int64 [sum of lengths].

    The S pieces begin at the rows `starts` [S], and have `lengths` [S] rows.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    # A counter over all rows, shifted for each piece to its start, avoids a loop over pieces.
    rows: AnyArray = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    return rows


def followed(*, lengths: AnyArray, is_last: BoolArray) -> AnyArray:
    """Return the row numbers [R + K] of all trajectories, each followed by the row after its end.

    The numbers are indices into an array that has the R rows of all sequences first, and then, for
    each of the K trajectories, the row after the trajectory. Sequences have `lengths` [S] rows, and
    `is_last` [S] marks the last sequence of each trajectory.
    """
    longer = lengths + is_last
    rows = rows_of(np.cumsum(lengths) - lengths, longer)
    # The place that `longer` adds to a trajectory's last sequence is for the row after the
    # trajectory.
    rows[(np.cumsum(longer) - 1)[is_last]] = lengths.sum() + np.arange(is_last.sum())
    return rows
