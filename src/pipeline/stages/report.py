"""The `report` stage: every experiment beside the others, over its seeds."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.stages import common, outcomes, pages, process, searches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.evaluation.comparison import Task
    from pipeline.evaluation.plots import Curves
    from pipeline.settings.params import Params

FOLDER = Path("results/report")
TABLES = ("comparison.csv", "improvement.csv", "learning.csv")
OUTPUTS = ("report.html", "report.md", "figures", *TABLES, "summary.json")
_CURVE_COLUMNS = ("environment", "behavior", "experiment", "seeds", "step", "iqm", "low", "high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """File names of a task's figures."""

    learning: str | None
    """None without learning curves."""
    returns: str
    improvements: str | None
    """None with one experiment."""


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    return process.run(lambda: report(common.checkout()))


def report(root: Path) -> None:
    """Make the report of all experiments in params.yaml."""
    from pipeline.evaluation import comparison, tables

    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    job = common.Job(
        stage="report",
        instance="all",
        params={
            "experiments": [repr(one) for one in params.experiments.items()],
            "sweeps": [repr(one) for one in params.sweeps.items()],
        },
        inputs=(*_inputs(params), *searches.inputs(params)),
        outputs=tuple(FOLDER / name for name in OUTPUTS),
    )
    with common.attempt(job, root) as attempt:
        tasks = comparison.compare(
            trial
            for name, experiment in params.experiments.items()
            for seed in experiment.seeds
            for trial in outcomes.trials_of(
                root / "results",
                name,
                seed,
                environment=experiment.environment,
                stages=experiment.stages,
            )
        )
        folder = attempt.out("figures")
        folder.mkdir()
        curves = [_curves(task) for task in tasks]
        drawn = [_draw(*one, folder) for one in zip(tasks, curves, strict=True)]
        swept = searches.searches(root, params)
        stages = {name: one.stages for name, one in params.experiments.items()}
        texts = {
            "comparison.csv": tables.csv_text(
                tables.standing_records(tasks), tables.STANDING_COLUMNS
            ),
            "improvement.csv": tables.csv_text(tables.pair_records(tasks), tables.PAIR_COLUMNS),
            "learning.csv": tables.csv_text(_points(tasks, curves), _CURVE_COLUMNS),
            "report.md": pages.markdown(tasks, drawn, swept),
            "report.html": pages.html(tasks, drawn, folder, stages, swept),
        }
        for name, text in texts.items():
            files.write_whole(attempt.out(name), text)
        files.write_json(attempt.out("summary.json"), _summary(tasks))


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


def _curves(task: Task) -> dict[str, Curves]:
    """Of each experiment that was trained, on steps that its seeds share."""
    from pipeline.evaluation.plots import align_curves

    aligned = {
        one.experiment: align_curves([(curve.steps, curve.returns) for curve in one.curves])
        for one in task.standings
        if one.curves
    }
    return {name: curves for name, curves in aligned.items() if len(curves.steps)}


def _draw(task: Task, curves: Mapping[str, Curves], folder: Path) -> Figures:
    from pipeline.evaluation import plots

    stem = _file_name(f"{task.environment}-{task.behavior}")
    drawn = Figures(
        learning=f"{stem}-learning.png" if curves else None,
        returns=f"{stem}-returns.png",
        improvements=f"{stem}-improvement.png" if task.improvements else None,
    )
    if drawn.learning:
        plots.plot_learning_curves(
            folder / drawn.learning, curves, title=task.name, target=task.target
        )
    plots.plot_standings(
        folder / drawn.returns,
        task.standings,
        title=task.name,
        x_label="Return: seeds (dots), interquartile mean and its 95 % interval (bar)",
    )
    if drawn.improvements:
        plots.plot_improvements(folder / drawn.improvements, task.improvements, title=task.name)
    return drawn


def _file_name(text: str) -> str:
    """Return a file's name that no other text has, without signs that links would need escaped."""
    return re.sub(r"[^A-Za-z0-9_.-]", lambda found: f"~{ord(found[0]):x}~", text)


def _points(tasks: Sequence[Task], curves: Sequence[Mapping[str, Curves]]) -> list[dict[str, Any]]:
    """The learning curves as records: interquartile mean over seeds, and its interval if any."""
    from pipeline.evaluation.bootstrap import interquartile_means
    from pipeline.evaluation.plots import band

    found = []
    for task, of_task in zip(tasks, curves, strict=True):
        for name, whole in of_task.items():
            one = whole.thinned()
            drawn = band(one)
            middle = interquartile_means(one.values.T)
            for point, step in enumerate(one.steps):
                found.append(
                    {
                        "environment": task.environment,
                        "behavior": task.behavior,
                        "experiment": name,
                        "seeds": len(one.values),
                        "step": int(step),
                        "iqm": float(middle[point]),
                        "low": float(drawn[1][point]) if drawn else None,
                        "high": float(drawn[2][point]) if drawn else None,
                    }
                )
    return found


def _summary(tasks: Sequence[Task]) -> dict[str, Any]:
    """Flat enough for `dvc metrics show`."""
    table: dict[str, Any] = {}
    for task in tasks:
        for one in task.standings:
            table.setdefault(one.experiment, {})[task.behavior] = {
                "seeds": len(one.seeds),
                "mean_return": one.mean,
                "iqm": one.iqm,
                "iqm_low": one.low,
                "iqm_high": one.high,
                "steps_to_target": one.steps_to_target,
                "mean_height": one.area,
            }
    return table
