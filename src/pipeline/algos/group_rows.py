"""Rows of groups' experience, and how they fall into minibatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.algos.ranks import ALONE
from pipeline.algos.recurrence import minibatches
from pipeline.data.sequences import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pipeline.algos.ranks import Ranks
    from pipeline.algos.teams import Teams
    from pipeline.arrays import AnyArray
    from pipeline.nets.memory import Recall


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRows:
    """R rows to learn from."""

    obs: list[Tensor]
    """[R, *shape] per observation, normalised."""
    continuous: Tensor
    """[R, A] as drawn."""
    discrete: Tensor
    """int64 [R, branches]."""
    log_prob: Tensor
    """[R, A + branches] when the actions were taken."""
    allowed: Tensor | None
    """bool [R, sum of branch sizes]."""
    advantage: Tensor
    """[R, 1], normalised."""
    returns: Tensor
    """[R, S] of each reward signal."""
    value: Tensor
    """[R, S] of the row's group, when the rollout was complete."""
    baseline: Tensor
    """[R, S] without the row's own action."""
    teams: Teams
    recall: Recall | None = None
    """The sequences that the rows form, and their memories; None without memory."""
    sequence_length: int = 1

    def minibatches(
        self, stream: np.random.Generator, size: int, ranks: Ranks = ALONE
    ) -> Iterator[tuple[AnyArray, Recall | None]]:
        """Rows of each minibatch, about `size`; a rest that fills none is left.

        A minibatch has all rows of some moments, in a new order of moments, so that what mates have
        in common is computed once. With memory it has whole sequences instead. Several processes
        have a part of each minibatch.
        """
        if self.recall is not None:
            n = len(self.recall.lengths)
            portions = ranks.portions(n, max(size // self.sequence_length, 1))
            order = stream.permutation(n)[: sum(portions)]
            index, sizes, recalls = minibatches(self.recall, order, portions)
            pieces = np.split(index, np.cumsum(sizes)[:-1])
            for _, piece, recall in zip(ranks.weighed(sizes), pieces, recalls, strict=True):
                yield piece, recall
            return
        by_moment = np.argsort(self.teams.moment, kind="stable")
        counts = np.bincount(self.teams.moment)
        starts = np.cumsum(counts) - counts
        order = stream.permutation(np.flatnonzero(counts))
        index = by_moment[rows_of(starts[order], counts[order])]
        ends = np.cumsum(counts[order])
        wanted = np.cumsum(ranks.portions(len(index), size))
        cuts = np.unique(ends[np.searchsorted(ends, wanted)])
        cuts = cuts[: ranks.least(len(cuts))]
        pieces = np.split(index, cuts)[: len(cuts)]
        for _, piece in zip(ranks.weighed([len(one) for one in pieces]), pieces, strict=True):
            yield piece, None
