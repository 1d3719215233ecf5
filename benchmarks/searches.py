"""Does a sweep by Optuna find better settings than random search with as many trials?

    python benchmarks/searches.py --repeats 5 --trials 20 --steps 3000

Trains PPO on CartPole-v1 with a learning rate, epochs, minibatch size and discount that are drawn
at random, or proposed by the method `optuna` of `params.yaml` from the scores of the trials before.
Each repeat has a seed for the search; training has one seed, so a trial costs seconds. The two
methods have their first five trials in common. Printed are the best score of each search after some
trials, and of the search's choice on three fresh seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import tempfile
from dataclasses import replace
from typing import Any

import pipeline
from pipeline.settings.nodes import from_plain
from pipeline.settings.project.sweeps import SweepParams
from pipeline.settings.reader import read_dataclass

BASE = "behaviors.CartPole-v1."
SWEEP = {
    "experiment": "cart",
    "method": "optuna",
    "parameters": {
        f"{BASE}hyperparameters.learning_rate": {"min": 1e-5, "max": 1e-1, "scale": "log"},
        f"{BASE}hyperparameters.num_epoch": {"min": 1, "max": 15, "integer": True},
        f"{BASE}hyperparameters.batch_size": [32, 64, 128, 256],
        f"{BASE}reward_signals.extrinsic.gamma": [0.9, 0.95, 0.98, 0.99],
    },
    "seeds": [1],
    "startup": 5,
}
EPISODES = 20
FRESH = (101, 102, 103)


def settings(values: dict[str, Any], steps: int) -> dict[str, Any]:
    """The trainer configuration of a trial."""
    get = {key.rpartition(".")[2]: value for key, value in values.items()}
    return {
        "behaviors": {
            "CartPole-v1": {
                "trainer_type": "ppo",
                "hyperparameters": {
                    "batch_size": get["batch_size"],
                    "buffer_size": 512,
                    "learning_rate": get["learning_rate"],
                    "num_epoch": get["num_epoch"],
                },
                "network_settings": {"hidden_units": 64, "num_layers": 2, "normalize": True},
                "reward_signals": {"extrinsic": {"gamma": get["gamma"], "strength": 1.0}},
                "max_steps": steps,
                "summary_freq": steps,
                "time_horizon": 32,
            }
        }
    }


def score(values: dict[str, Any], seed: int, steps: int, known: dict[str, float]) -> float:
    """Return the mean return of a policy trained with these values; kept in `known`."""
    key = f"{seed} {sorted(values.items())}"
    if key not in known:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            env = pipeline.make_env("gymnasium:CartPole-v1", seed=seed, n_agents=16)
            trained = pipeline.train(env, settings(values, steps), seed=seed, run_dir=folder)
            policy = pipeline.export_policy(trained.behaviors["CartPole-v1"].checkpoint, folder)
            episodes = pipeline.evaluate(
                policy, "gymnasium:CartPole-v1", episodes=EPISODES, n_agents=16
            )
        known[key] = statistics.fmean(episode.episode_return for episode in episodes)
    return known[key]


def search(
    method: str, seed: int, trials: int, steps: int, known: dict[str, float]
) -> list[tuple[dict[str, Any], float]]:
    """Values and score of each trial."""
    block = SWEEP | {"seed": seed, "runs": trials}
    sweep = read_dataclass(SweepParams, from_plain(block, "searches.py"), "")
    sweep = replace(sweep, startup=trials) if method == "random" else sweep
    finished: dict[str, tuple[dict[str, Any], float]] = {}
    for number in range(1, trials + 1):
        values = sweep.propose(number, finished, ())
        finished[f"{number:03}"] = (values, score(values, 1, steps, known))
    return list(finished.values())


def tell(cells: list[str]) -> None:
    """Print a row of the table."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def main() -> None:
    """Search with both methods, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    known: dict[str, float] = {}
    at = [n for n in (5, 10, 15, 20, 30, 40) if n <= arguments.trials]
    tell(["repeat", "method", *(f"best of {n}" for n in at), "fresh seeds"])
    tell(["---:", "---", *["---:"] * (len(at) + 1)])
    for repeat in range(arguments.repeats):
        for method in ("random", "optuna"):
            results = search(method, repeat, arguments.trials, arguments.steps, known)
            best = [max(value for _, value in results[:n]) for n in at]
            chosen = max(results, key=lambda trial: trial[1])[0]
            fresh = statistics.fmean(score(chosen, seed, arguments.steps, known) for seed in FRESH)
            tell([str(repeat), method, *(f"{value:.1f}" for value in (*best, fresh))])


if __name__ == "__main__":
    main()
