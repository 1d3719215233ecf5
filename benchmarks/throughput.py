"""Agent steps per second of our PPO against `mlagents-learn`, on one executable, side by side.

    python benchmarks/throughput.py [--steps 60000] [--rounds 3] [--simulator balance_ball]
        [--config config/ppo/3DBall.yaml] [--threaded] [--compile]

The two programs run in turn, each with the same configuration, executable and number of steps; the
rate is taken between a run's first and last summary, so that starting up does not count. The ratio
is taken within each round. Our time split follows. `--threaded` is for both programs, `--compile`
for ours; then rates are from the third summary on, before which our programs are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from peer import ROOT, configuration, executable, train

from pipeline.settings import load_run_settings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulator", default="balance_ball")
    parser.add_argument("--config", type=Path, default=ROOT / "config/ppo/3DBall.yaml")
    parser.add_argument("--threaded", action="store_true", help="learn while environments step")
    parser.add_argument("--compile", action="store_true", help="ours with --torch-compile")
    options = parser.parse_args()
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
