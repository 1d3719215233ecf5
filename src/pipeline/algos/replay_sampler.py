"""Minibatches from a replay buffer, with rewards and normalisation computed when rows are drawn."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.reward_signals import RewardSignals
from pipeline.algos.rows import Rows, named_tensors, tensors
from pipeline.core.arrays import AnyArray
from pipeline.data.replay import Replay, Sampled
from pipeline.nets.encoder import Normalizers
from pipeline.nets.memory import SequenceState

# Minibatches with about this many rows together are read at once, because a read takes about as
# long for few rows as for many.
CHUNK = 1024


class ReplaySampler:
    """Draws minibatches of `batch_size` rows from a replay buffer; with memory, whole sequences.

    Reward signals compute the rewards of rows when the rows are drawn.

    Args:
        scaled: function that maps the signals' rewards times strength [R, S] to the rewards that
            critics learn; None if critics learn the signals' rewards unchanged.
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
        scaled: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.replay = replay
        self.signals = signals
        self.normalizers = normalizers
        self.stream = stream
        self.batch_size = batch_size
        self.device = device
        self._scaled = scaled or (lambda rewards: rewards)

    def minibatches(self, n: int) -> Iterator[Rows]:
        """Draw `n` minibatches, with normalised observations.

        A minibatch has the stored columns, and `rewards` [B, S]: each signal's rewards times its
        strength. Several minibatches are read at once; with memory only one, because minibatches
        of sequences differ in size.
        """
        size = self.batch_size
        most = 1 if self.replay.remembers else max(CHUNK // size, 1)
        for done in range(0, n, most):
            n_read = min(n - done, most)
            rows = self._drawn(n_read * size)
            yield from rows.split(size) if n_read > 1 else (rows,)

    def transitions(self, n: int) -> Iterator[Rows]:
        """Draw `n` minibatches in the form that reward signals learn from."""
        for _ in range(n):
            yield self._rows(self.replay.sample(self.stream, self.batch_size))

    @torch.no_grad()
    def _drawn(self, n_rows: int) -> Rows:
        sampled = self.replay.sample(self.stream, n_rows)
        rows = self._rows(sampled)
        sequences = None
        if sampled.memory is not None:
            (memory,) = tensors([sampled.memory], self.device)
            sequences = SequenceState(memory=memory, lengths=torch.from_numpy(sampled.lengths))
        # Observations are normalised here, so that old rows are scaled as new rows are.
        obs, next_obs = self.normalizers(rows.obs), self.normalizers(rows.next_obs)
        # Rewards are computed from raw observations, because signals have their own normalisers.
        rewards = self._scaled(self.signals.rewards(rows))
        fields = {**rows.fields, "rewards": rewards}
        return Rows(obs=obs, next_obs=next_obs, fields=fields, sequences=sequences)

    def _rows(self, sampled: Sampled) -> Rows:
        names = ("continuous", "discrete", "reward", "done", "allowed", "next_allowed")
        return Rows(
            obs=tensors(sampled.obs, self.device),
            next_obs=tensors(sampled.next_obs, self.device),
            fields=named_tensors(sampled.fields, names, self.device),
        )


class ReturnSampler(ReplaySampler):
    """Draws minibatches for critics with n-step returns: Mnih et al. 2016, arXiv 1602.01783.

    Rows have the fields of `ReplaySampler`'s rows, but the following fields have another meaning or
    are new:

    - `rewards` [B, S]: discounted sums of rewards over up to `n_steps` steps of a trajectory;
    - `done` bool [B]: whether the task ended with the last of these steps;
    - `discount` [B, S]: discount of the value of the observation after these steps;
    - `next_allowed` bool [B, sum of branch sizes]: allowed choices at that observation, if stored.

    Args:
        n_steps: largest number of steps whose rewards are summed.
        gamma: [S] discount per step.
    """

    def __init__(self, *args: Any, n_steps: int, gamma: AnyArray, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # `_gammas` [n_steps + 1, S] has the discounts after 0 to n_steps steps.
        self._gammas = gamma ** np.arange(n_steps + 1)[:, None]

    @torch.no_grad()
    def _drawn(self, n_rows: int) -> Rows:
        n_steps, n_columns = len(self._gammas) - 1, self._gammas.shape[1]
        first = self.replay.draw(self.stream, n_rows)
        # `numbers` and `follows` are [n_steps, n_rows]: row numbers in the replay, and whether the
        # row is in the same trajectory as the first row.
        numbers, follows = self.replay.following(first, n_steps)
        n_taken = follows.sum(0)
        rows = self._rows(self.replay.read(numbers.ravel()))
        rewards = self._scaled(self.signals.rewards(rows)).view(n_steps, n_rows, n_columns)
        # `weights` is [n_steps, n_rows, S]; rows after the end of the trajectory have weight 0.
        weights = np.where(follows[..., None], self._gammas[:n_steps, None], 0.0)
        # `rows` has the first step of every sum, then the second step of every sum, and so on.
        last = (n_taken - 1) * n_rows + np.arange(n_rows)
        ends = torch.from_numpy(last).to(self.device)
        fields = {name: rows.fields[name][:n_rows] for name in ("continuous", "discrete")}
        fields["rewards"] = (rewards * self._on_device(weights)).sum(0)
        fields["done"] = rows.done[ends]
        # At a trajectory's end fewer steps are summed, so the next value is discounted less.
        fields["discount"] = self._on_device(self._gammas[n_taken])
        if rows.allowed is not None:
            fields["allowed"] = rows.allowed[:n_rows]
        if "next_allowed" in rows.fields:
            fields["next_allowed"] = rows.fields["next_allowed"][ends]
        return Rows(
            obs=self.normalizers([values[:n_rows] for values in rows.obs]),
            next_obs=self.normalizers([values[ends] for values in rows.next_obs]),
            fields=fields,
        )

    def _on_device(self, values: AnyArray) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)
