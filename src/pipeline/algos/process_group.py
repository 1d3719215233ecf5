"""What an algorithm asks of the processes that learn together: one of them, or several.

Each process (a *rank*) has environments of its own and a share of every minibatch. Gradients are
averaged before each step, and whatever is taken over a whole rollout is taken over the rollouts of
all, so that the result is that of one process which has seen everything.
"""

from __future__ import annotations

import os
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from pipeline.arrays import FloatArray


class LearnerGroup(Protocol):
    """What a learner asks of the learners of its behavior in the other processes."""

    steps: int
    """Steps of this process's agents that the others do not know of yet."""

    def should_update(self) -> bool:
        """Whether all together have enough for an update."""

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Statistics of an update over all processes."""


class ProcessGroup(Protocol):
    """The processes of a run, seen from one of them. All ask the same things in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0; the first one writes."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def minibatch_sizes(self, n: int, size: int) -> list[int]:
        """How many of the `n` rows here go into each minibatch of `size` rows from all processes.

        Everybody has as many minibatches, and in each a part that is in proportion to its rows.
        """

    def weighted(self, sizes: Sequence[int]) -> Iterable[None]:
        """Goes through minibatches that have `sizes` rows of this process's.

        While it stands at one, gradients are averaged over the rows of that minibatch.
        """

    def least(self, n: int) -> int:
        """The smallest of everybody's `n`."""

    def most(self, n: int) -> int:
        """The largest of everybody's `n`."""

    def moments(self, values: FloatArray) -> tuple[float, float]:
        """Mean and standard deviation of everybody's values [R, ...]."""

    def std(self, values: Tensor) -> Tensor:
        """[S] standard deviation of the columns of everybody's values [R, S]."""

    def average_(self, means: Tensor, n_rows: int) -> None:
        """Replace means over `n_rows` here by those over everybody's, the same bits everywhere."""


class SingleProcess:
    """A process that learns alone."""

    rank = 0
    size = 1

    def minibatch_sizes(self, n: int, size: int) -> list[int]:
        """As many full ones as there are rows for; one of all rows where there are fewer."""
        size = min(size, n)
        # A rest is left out: a smaller minibatch would weigh its rows more than others.
        return [size] * (n // size)

    def weighted(self, sizes: Sequence[int]) -> Iterable[None]:
        """All rows are here."""
        return repeat(None, len(sizes))

    def least(self, n: int) -> int:
        """The number itself."""
        return n

    def most(self, n: int) -> int:
        """The number itself."""
        return n

    def moments(self, values: FloatArray) -> tuple[float, float]:
        """Mean and standard deviation."""
        return values.mean(), values.std()

    def std(self, values: Tensor) -> Tensor:
        """[S] standard deviation of each column."""
        return values.std(0, correction=0)

    def average_(self, means: Tensor, n_rows: int) -> None:
        """They are the mean already."""


SINGLE_PROCESS: ProcessGroup = SingleProcess()


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
