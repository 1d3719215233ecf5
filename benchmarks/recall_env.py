"""A task for Gymnasium that only a policy with memory solves: `recall_env:Recall-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

N_CUES = 4
DELAYS = (8, 12)
"""Fewest and most decisions between the cue and the question."""


class Recall(gymnasium.Env[np.ndarray, np.int64]):
    """A cue of four is shown at the first decision, and asked for 8 to 12 decisions later.

    Observed are the cue, one-hot and only at first, and whether this decision is the answer. The
    right answer is worth 1 and every other 0: guessing, which is the best without memory, 0.25.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (N_CUES + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(N_CUES)
        self._cue = self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Show a cue."""
        super().reset(seed=seed, options=options)
        self._cue = int(self.np_random.integers(N_CUES))
        self._left = int(self.np_random.integers(DELAYS[0], DELAYS[1] + 1))
        obs = np.zeros(N_CUES + 1, np.float32)
        obs[self._cue] = 1.0
        return obs, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait, or answer."""
        is_answer = self._left == 0
        self._left -= 1
        obs = np.zeros(N_CUES + 1, np.float32)
        obs[-1] = self._left == 0
        return obs, float(is_answer and int(action) == self._cue), is_answer, False, {}


gymnasium.register("Recall-v0", entry_point=Recall)
