"""Agent steps per second of our PPO against `mlagents-learn`, on one executable, side by side.

    python benchmarks/throughput.py [--steps 60000] [--rounds 3] [--simulator balance_ball]
        [--config config/ppo/3DBall.yaml] [--threaded] [--compile]
    python benchmarks/throughput.py --forms [--steps 60000] [--rounds 3]

The two programs run in turn, each with the same configuration, executable and number of steps; the
rate is taken between a run's first and last summary, so that starting up does not count. The ratio
is taken within each round. Our time split follows. `--threaded` is for both programs, `--compile`
for ours; then rates are from the third summary on, before which our programs are compiled.

`--forms` compares `pipeline.train` with itself in CartPole: an environment as class, function and
object with the same by name, and a callback with empty methods with none. Ratios are of agent steps
per second of processor time, as the environments run in this process; the order of the two changes
from round to round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from peer import ROOT, configuration, executable, train

import pipeline
from pipeline.settings import load_run_settings

ID = "CartPole-v1"


class Empty(pipeline.Callback):
    """Has every method, and does nothing."""

    def on_exchange(self, steps: Any, n_episodes: Any) -> None:
        """Do nothing."""

    def on_update(self, behavior: str, update: Any) -> None:
        """Do nothing."""

    def on_summary(self, behavior: str, values: Any, step: int) -> None:
        """Do nothing."""


def rate_of(env: Any, steps: int, seed: int, **options: Any) -> float:
    """Return agent steps per second of processor time of one run."""
    settings = {"default_settings": {"trainer_type": "ppo", "max_steps": steps}}
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = pipeline.train(env, settings, seed=seed, run_dir=folder, progress=False, **options)
        return sum(x.steps for x in result.behaviors.values()) / (time.process_time() - began)


def forms(steps: int, rounds: int) -> None:
    """Print the ratio of each form of an environment, and of empty callbacks, to the name."""
    import gymnasium

    name, make = f"gymnasium:{ID}", partial(gymnasium.make, ID, disable_env_checker=True)
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "a function": (lambda: make, {}, {}),
        "an object": (make, {}, {"n_agents": 1}),
        "empty callbacks": (lambda: name, {"callbacks": [Empty()]}, {}),
    }
    ratios: dict[str, list[float]] = {case: [] for case in cases}
    rate_of(name, 2000, 0)  # so that no case pays for the imports
    for number in range(rounds):
        for case, (source, options, by_name) in cases.items():
            pair = [
                partial(rate_of, source(), steps, number, **options),
                partial(rate_of, name, steps, number, **by_name),
            ]
            order = (0, 1) if number % 2 == 0 else (1, 0)
            rates = {index: pair[index]() for index in order}
            ratios[case].append(rates[0] / rates[1])
    for case, values in ratios.items():
        print(  # noqa: T201
            f"{case}: median ratio {statistics.median(values):.3f} "
            f"({min(values):.3f} to {max(values):.3f})"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulator", default="balance_ball")
    parser.add_argument("--config", type=Path, default=ROOT / "config/ppo/3DBall.yaml")
    parser.add_argument("--threaded", action="store_true", help="learn while environments step")
    parser.add_argument("--compile", action="store_true", help="ours with --torch-compile")
    parser.add_argument("--forms", action="store_true", help="forms of an environment")
    options = parser.parse_args()
    if options.forms:
        forms(options.steps, options.rounds)
        return
    more, first = (["--torch-compile"], 2) if options.compile else ([], 0)
    behaviors = load_run_settings(options.config).behaviors.values()
    least = (first + 2) * max(behavior.summary_freq for behavior in behaviors)
    if options.steps < least:
        parser.error(f"--steps {options.steps}: a rate needs summaries, so at least {least} steps")
    env = executable(options.simulator)
    ratios = []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            changes = {"max_steps": options.steps, "threaded": options.threaded}
            config = configuration(options.config, folder, **changes)
            ours = train("ours", config, env, seed=number, folder=folder, options=more)
            peer = train("peer", config, env, seed=number, folder=folder)
            split = json.loads((folder / f"ours-{number}/run_logs/seconds.json").read_text())
        rates = ours.rate(first), peer.rate(first)
        ratios.append(rates[0] / rates[1])
        print(  # noqa: T201
            f"round {number}: ours {rates[0]:8,.0f} steps/s   mlagents-learn "
            f"{rates[1]:8,.0f} steps/s   ratio {ratios[-1]:5.2f}   "
            f"(whole runs: {ours.wall_s:.1f} s and {peer.wall_s:.1f} s)"
        )
        total = split.pop("total")
        parts = "   ".join(f"{k} {v / total:.0%}" for k, v in sorted(split.items()))
        print(f"         our time: {parts}   other {1 - sum(split.values()) / total:.0%}")  # noqa: T201
    print(f"ratio: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
