"""Rows to learn from, and how they fall into minibatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.algos.ranks import ALONE
from pipeline.algos.recurrence import minibatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from torch import Tensor

    from pipeline.algos.ranks import Ranks
    from pipeline.nets.memory import Recall


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows to learn from: R of them for a whole rollout, B for a minibatch."""

    obs: list[Tensor]
    """[R, *shape] per observation, normalised."""
    continuous: Tensor
    """[R, A] as drawn."""
    discrete: Tensor
    """int64 [R, branches]."""
    log_prob: Tensor
    """[R, A + branches] when the actions were taken."""
    advantage: Tensor
    """[R, 1], normalised."""
    value: Tensor
    """[R, S] when the rollout was complete."""
    returns: Tensor
    """[R, S]."""
    allowed: Tensor | None = None
    """bool [R, sum of branch sizes]."""
    recall: Recall | None = None
    """The sequences that the rows form, and their memories; None without memory."""
    index: Tensor | None = None
    """int64 [B] which rows of the rollout a minibatch has; None for a whole rollout."""

    def minibatches(
        self, stream: np.random.Generator, size: int, ranks: Ranks = ALONE
    ) -> Iterator[Batch]:
        """The rows in a new order, `size` at a time; a rest that fills no minibatch is left.

        With memory whole sequences change places, and `size` counts sequences. Several processes
        have a part of each minibatch.
        """
        n = len(self.log_prob) if self.recall is None else len(self.recall.lengths)
        portions = ranks.portions(n, size)
        order = stream.permutation(n)[: sum(portions)]
        rows, sizes, recalls = minibatches(self.recall, order, portions)
        index = torch.from_numpy(rows).to(self.log_prob.device)
        names = ("continuous", "discrete", "log_prob", "advantage", "value", "returns", "allowed")
        columns = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        pieces = [torch.split(one[index], sizes) for one in (*self.obs, *columns.values())]
        indices = torch.split(index, sizes)
        for _, recall, own, *parts in zip(
            ranks.weighed(sizes), recalls, indices, *pieces, strict=True
        ):
            obs, rest = parts[: len(self.obs)], parts[len(self.obs) :]
            yield Batch(obs=obs, recall=recall, index=own, **dict(zip(columns, rest, strict=True)))
