"""Learning curves of our PPO with one setting changed, in process, over seeds.

    python benchmarks/variants.py [KEY=VALUE ...] [--seeds 1 2 3] [--steps 300000]
        [--simulator balance_ball] [--config config/ppo/3DBall.yaml] [--parameters NAME=NUMBER ...]

KEY is a key of the behavior, such as hyperparameters.clip_value. The unchanged configuration is
always the first row. Schedules end at --steps. NAME is an environment parameter, for all rows; it
takes the place of the configuration's lessons.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from peer import ROOT

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.settings import load_run_settings
from pipeline.simulators import registry
from pipeline.tracking import names
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping


class Curve(Sink):
    """A sink that keeps the rewards."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002  # one behavior
        """Keep one summary."""
        self.rewards[step] = values.get(names.REWARD, float("nan"))


def main() -> None:
    """Train each variant with each seed and print mean rewards by step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--simulator", default="balance_ball")
    parser.add_argument("--config", type=Path, default=ROOT / "config/ppo/3DBall.yaml")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--parameters", nargs="+", default=[])
    options = parser.parse_args()
    behavior = next(iter(load_run_settings(options.config).behaviors))
    for change in ["", *options.changes]:
        overrides: dict[str, object] = {f"behaviors.{behavior}.max_steps": options.steps}
        for parameter in options.parameters:
            name, _, number = parameter.partition("=")
            overrides[f"environment_parameters.{name}"] = float(number)
        if change:
            key, _, value = change.partition("=")
            overrides[f"behaviors.{behavior}.{key}"] = yaml.safe_load(value)
        settings = load_run_settings(options.config, overrides=overrides)
        rows = defaultdict(list)
        for seed in options.seeds:
            curve = Curve()
            environment = InProcessEnvironment(registry.make(options.simulator, seed=seed))
            with tempfile.TemporaryDirectory() as folder:
                pipeline.train(environment, settings, seed=seed, run_dir=folder, sinks=[curve])
            for step, reward in curve.rewards.items():
                rows[step].append(reward)
        cells = (f"{s // 1000}k {sum(r) / len(r):.2f}" for s, r in sorted(rows.items()))
        sys.stdout.write(f"{change or 'as configured'}: {'  '.join(cells)}\n")


if __name__ == "__main__":
    main()
