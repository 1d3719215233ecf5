"""Sparse reward: what curiosity, RND and demonstrations add to PPO in the simulator `pyramids`.

    python benchmarks/sparse.py [--seeds 1 2 3] [--steps 200000] [--variants ppo rnd ...]
        [--results FOLDER] [--plot FILE]

Trains the published configurations of Pyramids with narrower networks, and prints at each summary
the mean episode return over seeds: -1 for an episode that finds nothing, the expert's about 1.8.
Runs that FOLDER already holds are read, not repeated; `--plot` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.settings import read_yaml
from pipeline.settings.nodes import to_plain
from pipeline.simulators import registry
from pipeline.stages.demos import write_episodes
from pipeline.tracking import names

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
SIMULATOR, BEHAVIOR = "pyramids", "Pyramids"
DEMONSTRATIONS = 20
HIDDEN_UNITS = 128
N_AGENTS = 32
VARIANTS = {
    "ppo": ("PPO alone", "config/ppo/Pyramids.yaml", ["extrinsic"]),
    "curiosity": ("with curiosity", "config/ppo/Pyramids.yaml", ["extrinsic", "curiosity"]),
    "rnd": ("with RND", "config/ppo/PyramidsRND.yaml", ["extrinsic", "rnd"]),
    "gail": ("with GAIL and cloning", "config/imitation/Pyramids.yaml", ["extrinsic", "gail"]),
}
Curve = dict[int, float]


class _Rewards:
    """Keeps the mean episode return of each summary."""

    def __init__(self) -> None:
        self.curve: Curve = {}

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        """Take one summary."""
        if names.REWARD in values:
            self.curve[step] = values[names.REWARD]

    def close(self) -> None:
        """Nothing to let go of."""


def main() -> None:
    """Run what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args()
    folder = options.results or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    demo = folder / "expert.demo"
    if not demo.exists():
        record(demo)
    curves: dict[str, list[Curve]] = {name: [] for name in options.variants}
    for seed in options.seeds:
        for name in options.variants:
            kept = folder / f"{name}-{seed}-{options.steps}.json"
            if not kept.exists():
                began = time.process_time()
                curve = train(name, demo, seed=seed, steps=options.steps, folder=folder)
                kept.write_text(json.dumps(curve))
                seconds = time.process_time() - began
                sys.stderr.write(f"{name} seed {seed}: {seconds:.0f} s of processor time\n")
            found = json.loads(kept.read_text())
            curves[name].append({int(step): reward for step, reward in found.items()})
    report(curves)
    if options.plot is not None:
        draw(curves, options.plot)


def record(demo: Path) -> None:
    """Write the expert's episodes."""
    simulator = registry.make(SIMULATOR, seed=900, n_agents=DEMONSTRATIONS)
    with InProcessEnvironment(simulator) as environment:
        environment.reset()
        write_episodes(environment, registry.expert(SIMULATOR), demo, episodes=DEMONSTRATIONS)


def train(name: str, demo: Path, *, seed: int, steps: int, folder: Path) -> Curve:
    """The learning curve of one variant."""
    _, file, signals = VARIANTS[name]
    plain: Any = to_plain(read_yaml(ROOT / file))
    behavior = plain["behaviors"][BEHAVIOR]
    behavior |= {"max_steps": steps, "summary_freq": max(steps // 20, 1)}
    behavior["network_settings"]["hidden_units"] = HIDDEN_UNITS
    behavior["reward_signals"] = {one: behavior["reward_signals"][one] for one in signals}
    for one in (behavior["reward_signals"].get("gail"), behavior.get("behavioral_cloning")):
        if one is not None:
            one["demo_path"] = str(demo)
    simulator = registry.make(SIMULATOR, seed=seed, n_agents=N_AGENTS)
    rewards = _Rewards()
    pipeline.train(
        InProcessEnvironment(simulator),
        plain,
        seed=seed,
        run_dir=folder / f"{name}-{seed}",
        sinks=[rewards],
    )
    return rewards.curve


def over_seeds(curves: list[Curve]) -> tuple[list[int], np.ndarray]:
    """Steps that all seeds have, and the rewards there [seeds, steps]."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, np.array([[curve[step] for step in steps] for curve in curves])


def report(curves: Mapping[str, list[Curve]]) -> None:
    """Print the table."""
    tables = {name: over_seeds(found) for name, found in curves.items()}
    steps = sorted(set.union(*(set(steps) for steps, _ in tables.values())))
    print("step     " + "".join(f"{name:>12}" for name in tables))  # noqa: T201
    for step in steps:
        cells = [
            f"{rewards[:, found.index(step)].mean():12.2f}" if step in found else " " * 12
            for found, rewards in tables.values()
        ]
        print(f"{step:<9}" + "".join(cells))  # noqa: T201


def draw(curves: Mapping[str, list[Curve]], file: Path) -> None:
    """Draw means over seeds, and the range between the worst and the best of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 3.9), layout="constrained")
    for name, found in curves.items():
        steps, rewards = over_seeds(found)
        axes.plot(steps, rewards.mean(axis=0), label=VARIANTS[name][0])
        axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), alpha=0.15)
    n_seeds = max(len(found) for found in curves.values())
    axes.set_title(f"{SIMULATOR}, {n_seeds} seed{'s' * (n_seeds > 1)}")
    axes.set_xlabel("agent steps")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
