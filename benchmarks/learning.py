"""Learning curves of ours and of `mlagents-learn` on one executable with one configuration.

    python benchmarks/learning.py [--seeds 1 2 3] [--steps 300000] [--simulator balance_ball]
        [--config config/ppo/3DBall.yaml] [--results FOLDER]

Prints, at each summary, the mean over seeds of both with their 95 % intervals, and says whether the
intervals overlap. Runs that FOLDER already holds are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from peer import ROOT, Curve, configuration, executable, train

from pipeline.evaluation.statistics import t_quantile


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--simulator", default="balance_ball")
    parser.add_argument("--config", type=Path, default=ROOT / "config/ppo/3DBall.yaml")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--programs", nargs="+", default=["ours", "peer"])
    options = parser.parse_args()
    folder = options.results or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    env = executable(options.simulator)
    config = configuration(options.config, folder, max_steps=options.steps)
    curves: dict[str, list[Curve]] = {program: [] for program in options.programs}
    for seed in options.seeds:
        for program in options.programs:
            kept = folder / f"{program}-{seed}.json"
            if not kept.exists():
                curve = train(program, config, env, seed=seed, folder=folder)
                kept.write_text(json.dumps(asdict(curve)))
            curves[program].append(Curve(**json.loads(kept.read_text())))
            last = curves[program][-1].rewards[-1]
            sys.stderr.write(f"{program} seed {seed}: last mean reward {last}\n")
    report(curves)


def report(curves: dict[str, list[Curve]]) -> None:
    """Print the table."""
    table = {program: interval(found) for program, found in curves.items()}
    steps = sorted(set.intersection(*(set(rows) for rows in table.values())))
    print("step       " + "".join(f"{program:>28}" for program in table))  # noqa: T201
    overlaps = 0
    for step in steps:
        cells = [table[program][step] for program in table]
        text = "".join(f"{mean:>12.2f} [{low:6.2f}, {high:6.2f}]" for mean, low, high in cells)
        overlap = max(cell[1] for cell in cells) <= min(cell[2] for cell in cells)
        overlaps += overlap
        print(f"{step:>9}  {text}  {'overlap' if overlap else 'apart'}")  # noqa: T201
    print(f"intervals overlap at {overlaps} of {len(steps)} summaries")  # noqa: T201


def interval(curves: list[Curve]) -> dict[int, tuple[float, float, float]]:
    """Mean over seeds and its 95 % interval, at the steps that every run has a reward for."""
    by_step = [dict(zip(curve.steps, curve.rewards, strict=True)) for curve in curves]
    result = {}
    for step in sorted(set.intersection(*(set(one) for one in by_step))):
        values = np.array([one[step] for one in by_step], dtype=np.float64)
        if np.isnan(values).any():
            continue
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
        half = float(t_quantile(0.975, len(values) - 1) * error) if error else 0.0
        mean = float(values.mean())
        result[step] = (mean, mean - half, mean + half)
    return result


if __name__ == "__main__":
    main()
