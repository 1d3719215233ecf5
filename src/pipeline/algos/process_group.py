"""The processes that learn together, as an algorithm uses them: one, or several.

Each process (a *rank*) has environments of its own and a share of every minibatch. Gradients are
averaged before each step, and statistics of a whole rollout are taken over the rollouts of all
processes, so that the result is that of one process which has seen everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Protocol, TypeVar

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.core.arrays import FloatArray

T = TypeVar("T")


class LearnerGroup(Protocol):
    """The learners of one behavior in all processes, as one of them uses them."""

    steps: int
    """Steps of this process's agents that the others do not know of yet."""
    held: int
    """Rows here that were still to be learned from when all last met."""

    def should_update(self) -> bool:
        """Whether all together have enough for an update."""

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Statistics of an update over all processes."""


class ProcessGroup:
    """The processes of a run, seen from one of them; this one learns alone.

    All processes call the same methods in the same order.
    """

    rank: int = 0
    """Number of this process, from 0; the first one writes."""
    size: int = 1
    """How many processes there are."""

    def minibatch_sizes(self, n: int, size: int) -> list[int]:
        """How many of the `n` rows here go into each minibatch of `size` rows from all processes.

        All processes have the same number of minibatches, and each minibatch has rows of every
        process in proportion to what it has. Where all together have fewer rows than `size`, one
        minibatch has all of them.
        """
        size = min(size, n)
        # A rest is left out: a smaller minibatch would weigh its rows more than others.
        return [size] * (n // size)

    def weighted(self, sizes: Sequence[int]) -> Iterable[None]:
        """Step through minibatches that have `sizes` rows in this process.

        Until the next step, gradients are averaged over the rows of the present minibatch.
        """
        return repeat(None, len(sizes))

    def least(self, n: int) -> int:
        """The smallest `n` of all processes."""
        return n

    def most(self, n: int) -> int:
        """The largest `n` of all processes."""
        return n

    def moments(self, values: FloatArray) -> tuple[float, float]:
        """Mean and standard deviation of the values [R, ...] of all processes."""
        return values.mean(), values.std()

    def std(self, values: Tensor) -> Tensor:
        """[S] standard deviation of the columns of the values [R, S] of all processes."""
        return values.std(0, correction=0)

    def average_(self, means: Tensor, n_rows: int) -> None:
        """Replace means over the `n_rows` of this process by means over the rows of all.

        All processes get the same bits.
        """

    def average_gradients_(self, values: Tensor) -> None:
        """Replace `values` by the mean over all processes, weighed as `weighted` says."""

    def scatter_object(self, values: Sequence[T]) -> T:
        """Return this process's item of the first process's `values`, one item per process."""
        return values[0]


SINGLE_PROCESS = ProcessGroup()


def launched() -> tuple[int, int]:
    """Rank and number of processes that `torchrun`, or something like it, has set for this one.

    Raises:
        SettingsError: What is set makes no sense.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(name) for name in names):
        return 0, 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise SettingsError(f"RANK and WORLD_SIZE must be whole numbers ({error})") from error
    return rank, size
