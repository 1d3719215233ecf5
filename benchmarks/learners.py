"""Two learners, each with half of the environments, against one learner with all of them.

    python benchmarks/learners.py [--seeds 1 2 3] [--steps 60000] [--envs 2] [--results FOLDER]
        [--write]

Both train PPO on eight copies of Gymnasium's CartPole-v1 in each environment, with equal settings,
so equal in total steps, buffer and minibatches: one as `pipeline learn`, the other as
`torchrun --nproc-per-node 2` of the same command. Prints, at each tenth of training, the mean
return of the episodes that ended in it, over seeds; and how far the two are apart. Runs that FOLDER
already holds are read, not repeated; `--write` makes table and figure of
docs/evidence/learners.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from runs import interval, say
from tables import put

from pipeline.evaluation.statistics import summarize
from pipeline.files import write_whole
from pipeline.simulators.pack import pack
from pipeline.trainer.checkpoints.file import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/evidence/learners.md"
FIGURE = ROOT / "docs" / "images" / "learners.png"
BEHAVIOR = "CartPole-v1"
COPIES = 8
SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {
        "batch_size": 128,
        "buffer_size": 1024,
        "num_epoch": 4,
        "learning_rate": 1e-3,
        "beta": 0.001,
    },
    "network_settings": {"hidden_units": 64, "num_layers": 2, "normalize": True},
    "time_horizon": 64,
}
N_PARTS = 10
HEADER = ["agent steps", "1 learner", "2 learners", "difference"]
LIMIT_S = 3600
Curve = list[float]
"""Mean return of the episodes that ended in each part of training."""


def main() -> None:
    """Run what is missing, then print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--envs", type=int, default=2, help="in all; an even number")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = (options.results or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = settings(folder, options.steps)
    curves: dict[int, list[Curve]] = {1: [], 2: []}
    updates: dict[int, list[float]] = {1: [], 2: []}
    for seed in options.seeds:
        for n_learners, learner_curves in curves.items():
            progress = trained(folder, config, n_learners, seed=seed, n_envs=options.envs)
            learner_curves.append(parts(progress, options.steps))
            updates[n_learners].append(n_updates(folder / "runs" / progress.stem))
    rows = compared(curves[1], curves[2], options.steps)
    rows.append(["updates", *_cells(np.array(updates[1]), np.array(updates[2]))])
    for row in [HEADER, *rows]:
        say("  ".join(f"{cell:>22}" for cell in row))
    if options.write:
        put(PAGE, "learners", HEADER, rows)
        draw(curves, options.steps, FIGURE)


def settings(folder: Path, steps: int) -> Path:
    """The trainer configuration, with twenty summaries."""
    behavior = SETTINGS | {"max_steps": steps, "summary_freq": steps // 20}
    config = folder / f"trainer-{steps}.yaml"
    write_whole(config, yaml.safe_dump({"behaviors": {BEHAVIOR: behavior}}, sort_keys=False))
    return config


def trained(folder: Path, config: Path, n_learners: int, *, seed: int, n_envs: int) -> Path:
    """Return the learning curve's file of a run, which is trained if there is none."""
    run = f"{config.stem}-{n_learners}x{n_envs // n_learners}-{seed}"
    curve_file = folder / f"{run}.csv"
    if curve_file.exists():
        return curve_file
    build = folder / "cartpole"
    if not build.exists():
        pack("gymnasium", build, id=BEHAVIOR, n_agents=COPIES)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n_learners), "-m"]
    command = ["pipeline.cli.main", "learn", str(config), "--env", str(build), "--seed", str(seed)]
    command += ["--num-envs", str(n_envs // n_learners), "--torch-device", "cpu"]
    command += ["--results-dir", str(folder / "runs"), "--run-id", run, "--force"]
    began = time.monotonic()
    with (folder / f"{run}.log").open("wb") as log:
        subprocess.run(  # noqa: S603  # our own command
            [sys.executable, "-m", *(launcher if n_learners > 1 else []), *command],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            timeout=LIMIT_S,
            check=True,
        )
    sys.stderr.write(f"{run}: {time.monotonic() - began:.0f} s\n")
    write_whole(curve_file, (folder / "runs" / run / "progress.csv").read_text(encoding="utf-8"))
    return curve_file


def n_updates(run: Path) -> int:
    """Updates that a run has made."""
    return int(load_checkpoint(run / BEHAVIOR / "checkpoint.pt")["learner"]["n_updates"])


def parts(progress: Path, steps: int) -> Curve:
    """Mean reward of the summaries in each part of training; NaN in a part without episodes."""
    rewards: list[list[float]] = [[] for _ in range(N_PARTS)]
    with progress.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            part = min((int(row["step"]) - 1) * N_PARTS // steps, N_PARTS - 1)
            if row["reward"]:
                rewards[part].append(float(row["reward"]))
    return [float(np.mean(values)) if values else float("nan") for values in rewards]


def compared(ours: list[Curve], theirs: list[Curve], steps: int) -> list[list[str]]:
    """A row for each part of training, with 95 % intervals over seeds, and one for all."""
    first, second = np.array(ours), np.array(theirs)
    rows = []
    for part in range(N_PARTS):
        upto = steps * (part + 1) // N_PARTS
        rows.append([f"{upto:,}", *_cells(first[:, part], second[:, part])])
    return [*rows, ["all", *_cells(np.nanmean(first, axis=1), np.nanmean(second, axis=1))]]


def _cells(first: np.ndarray, second: np.ndarray) -> list[str]:
    """Return the intervals of both over seeds, and by how much the second exceeds the first."""
    first, second = first[np.isfinite(first)], second[np.isfinite(second)]
    summaries = [summarize(values) if len(values) else None for values in (first, second)]
    apart = "" if None in summaries else f"{second.mean() - first.mean():+.2f}"
    return [*(interval(summary) for summary in summaries), apart]


def draw(curves: dict[int, list[Curve]], steps: int, file: Path) -> None:
    """Draw every run, and the means over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 3.9), layout="constrained")
    at = steps * (np.arange(N_PARTS) + 0.5) / N_PARTS
    for n_learners, learner_curves in curves.items():
        runs = np.array(learner_curves)
        colour = f"C{n_learners - 1}"
        for run in runs:
            axes.plot(at, run, color=colour, alpha=0.3, linewidth=1.0)
        label = f"{n_learners} learner{'s' * (n_learners > 1)}"
        axes.plot(at, np.nanmean(runs, axis=0), color=colour, linewidth=2.2, label=label)
    axes.set_title(f"{BEHAVIOR}, PPO, {len(curves[1])} seeds, as many environments in all")
    axes.set_xlabel("agent steps of all learners")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
