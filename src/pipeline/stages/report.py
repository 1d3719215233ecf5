"""The `report` stage: every experiment beside the others, over its seeds."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.stages import common, pages, process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.evaluation.plots import Curves
    from pipeline.evaluation.statistics import SeedSummary
    from pipeline.settings.params import ExperimentParams, Params

FOLDER = Path("results/report")
OUTPUTS = ("report.html", "report.md", "curves", "summary.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one experiment came to."""

    name: str
    environment: str
    trainer: str
    summaries: Mapping[str, SeedSummary]
    """By behavior; empty when the experiment is not evaluated."""
    curves: Mapping[str, Curves]
    """By behavior; empty when it is not trained."""

    @property
    def figure(self) -> str:
        """File name of its learning curves."""
        return f"{self.name}.png"


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    return process.run(lambda: report(common.checkout()))


def report(root: Path) -> None:
    """Make the report of all experiments in params.yaml."""
    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    job = common.Job(
        stage="report",
        instance="all",
        params={"experiments": [repr(one) for one in params.experiments.items()]},
        inputs=_inputs(params),
        outputs=tuple(FOLDER / name for name in OUTPUTS),
    )
    with common.attempt(job, root) as attempt:
        outcomes = [_outcome(root, name, one) for name, one in params.experiments.items()]
        figures = attempt.out("curves")
        figures.mkdir()
        for outcome in outcomes:
            _draw(outcome, figures)
        files.write_json(attempt.out("summary.json"), _summary(outcomes))
        files.write_whole(attempt.out("report.md"), pages.markdown(outcomes))
        files.write_whole(attempt.out("report.html"), pages.html(outcomes, figures))


def _inputs(params: Params) -> tuple[Path, ...]:
    wanted = {"train": ("metrics.json", "progress.csv"), "evaluate": ("metrics.json",)}
    wanted["evaluate"] += ("episodes.csv",)
    return tuple(
        Path(f"results/{stage}/{name}/seed{seed}/{file}")
        for name, experiment in params.experiments.items()
        for stage in experiment.stages
        for seed in experiment.seeds
        for file in wanted.get(stage, ())
    )


def _outcome(root: Path, name: str, experiment: ExperimentParams) -> Outcome:
    return Outcome(
        name=name,
        environment=experiment.environment,
        trainer=experiment.trainer,
        summaries=_summaries(root, name, experiment) if "evaluate" in experiment.stages else {},
        curves=_curves(root, name, experiment) if "train" in experiment.stages else {},
    )


def _summaries(root: Path, name: str, experiment: ExperimentParams) -> dict[str, SeedSummary]:
    from pipeline.evaluation.episodes import read_episodes
    from pipeline.evaluation.statistics import across_seeds

    returns: dict[str, dict[int, list[float]]] = {}
    for seed in experiment.seeds:
        for episode in read_episodes(root / f"results/evaluate/{name}/seed{seed}/episodes.csv"):
            behavior = episode.behavior.split("?", maxsplit=1)[0]
            of_behavior = returns.setdefault(behavior, {})
            of_behavior.setdefault(seed, []).append(episode.episode_return)
    return {behavior: across_seeds(by_seed) for behavior, by_seed in sorted(returns.items())}


def _curves(root: Path, name: str, experiment: ExperimentParams) -> dict[str, Curves]:
    from pipeline.evaluation.plots import align_curves

    found: dict[str, list[tuple[list[float], list[float]]]] = {}
    for seed in experiment.seeds:
        path = root / f"results/train/{name}/seed{seed}/progress.csv"
        for behavior, curve in _progress(path).items():
            found.setdefault(behavior, []).append(curve)
    return {behavior: align_curves(curves) for behavior, curves in sorted(found.items())}


def _progress(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and mean rewards of each behavior in a progress.csv, where an episode had ended."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["reward"]:
                steps, rewards = curves.setdefault(row["behavior"], ([], []))
                steps.append(float(row["step"]))
                rewards.append(float(row["reward"]))
    return curves


def _draw(outcome: Outcome, folder: Path) -> None:
    from pipeline.evaluation.plots import plot_learning_curves

    shown = {behavior: c for behavior, c in outcome.curves.items() if len(c.steps)}
    plot_learning_curves(folder / outcome.figure, shown, title=outcome.name)


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Flat enough for `dvc metrics show`."""
    table: dict[str, Any] = {}
    for outcome in outcomes:
        for behavior, summary in outcome.summaries.items():
            table.setdefault(outcome.name, {})[behavior] = {
                "seeds": len(summary.seeds),
                "mean_return": summary.over_seeds.mean,
                "ci_low": summary.over_seeds.ci_low,
                "ci_high": summary.over_seeds.ci_high,
                "iqm": summary.iqm,
                "iqm_low": summary.iqm_low,
                "iqm_high": summary.iqm_high,
            }
    return table
