"""An environment and an encoder of one's own."""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict


class Reach(gymnasium.Env):
    """Move a point to a target within 30 steps; the reward is minus their distance."""

    observation_space = Dict(place=Box(-1, 1, (2,)), target=Box(-1, 1, (2,)))
    action_space = Box(-0.2, 0.2, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.target = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.n_steps = 0
        return {"place": self.place, "target": self.target}, {}

    def step(self, action):
        self.place = np.clip(self.place + action, -1, 1).astype(np.float32)
        self.n_steps += 1
        reward = -float(np.linalg.norm(self.place - self.target))
        observation = {"place": self.place, "target": self.target}
        return observation, reward, False, self.n_steps == 30, {}


class Encoder(torch.nn.Sequential):
    """Encodes one observation: float32 [B, *shape] to [B, output]."""

    def __init__(self, shape, output):
        super().__init__(torch.nn.Linear(*shape, 32), torch.nn.Tanh(), torch.nn.Linear(32, output))
