"""A small environment of Gymnasium, under two names."""

from typing import ClassVar

import gymnasium
import numpy as np


class Beacon(gymnasium.Env):
    """Ends after three steps; records the seed and first random number of each episode."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    n_made: ClassVar[int] = 0
    begun: ClassVar[list[tuple[int | None, float]]] = []

    def __init__(self, size: float = 1.0) -> None:
        Beacon.n_made += 1
        self.size = size

    def reset(self, *, seed=None, options=None):  # noqa: ARG002  # Gymnasium passes it
        super().reset(seed=seed)
        self.n_steps = 0
        self.begun.append((seed, self.np_random.uniform()))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.zeros(2, np.float32), float(action) * self.size, self.n_steps == 3, False, {}


class Lighthouse(Beacon):
    """The same environment under another name."""


def beacon():
    return Beacon()
