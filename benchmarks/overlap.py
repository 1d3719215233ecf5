"""Agent steps per second with `threaded: true` against `threaded: false`, in turn.

    python benchmarks/overlap.py [--steps 60000] [--rounds 3] [--simulator balance_ball]
        [--config config/ppo/3DBall.yaml]

The rate is taken between a run's first and last summary; the ratio within each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from peer import ROOT, configuration, executable, train


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulator", default="balance_ball")
    parser.add_argument("--config", type=Path, default=ROOT / "config/ppo/3DBall.yaml")
    options = parser.parse_args()
    env = executable(options.simulator)
    ratios = []
    for number in range(1, options.rounds + 1):
        curves = []
        for threaded in (False, True):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                changes = {"max_steps": options.steps, "threaded": threaded}
                config = configuration(options.config, folder, **changes)
                curves.append(train("ours", config, env, seed=number, folder=folder))
        plain, threaded = curves
        ratios.append(threaded.rate() / plain.rate())
        print(  # noqa: T201
            f"round {number}: threaded {threaded.rate():8,.0f} steps/s, reward "
            f"{threaded.rewards[-1]}; not {plain.rate():8,.0f} steps/s, reward "
            f"{plain.rewards[-1]}; ratio {ratios[-1]:.2f}"
        )
    print(f"ratio: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
