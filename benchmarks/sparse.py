"""Sparse reward: what curiosity, RND and demonstrations add to PPO in Gymnasium's MountainCar-v0.

    python benchmarks/sparse.py [--seeds 1 2 3] [--steps 150000] [--variants ppo rnd ...]
        [--results FOLDER] [--plot FILE]

Every step costs 1 until the car is on the hill, which it cannot climb straight on: an episode of
chance ends after 200 steps without it, and says nothing about where to go. The demonstrations are
20 episodes of a rule that pushes in the direction of motion. All variants have the same networks
and the same settings of PPO. Prints at each summary the mean return over seeds; -110 counts as
solved. Runs that FOLDER already holds are read, not repeated; `--plot` draws the curves.
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
from pipeline.core.specs import ActionTuple
from pipeline.dag.stages.demos import write_episodes
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.tracking import names
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.core.steps import DecisionSteps

BEHAVIOR = "MountainCar-v0"
DEMONSTRATIONS = 20
N_AGENTS = 16
NETWORK = {"hidden_units": 64, "num_layers": 2, "normalize": True}
EXTRINSIC = {"gamma": 0.99, "strength": 1.0}
SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {
        "batch_size": 256,
        "buffer_size": 2048,
        "learning_rate": 1e-3,
        "beta": 0.005,
        "lambd": 0.95,
        "num_epoch": 5,
    },
    "network_settings": NETWORK,
    "time_horizon": 64,
}


def learned(**settings: Any) -> dict[str, Any]:
    """Settings of a reward signal with a network of its own."""
    return {"gamma": 0.99, "learning_rate": 1e-3, "network_settings": NETWORK, **settings}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("PPO alone", {}),
    "curiosity": ("with curiosity", {"curiosity": learned(strength=1.0, learning_rate=1e-4)}),
    "rnd": ("with RND", {"rnd": learned(strength=1.0, learning_rate=1e-4)}),
    "gail": ("with GAIL and cloning", {"gail": learned(strength=0.1)}),
}
CLONING = {"strength": 1.0, "steps": 50_000}
Curve = dict[int, float]


class _Rewards(Sink):
    """Keeps the mean episode return of each summary."""

    def __init__(self) -> None:
        self.curve: Curve = {}

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        """Take one summary."""
        if names.REWARD in values:
            self.curve[step] = values[names.REWARD]


def main() -> None:
    """Run what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150_000)
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
            curve_file = folder / f"{name}-{seed}-{options.steps}.json"
            if not curve_file.exists():
                began = time.process_time()
                curve = train(name, demo, seed=seed, steps=options.steps, folder=folder)
                curve_file.write_text(json.dumps(curve))
                seconds = time.process_time() - began
                sys.stderr.write(f"{name} seed {seed}: {seconds:.0f} s of processor time\n")
            content = json.loads(curve_file.read_text())
            curves[name].append({int(step): reward for step, reward in content.items()})
    report(curves)
    if options.plot is not None:
        draw(curves, options.plot)


def environment(seed: int, n_agents: int) -> InProcessEnvironment:
    """Copies of the task."""
    return InProcessEnvironment(GymnasiumSimulator(id=BEHAVIOR, seed=seed, n_agents=n_agents))


def push_along(steps: DecisionSteps) -> ActionTuple:
    """Push in the direction of motion; 0 is left and 2 is right."""
    right = (steps.obs[0][:, 1:2] >= 0.0).astype(np.int32)
    return ActionTuple(np.zeros((len(steps), 0), np.float32), 2 * right)


def record(demo: Path) -> None:
    """Write the rule's episodes."""
    with environment(900, DEMONSTRATIONS) as env:
        env.reset()
        write_episodes(env, push_along, demo, episodes=DEMONSTRATIONS)


def train(name: str, demo: Path, *, seed: int, steps: int, folder: Path) -> Curve:
    """The learning curve of one variant."""
    signals = {"extrinsic": EXTRINSIC, **VARIANTS[name][1]}
    behavior: dict[str, Any] = SETTINGS | {
        "max_steps": steps,
        "summary_freq": max(steps // 20, 1),
        "reward_signals": signals,
    }
    if "gail" in signals:
        signals["gail"] = signals["gail"] | {"demo_path": str(demo)}
        behavior["behavioral_cloning"] = CLONING | {"demo_path": str(demo)}
    rewards = _Rewards()
    pipeline.train(
        environment(seed, N_AGENTS),
        {"behaviors": {BEHAVIOR: behavior}},
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
    tables = {name: over_seeds(seed_curves) for name, seed_curves in curves.items()}
    steps = sorted(set.union(*(set(steps) for steps, _ in tables.values())))
    print("step     " + "".join(f"{name:>12}" for name in tables))  # noqa: T201
    for step in steps:
        cells = [
            f"{rewards[:, variant_steps.index(step)].mean():12.2f}"
            if step in variant_steps
            else " " * 12
            for variant_steps, rewards in tables.values()
        ]
        print(f"{step:<9}" + "".join(cells))  # noqa: T201


def draw(curves: Mapping[str, list[Curve]], file: Path) -> None:
    """Draw means over seeds, and the range between the worst and the best of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 3.9), layout="constrained")
    for name, seed_curves in curves.items():
        steps, rewards = over_seeds(seed_curves)
        axes.plot(steps, rewards.mean(axis=0), label=VARIANTS[name][0])
        axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), alpha=0.15)
    n_seeds = max(len(seed_curves) for seed_curves in curves.values())
    axes.set_title(f"{BEHAVIOR}, {n_seeds} seed{'s' * (n_seeds > 1)}")
    axes.set_xlabel("agent steps")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
