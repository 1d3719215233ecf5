"""Does with Stable-Baselines3 what notebook.py does with this package; both use parts.py."""

import matplotlib.pyplot as plt
import numpy as np
import torch
from parts import Encoder, Reach
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor


class Both(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 2 * 64)
        parts = {key: Encoder(part.shape, 64) for key, part in space.spaces.items()}
        self.parts = torch.nn.ModuleDict(parts)

    def forward(self, observation):
        return torch.cat([part(observation[key]) for key, part in self.parts.items()], 1)


class StopAndDraw(BaseCallback):
    def _on_training_start(self):
        self.points = []

    def _on_step(self):
        recent = [episode["r"] for episode in self.model.ep_info_buffer]
        if self.n_calls % 300 == 0 and recent:
            self.points.append((self.num_timesteps, np.mean(recent)))
        return not (recent and np.mean(recent) > -12)

    def _on_training_end(self):
        plt.plot(*zip(*self.points, strict=True))
        plt.savefig("curve_sb3.png")


network = {"net_arch": [64, 64], "features_extractor_class": Both}
ppo = {"batch_size": 240, "n_steps": 120, "learning_rate": 1e-3, "policy_kwargs": network}
model = PPO("MultiInputPolicy", make_vec_env(Reach, 16, seed=1), seed=1, **ppo)
model.learn(80_000, callback=StopAndDraw())
model.save("reach_sb3")
mean, _ = evaluate_policy(model, make_vec_env(Reach, 1), n_eval_episodes=50)
print(model.num_timesteps, mean)

model, env = PPO.load("reach_sb3", env=make_vec_env(Reach, 16, seed=1)), Reach()
observation, _ = env.reset(seed=3)
truncated, total = False, 0.0
while not truncated:
    action, _ = model.predict(observation, deterministic=True)
    observation, reward, _, truncated, _ = env.step(action)
    total += reward
print(total)

model.learn(80_000 - model.num_timesteps, reset_num_timesteps=False)
print(model.num_timesteps)
