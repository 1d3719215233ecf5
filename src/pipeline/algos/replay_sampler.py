"""Minibatches out of a replay: rows as tensors, rewarded and normalised as of now."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pipeline.algos.reward_signals import RewardSignals
from pipeline.algos.rows import Rows, named_tensors, tensors
from pipeline.data.replay import Replay, Sampled
from pipeline.nets.encoder import Normalizers
from pipeline.nets.memory import SequenceState

# Rows that are read at once: reading costs the same for few rows as for many.
CHUNK = 1024


class ReplaySampler:
    """Draws minibatches of `batch_size` rows, with memory in whole sequences.

    The signals reward rows at the moment they are drawn.
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

    def minibatches(self, n: int) -> Iterator[Rows]:
        """Draw `n` minibatches, with normalised observations.

        They have the stored columns, and `rewards` [B, S] of each signal times its strength.
        Several are read at once; with memory only one, because sizes differ.
        """
        size = self.batch_size
        most = 1 if self.replay.remembers else max(CHUNK // size, 1)
        for done in range(0, n, most):
            n_read = min(n - done, most)
            rows = self._rewarded(self._sampled(n_read * size))
            yield from rows.split(size) if n_read > 1 else (rows,)

    def transitions(self, n: int) -> Iterator[Rows]:
        """Draw `n` minibatches in the form that reward signals take."""
        for _ in range(n):
            yield self._rows(self._sampled(self.batch_size))

    def _sampled(self, n_rows: int) -> Sampled:
        return self.replay.sample(self.stream, n_rows)

    @torch.no_grad()
    def _rewarded(self, sampled: Sampled) -> Rows:
        rows = self._rows(sampled)
        sequences = None
        if sampled.memory is not None:
            (memory,) = tensors([sampled.memory], self.device)
            sequences = SequenceState(memory=memory, lengths=torch.from_numpy(sampled.lengths))
        # At the moment of drawing: stored rows would keep the statistics of when they were new.
        obs, next_obs = self.normalizers(rows.obs), self.normalizers(rows.next_obs)
        # From observations as they come, since signals normalise for themselves.
        rewards = self.signals.rewards(rows)
        fields = {**rows.fields, "rewards": rewards}
        return Rows(obs=obs, next_obs=next_obs, fields=fields, sequences=sequences)

    def _rows(self, sampled: Sampled) -> Rows:
        names = ("continuous", "discrete", "reward", "done", "allowed")
        return Rows(
            obs=tensors(sampled.obs, self.device),
            next_obs=tensors(sampled.next_obs, self.device),
            fields=named_tensors(sampled.fields, names, self.device),
        )
