"""Stable-Baselines3's SAC with the RL Zoo's settings, where no score is published for our steps.

    pip install stable-baselines3
    python benchmarks/stable.py [--env HalfCheetah-v5] [--steps 100000] [--seeds 1 2 3]

Prints the mean return of 100 episodes of each seed's final policy, with deterministic actions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time

import torch

SETTINGS = {
    "Pendulum-v1": {"learning_rate": 1e-3},
    "HalfCheetah-v5": {"learning_starts": 10000},
    "Hopper-v5": {"learning_starts": 10000},
}
"""What the zoo's `hyperparams/sac.yml` says beside the defaults, for these or their older forms."""
N_EPISODES = 100


def main() -> None:
    """Train and measure each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=list(SETTINGS), default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    try:
        from stable_baselines3 import SAC
        from stable_baselines3.common.evaluation import evaluate_policy
    except ImportError:
        sys.exit("stable-baselines3 is not installed: pip install stable-baselines3")
    torch.set_num_threads(1)
    version = importlib.metadata.version("stable-baselines3")
    for seed in options.seeds:
        began = time.perf_counter()
        model = SAC("MlpPolicy", options.env, seed=seed, device="cpu", **SETTINGS[options.env])
        model.learn(options.steps)
        model.get_env().seed(1001)
        mean, deviation = evaluate_policy(model, model.get_env(), n_eval_episodes=N_EPISODES)
        sys.stdout.write(
            f"stable-baselines3 {version}, {options.env}, {options.steps} steps, seed {seed}: "
            f"{mean:.1f} (deviation {deviation:.1f}), {time.perf_counter() - began:.0f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
