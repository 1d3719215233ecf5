"""sb3-contrib's CrossQ for `crossq_ladder.py`, which runs this file in an environment of its own.

It prints the mean return of 20 episodes of the final policy, or with `--speed N` how many of N
gradient steps are made in a second of processor time.
"""

from __future__ import annotations

import argparse
import sys
import time

import gymnasium
import numpy as np
import torch
from sb3_contrib import CrossQ
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure

N_EPISODES, N_WARM = 20, 10


def main() -> None:
    """Train and evaluate, or measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--speed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = CrossQ(
        "MlpPolicy",
        options.env,
        learning_starts=5000,
        policy_kwargs={"net_arch": {"pi": [256, 256], "qf": [256, 256]}},
        seed=options.seed,
        device="cpu",
    )
    if options.speed:
        sys.stdout.write(f"{rate(model, options.speed)}\n")
        return
    model.learn(options.steps)
    env = gymnasium.make(options.env)
    env.reset(seed=1000 * options.seed)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=N_EPISODES)
    sys.stdout.write(f"{mean}\n")


def rate(model: CrossQ, n: int) -> float:
    """Gradient steps per second of processor time, on random experience."""
    rng = np.random.default_rng(1)
    model.set_logger(configure(format_strings=[]))
    for _ in range(5000):
        obs, following = rng.normal(size=(2, 1, 17))
        action, reward = np.tanh(rng.normal(size=(1, 6))), rng.normal(size=1)
        model.replay_buffer.add(obs, following, action, reward, np.array([False]), [{}])
    model.train(N_WARM, 256)
    began = time.process_time()
    model.train(n, 256)
    return n / (time.process_time() - began)


if __name__ == "__main__":
    main()
