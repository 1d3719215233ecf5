"""Minibatches out of a replay: rows as tensors, rewarded and normalised as of now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.algos.policy import tensors
from pipeline.algos.signals import Transitions
from pipeline.nets.memory import Recall

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from torch import Tensor

    from pipeline.algos.signals import RewardSignals
    from pipeline.data.replay import Replay, Sampled
    from pipeline.nets.body import Normalizers

# Rows that are read at once: reading costs the same for few rows as for many.
CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """B rows to learn from."""

    obs: list[Tensor]
    """[B, *shape] per observation, normalised."""
    next_obs: list[Tensor]
    """[B, *shape], normalised."""
    continuous: Tensor
    """[B, A] in -1..1."""
    discrete: Tensor
    """int64 [B, branches]."""
    rewards: Tensor
    """[B, S] of each signal, times its strength."""
    done: Tensor
    """bool [B] whether the task ended with the step."""
    allowed: Tensor | None = None
    """bool [B, sum of branch sizes]; None without branches."""
    recall: Recall | None = None
    """The sequences that the rows form, with the memories stored while acting; None without."""

    def split(self, size: int) -> Iterator[Minibatch]:
        """The rows, which form no sequences, `size` at a time."""
        n = len(self.obs)
        columns = [*self.obs, *self.next_obs]
        columns += [self.continuous, self.discrete, self.rewards, self.done]
        columns += [] if self.allowed is None else [self.allowed]
        for parts in zip(*(torch.split(column, size) for column in columns), strict=True):
            continuous, discrete, rewards, done, *allowed = parts[2 * n :]
            yield Minibatch(
                obs=list(parts[:n]),
                next_obs=list(parts[n : 2 * n]),
                continuous=continuous,
                discrete=discrete,
                rewards=rewards,
                done=done,
                allowed=allowed[0] if allowed else None,
            )


class Samples:
    """Draws minibatches.

    Args:
        replay: where rows come from.
        signals: what rewards them, at the moment they are drawn.
        normalizers: of the policy.
        stream: that rows are drawn from.
        batch_size: rows of a minibatch; with memory those of its sequences at full length.
        device: where tensors go.
    """

    def __init__(
        self,
        replay: Replay,
        signals: RewardSignals,
        normalizers: Normalizers,
        *,
        stream: np.random.Generator,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self.replay = replay
        self.signals = signals
        self.normalizers = normalizers
        self.stream = stream
        self.batch_size = batch_size
        self.device = device

    def minibatches(self, n: int) -> Iterator[Minibatch]:
        """`n` minibatches, several read at once; with memory one, as their rows differ."""
        size = self.batch_size
        most = 1 if self.replay.remembers else max(CHUNK // size, 1)
        for done in range(0, n, most):
            n_read = min(n - done, most)
            rows = self._rows(self._sampled(n_read * size))
            yield from rows.split(size) if n_read > 1 else (rows,)

    def transitions(self, n: int) -> Iterator[Transitions]:
        """`n` minibatches as the reward signals take them."""
        for _ in range(n):
            yield self._transitions(self._sampled(self.batch_size))

    def _sampled(self, n_rows: int) -> Sampled:
        return self.replay.sample(self.stream, n_rows)

    @torch.no_grad()
    def _rows(self, sampled: Sampled) -> Minibatch:
        transitions = self._transitions(sampled)
        recall = None
        if sampled.memory is not None:
            (memory,) = tensors([sampled.memory], self.device)
            recall = Recall(memory=memory, lengths=torch.from_numpy(sampled.lengths))
        allowed = sampled.fields.get("allowed")
        return Minibatch(
            obs=self.normalizers(transitions.obs),
            next_obs=self.normalizers(transitions.next_obs),
            continuous=transitions.continuous,
            discrete=transitions.discrete,
            rewards=self.signals.rewards(transitions),
            done=transitions.done,
            allowed=None if allowed is None else tensors([allowed], self.device)[0],
            recall=recall,
        )

    def _transitions(self, sampled: Sampled) -> Transitions:
        names = ("continuous", "discrete", "reward", "done")
        columns = tensors([sampled.fields[name] for name in names], self.device)
        return Transitions(
            obs=tensors(sampled.obs, self.device),
            next_obs=tensors(sampled.next_obs, self.device),
            **dict(zip(names, columns, strict=True)),
        )
