"""The interface of an algorithm to the processes that learn together, one or several.

Each process (a *rank*) has its own environments and a share of every minibatch. Gradients are
averaged before each step, and statistics of a whole rollout are taken over the rollouts of all
processes, so that the result equals the result of one process with all environments.
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
    """A learner's connection with the learners of the same behavior in other processes."""

    steps: int
    """Steps of this process's agents since the last exchange between processes."""
    held: int
    """Number of this process's rows that waited for an update at the last exchange."""

    def should_update(self) -> bool:
        """Return whether all processes together have enough rows for an update."""

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return each statistic of an update, averaged over all processes, by tag."""


class ProcessGroup:
    """Operations that a process carries out with all other processes, such as averaging gradients.

    This base class is for a run with a single process; subclasses are for several processes. All
    processes call the same methods in the same order.
    """

    rank: int = 0
    """Number of this process, from 0; process 0 writes files."""
    size: int = 1
    """Number of processes."""

    def minibatch_sizes(self, n: int, size: int) -> list[int]:
        """Return for each minibatch of `size` rows the number of rows from this process.

        This process has `n` rows. All processes have the same number of minibatches, and the share
        of a process in each minibatch is its share of all rows. If all processes together have
        fewer rows than `size`, one minibatch has all rows.
        """
        size = min(size, n)
        # Remaining rows are left out: in a smaller minibatch a row would have a larger weight.
        return [size] * (n // size)

    def weighted(self, sizes: Sequence[int]) -> Iterable[None]:
        """Yield None for each minibatch, in which this process has `sizes` rows.

        While the caller handles a minibatch, `average_gradients_` weights each process by its
        number of rows.
        """
        return repeat(None, len(sizes))

    def least(self, n: int) -> int:
        """Return the smallest of the numbers `n` that the processes pass."""
        return n

    def most(self, n: int) -> int:
        """Return the largest of the numbers `n` that the processes pass."""
        return n

    def moments(self, values: FloatArray) -> tuple[float, float]:
        """Return mean and standard deviation of the values [R, ...] that all processes pass."""
        return values.mean(), values.std()

    def std(self, values: Tensor) -> Tensor:
        """Return the standard deviation [S] of each column of all processes' values [R, S]."""
        # The deviation has no Bessel's correction, which would divide by 0 for a single row.
        return values.std(0, correction=0)

    def average_(self, means: Tensor, n_rows: int) -> None:
        """Replace means over the `n_rows` of this process by means over the rows of all processes.

        The results of all processes are equal, bit for bit.
        """

    def average_gradients_(self, values: Tensor) -> None:
        """Replace gradients by their means over all processes; `weighted` sets the weights."""

    def scatter_object(self, values: Sequence[T]) -> T:
        """Send each process one item of the first process's `values`; return the received item."""
        return values[0]


SINGLE_PROCESS = ProcessGroup()


def launched() -> tuple[int, int]:
    """Return the rank and the number of processes that a launcher such as `torchrun` has set.

    Without a launcher they are 0 and 1.

    Raises:
        SettingsError: RANK or WORLD_SIZE is not a whole number.
    """
    # The variables are documented at
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # A launcher sets all four variables; if one is missing, this process was started alone.
    if not all(os.environ.get(name) for name in names):
        return 0, 1
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise SettingsError(
            f"RANK and WORLD_SIZE must be whole numbers ({error}); start the processes with "
            "torchrun, or remove the variables"
        ) from error
    return rank, size
