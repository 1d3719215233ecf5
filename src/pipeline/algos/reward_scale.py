"""The scale of rewards, from the spread of the returns that agents get.

Source: Engstrom et al. 2020, arXiv 2005.12729 (the running deviation of discounted sums
of rewards); the bound by the largest return: FlashSAC 2026, `reward_normalization.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.data.rollout import Rollout

EPSILON = 1e-8
LARGEST_RETURN = 5.0
"""Largest absolute return after division by the scale."""


class RewardScale:
    """Statistics of the agents' discounted sums of rewards, and the divisor of each signal.

    The sum of an agent, G = gamma G + r, begins again at 0 where its task has ended. It continues
    where an episode was cut short, because the learned values also look beyond the cut.

    Args:
        n_signals: number of reward signals S.
        gamma: discount of a step, or of each signal [S].
    """

    def __init__(self, n_signals: int, *, gamma: float | AnyArray) -> None:
        self.gamma = gamma
        self.count = 0
        self.mean: AnyArray = np.zeros(n_signals)
        self.squared: AnyArray = np.zeros(n_signals)  # sum of squared deviations from the mean
        self.most: AnyArray = np.zeros(n_signals)  # largest absolute sum
        self._open: dict[int, AnyArray] = {}
        """The sum G [S] of each agent in an unfinished task, by the agent's slot."""

    @property
    def divisor(self) -> AnyArray:
        """float64 [S] standard deviation of G, or the largest |G| / LARGEST_RETURN, if larger."""
        deviation = np.sqrt(self.squared / max(self.count, 1))
        # A rare large return hardly changes the deviation, so the largest sum is limited, too.
        divisor: AnyArray = np.maximum(deviation, self.most / LARGEST_RETURN) + EPSILON
        return divisor

    def observe(self, rollout: Rollout, rewards: FloatArray) -> None:
        """Add the sums G of closed trajectories, computed from the rewards [R, S] of their rows."""
        n_signals = len(self.mean)
        rows: AnyArray = np.zeros((len(rewards), n_signals))
        names = ("slots", "terminated", "starts", "lengths")
        # Trajectories are added in order: an agent may have several, and each continues the sum of
        # the agent's previous trajectory.
        for slot, terminated, start, length in zip(
            *(getattr(rollout, name).tolist() for name in names), strict=True
        ):
            sums = self._open.pop(slot, np.zeros(n_signals))
            for row in range(start, start + length):
                # Rows are added one at a time, because each sum needs the sum of the previous row.
                sums = rows[row] = self.gamma * sums + rewards[row]
            if not terminated:
                self._open[slot] = sums.copy()
        self.add(rows)

    def add(self, rows: AnyArray) -> None:
        """Add sums G [R, S] to the statistics, by the pairwise update of Chan et al. 1979."""
        n, before = len(rows), self.count
        if n == 0:
            return
        mean = rows.mean(0)
        delta = mean - self.mean
        self.count += n
        self.mean = self.mean + delta * (n / self.count)
        squared = self.squared + ((rows - mean) ** 2).sum(0)
        self.squared = squared + delta**2 * (before * n / self.count)
        self.most = np.maximum(self.most, np.abs(rows).max(0))

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the sums G of agents in unfinished tasks, as plain values."""
        return {
            "count": self.count,
            "mean": self.mean.tolist(),
            "squared": self.squared.tolist(),
            "most": self.most.tolist(),
            "slots": list(self._open),
            "sums": [values.tolist() for values in self._open.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.count = int(state["count"])
        self.mean, self.squared, self.most = (
            np.array(state[name], np.float64) for name in ("mean", "squared", "most")
        )
        sums = (np.array(values, np.float64) for values in state["sums"])
        self._open = dict(zip(state["slots"], sums, strict=True))
