"""A Gymnasium environment of one's own: pipeline learn own.yaml --env docking:Docking."""

import gymnasium
import numpy as np


class Docking(gymnasium.Env):
    """Come to rest at a dock: push left (0), not at all (1) or right (2)."""

    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002  # Gymnasium passes it
        """Begin an episode at rest, somewhere."""
        super().reset(seed=seed)
        self.place, self.speed, self.n_steps = self.np_random.uniform(-1, 1), 0.0, 0
        return self._seen(), {}

    def step(self, action):
        """Go on for a step; each gives up to 1, and leaving ends the episode."""
        self.speed += 0.05 * (action - 1)
        self.place += self.speed
        self.n_steps += 1
        reward = max(0.0, 1.0 - abs(self.place) - abs(self.speed))
        return self._seen(), reward, abs(self.place) > 2, self.n_steps == 100, {}

    def _seen(self):
        return np.clip(np.array([self.place, self.speed], dtype=np.float32), -2, 2)
