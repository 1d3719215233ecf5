"""The tables of docs/evidence/mujoco.md, from the results of this folder's runs.

    python benchmarks/mujoco/page.py [--project FOLDER] [--docs FOLDER]

Each subset of params.yaml is a table. A run that has been trained in full and evaluated becomes a
row of docs/evidence/mujoco/SUBSET.csv; rows of runs without results in this folder stay as they
are, so delete the file to begin again. Tables are made from the CSV files.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # the folder of `tables`

from tables import put  # noqa: E402

from pipeline.dag.attempt import WORK, read_map  # noqa: E402
from pipeline.dag.policies import history  # noqa: E402
from pipeline.dag.reporting.results import trials_of  # noqa: E402
from pipeline.evaluation.statistics import summarize  # noqa: E402
from pipeline.files import write_whole  # noqa: E402
from pipeline.settings.project.params import Params, load_params  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Row = dict[str, str]
KEYS = ("environment", "algorithm", "seed")
COLUMNS = (*KEYS, "step", "mean_return", "std_return", "episodes", "cpu_s", "versions")
PACKAGES = ("mujoco", "mujoco-core", "gymnasium", "torch", "numpy")
HEADER = ("task", "algorithm", "steps", "mean return, 95 % interval", "each seed", "CPU minutes")


def main() -> None:
    """Write the CSV files, and the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, default=HERE, help="folder with params.yaml")
    docs = HERE.parents[1] / "docs/evidence"
    parser.add_argument("--docs", type=Path, default=docs, help="folder of mujoco.md and mujoco/")
    options = parser.parse_args()
    params = load_params(options.project / "params.yaml")
    page = options.docs / "mujoco.md"
    for subset in params.subsets:
        file = options.docs / "mujoco" / f"{subset}.csv"
        rows = {row_key(row): row for row in [*read(file), *measured(params, subset)]}
        if rows:
            write(file, (rows[key] for key in sorted(rows)))
        put(page, subset, HEADER, lines(rows.values()), n_keys=2)


def measured(params: Params, subset: str) -> Iterator[Row]:
    """Yield a row for each run of a subset that has been trained in full and evaluated."""
    root = params.path.parent
    for name, seed in params.runs_of(subset):
        one, settings = params.experiment(name), params.run_settings(name).default_settings
        place = f"{name}/seed{seed}"
        found = trials_of(
            root / "results", name, seed, environment=one.environment, stages=one.stages
        )
        for outcome in found:
            # An evaluation of an earlier policy has no value in `evaluated`.
            if outcome.evaluated is None or (outcome.steps or 0) < settings.max_steps:
                continue
            metrics = read_map(root / "results/evaluate" / place / "metrics.json")[outcome.behavior]
            facts = read_map(root / WORK / "train" / place / "stage.json")
            # A resumed training knows only the time since it was resumed.
            cpu_s = "" if facts.get("resumed", True) else f"{facts['cpu_s']:.0f}"
            versions = history(root / "results/train" / place / "policy.pt")[-1]["versions"]
            known = [
                f"{package} {versions[package]}" for package in PACKAGES if package in versions
            ]
            values = (
                *(outcome.behavior, settings.trainer_type.upper(), str(seed), str(outcome.steps)),
                *(f"{outcome.evaluated:.1f}", f"{metrics['std_return']:.1f}"),
                *(str(metrics["episodes"]), cpu_s, "; ".join(known)),
            )
            yield dict(zip(COLUMNS, values, strict=True))


def row_key(row: Row) -> tuple[str, str, int]:
    """What tells the runs of a subset from each other."""
    return row["environment"], row["algorithm"], int(row["seed"])


def read(file: Path) -> list[Row]:
    """Return the rows of a CSV file; [] if there is none."""
    return list(csv.DictReader(io.StringIO(file.read_text("utf-8")))) if file.is_file() else []


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.getvalue())


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """Yield the cells of each task and algorithm: its seeds' mean and each of them."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=row_key):
        groups.setdefault((row["environment"], row["algorithm"]), []).append(row)
    for (task, algorithm), group in groups.items():
        returns = [float(row["mean_return"]) for row in group]
        steps = sorted({int(row["step"]) for row in group})
        timed = [float(row["cpu_s"]) / 60 for row in group if row["cpu_s"]]
        of = f" ({len(timed)} of {len(group)} runs)" if len(timed) < len(group) else ""
        minutes = f"{summarize(timed).mean:.1f}{of}" if timed else "-"
        each = " / ".join(f"{value:.0f}" for value in returns)
        yield [task, algorithm, spread(steps), interval(returns), each, minutes]


def spread(steps: Sequence[int]) -> str:
    """The number of steps, or the smallest and the largest."""
    return " to ".join(f"{count:,}" for count in dict.fromkeys((steps[0], steps[-1])))


def interval(returns: Sequence[float]) -> str:
    """The mean over seeds, with its interval if there are several."""
    summary = summarize(returns)
    if summary.ci_low is None or summary.ci_high is None:
        return f"{summary.mean:.0f}"
    return f"{summary.mean:.0f} [{summary.ci_low:.0f}, {summary.ci_high:.0f}]"


if __name__ == "__main__":
    main()
