"""A task for Gymnasium that chance does not solve: `locking:Lock-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

CODE = (1, 3, 0, 2, 2, 1, 3, 0, 1, 2, 0, 3, 3, 1, 2, 0)
"""The right choice of four at each dial."""
N_CHOICES, MAX_STEP = 4, 40
SLIP = 0.2
"""How often a right choice counts as a wrong one."""


class Lock(gymnasium.Env[np.ndarray, np.int64]):
    """Sixteen dials, one after another: a right choice leads to the next, a wrong one a dial back.

    Dials slip: one time in five a right choice leads back, too, so a player who knows the
    combination opens the lock in 0.969 of the episodes. The last dial opens it, which is worth 1
    and ends the episode; all else is worth nothing. The only observation is the dial, one-hot.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (len(CODE),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(N_CHOICES)
        self._dial = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin at the first dial."""
        super().reset(seed=seed, options=options)
        self._dial = 0
        return self._obs(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turn the dial."""
        is_right = int(action) == CODE[self._dial] and self.np_random.random() >= SLIP
        opened = is_right and self._dial == len(CODE) - 1
        if not opened:
            self._dial = max(self._dial + (1 if is_right else -1), 0)
        return self._obs(), float(opened), opened, False, {}

    def _obs(self) -> np.ndarray:
        obs = np.zeros(len(CODE), np.float32)
        obs[self._dial] = 1.0
        return obs


gymnasium.register("Lock-v0", entry_point=Lock, max_episode_steps=MAX_STEP)
