"""The `report` stage: compare all experiments over their seeds, in tables, charts and a page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

from pipeline import files
from pipeline.dag import project, sources
from pipeline.dag.attempt import Job, attempt_at
from pipeline.dag.reporting import claims, render, results
from pipeline.dag.reporting.results import against_first, as_text, setup_of
from pipeline.dag.stages.sweep import Trial, metrics_files, rank, scores_of, trials_of
from pipeline.evaluation import tables
from pipeline.evaluation.charts import Chart, charts_of
from pipeline.evaluation.comparison import Task, compare
from pipeline.evaluation.plots import plot
from pipeline.settings.project.params import Params
from pipeline.settings.project.sweeps import SweepParams, best_name

FOLDER = Path("results/report")
TABLES = ("comparison.csv", "improvement.csv", "learning.csv")
OUTPUTS = ("report.html", "report.md", "figures", *TABLES, "summary.json")
MEDIAN = "median.gif"
_CURVE_COLUMNS = ("environment", "behavior", "experiment", "seeds", "step", "iqm", "low", "high")


def report(root: Path) -> None:
    """Make the report of all experiments in params.yaml."""
    params = project.planned(root)
    job = Job(
        stage="report",
        instance="all",
        params={
            # Whole sections are included, because the report shows stages and seeds.
            "experiments": [repr(item) for item in params.experiments.items()],
            "sweeps": [repr(item) for item in params.sweeps.items()],
        },
        inputs=(*inputs(params), *map(Path, sources.claims_of(root))),
        outputs=tuple(FOLDER / name for name in OUTPUTS),
    )
    with attempt_at(job, root) as attempt:
        tasks = compare(results.outcomes(root, params))
        write_pages(tasks, attempt.out, root, params)
        files.write_json(attempt.out("summary.json"), _summary(tasks))


main = partial(project.main, __doc__, report)


def write_pages(
    tasks: Sequence[Task],
    out: Callable[[str], Path],
    root: Path,
    params: Params,
    others: Mapping[str, str] | None = None,
) -> None:
    """Write the report's pages, tables and figures to the paths that `out` gives for their names.

    `others` has a note about each experiment that params.yaml does not have; the stage gives None.
    """
    folder = out("figures")
    # The folder is made even without figures, because engines require every declared output.
    folder.mkdir()
    drawn = [charts_of(task) for task in tasks]
    films = [_films(task, tasks, root, params, folder) for task in tasks]
    figures = [
        [*_draw(task, shown, folder), *clips]
        for task, shown, clips in zip(tasks, drawn, films, strict=True)
    ]
    more = [*_claims(root, params), *(search(root, params, name) for name in params.sweeps)]
    setups = [_setups(task, params, others or {}) for task in tasks]
    parts = {
        name: (*experiment.stages, *(["video"] if experiment.filmed else []))
        for name, experiment in params.experiments.items()
        if others is None  # relative links to these parts work only in the stage's report
    }
    texts = {
        "comparison.csv": tables.csv_text(tables.standing_records(tasks), tables.STANDING_COLUMNS),
        "improvement.csv": tables.csv_text(tables.pair_records(tasks), tables.PAIR_COLUMNS),
        "learning.csv": tables.csv_text(_points(tasks, drawn), _CURVE_COLUMNS),
        "report.md": render.markdown(tasks, setups, figures, more),
        "report.html": render.html(tasks, setups, drawn, films, folder, parts, more),
    }
    for name, text in texts.items():
        files.write_whole(out(name), text)


def _claims(root: Path, params: Params) -> list[render.Section]:
    """Return the section that says whether each claim of claims.yaml holds; [] without claims."""
    found = claims.answers(root, params)
    if not found:
        return []
    note = (
        "`identical`: the result files have the bytes that claims.lock records. `reproduced`: "
        "the intervals overlap, the value is within the tolerance, or the comparison holds. "
        "If the bytes differ, `pipeline claims check` names the first cause."
    )
    return [
        render.Section(
            title="Claims",
            header=claims.HEADER,
            rows=[answer.row for answer in found],
            notes=[note],
            first_number=len(claims.HEADER),  # every column has text, so none is aligned as numbers
        )
    ]


def inputs(params: Params) -> tuple[Path, ...]:
    """Return the result files that the report reads, relative to the project."""
    # Policies are not listed, because a new policy gets a new evaluation, which is listed.
    filmed = claims.FILES | {"evaluate": (*claims.FILES["evaluate"], MEDIAN)}
    runs = [
        Path(f"results/{stage}/{name}/seed{seed}/{file}")
        for name, experiment in params.experiments.items()
        for stage in experiment.stages
        for seed in experiment.seeds
        for file in (filmed if experiment.filmed else claims.FILES).get(stage, ())
    ]
    trials = [path for name, sweep in params.sweeps.items() for path in metrics_files(name, sweep)]
    return (*runs, *trials)


def _setups(task: Task, params: Params, others: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the name and a description of each experiment.

    The description has trainer, steps, seeds, and the differences from the first experiment.
    """
    ours = [standing for standing in task.standings if standing.experiment not in others]
    names = [standing.experiment for standing in ours]
    # The settings include all defaults, so that a changed default of a trainer is also listed.
    setups = {
        name: setup_of(params.run_settings(name), task.behavior, params.experiments[name])
        for name in names
    }
    different = against_first(setups)
    return [
        (
            name,
            f"{setups[name].get('trainer_type', '').upper()} ({params.experiments[name].trainer}), "
            f"{tables.budget(standing)} steps, {tables.seeds(standing.seeds)}"
            + (f"; against {names[0]}: {different[name]}" if name in different else ""),
        )
        for name, standing in zip(names, ours, strict=True)
    ] + [
        (standing.experiment, f"{tables.seeds(standing.seeds)}. {others[standing.experiment]}")
        for standing in task.standings
        if standing.experiment in others
    ]


def _draw(task: Task, charts: Sequence[Chart], folder: Path) -> list[render.Figure]:
    stem = _file_name(f"{task.environment}-{task.behavior}")
    figures = [render.Figure(one.heading, f"{stem}-{one.file}.png", one.caption) for one in charts]
    for chart, figure in zip(charts, figures, strict=True):
        plot(folder / figure.file, chart)
    return figures


def _films(
    task: Task, tasks: Sequence[Task], root: Path, params: Params, folder: Path
) -> list[render.Figure]:
    """Copy a video of each filmed experiment to `folder`: the median episode of the median seed.

    Only the first behavior of an environment, in the order of names, has a video.
    """
    films: list[render.Figure] = []
    if task.behavior != min(
        other.behavior for other in tasks if other.environment == task.environment
    ):
        return films
    for standing in task.standings:
        experiment = params.experiments.get(standing.experiment)
        if experiment is None or not experiment.filmed:
            continue
        scored = zip(standing.scores, standing.seeds, strict=True)
        # A video of an earlier policy does not belong to the numbers of the report.
        current = [pair for pair in scored if pair[1] not in standing.outdated]
        if not current:
            continue
        _, seed = median_low(current)  # median_low returns one of the seeds, not a mean of two
        name = _file_name(f"{task.environment}-{standing.experiment}-episode.gif")
        film = root / f"results/evaluate/{standing.experiment}/seed{seed}/{MEDIAN}"
        shutil.copyfile(film, folder / name)
        source = f"{standing.experiment}, seed {seed}"
        films.append(render.Figure(f"An episode of {source}", name, render.EPISODE.format(source)))
    return films


def _file_name(text: str) -> str:
    """Return a unique file name for a text, without characters that must be escaped in links."""
    # Characters become their code points, so that `a b` and `a/b` give different files.
    return re.sub(r"[^A-Za-z0-9_.-]", lambda match: f"~{ord(match[0]):x}~", text)


def _points(tasks: Sequence[Task], charts: Sequence[Sequence[Chart]]) -> list[dict[str, Any]]:
    points = []
    for task, shown in zip(tasks, charts, strict=True):
        for one in (one for chart in shown for one in chart.series):
            unknown = [None] * len(one.steps)
            low, high = one.band or (unknown, unknown)
            same = (task.environment, task.behavior, one.name, len(one.seeds))
            points += [
                dict(zip(_CURVE_COLUMNS, (*same, *values), strict=True))
                for values in zip(one.steps.astype(int), one.middle, low, high, strict=True)
            ]
    return points


def _summary(tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the statistics of each experiment and behavior that `dvc metrics show` prints."""
    table: dict[str, Any] = {}
    for task in tasks:
        for standing in task.standings:
            table.setdefault(standing.experiment, {})[task.behavior] = {
                "seeds": len(standing.seeds),
                "mean_return": standing.mean,
                "iqm": standing.iqm,
                "iqm_low": None if standing.interval is None else standing.interval[0],
                "iqm_high": None if standing.interval is None else standing.interval[1],
                "steps_to_target": standing.steps_to_target,
                "mean_height": standing.area,
            }
    return table


def search(root: Path, params: Params, name: str) -> render.Section:
    """Return the report's section about a sweep: a table of trials, and notes on the ranking.

    Raises:
        StageError: A score is missing or ambiguous.
    """
    sweep = params.sweeps[name]
    trials = trials_of(root, name, sweep)
    ranked = rank(trials, goal=sweep.goal)
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    first = "greatest" if sweep.goal == "maximize" else "least"
    over = f", its mean over {tables.seeds(sweep.seeds)}" if len(sweep.seeds) > 1 else ""
    notes = [
        f"{len(trials)} configurations of {sweep.experiment} with {tables.seeds(sweep.seeds)}, "
        f"ranked by {sweep.metric} of the evaluation{over}, {first} first."
    ]
    n_best = sum(trial.score == ranked[0].score for trial in ranked)
    if n_best > 1:
        notes.append(
            f"{n_best} trials share the best score, so the sweep does not tell them apart; the "
            "first of them counts as the best. A harder test may tell them apart: for example "
            "fewer steps, or more seeds and episodes."
        )
    if sweep.best is not None:
        notes.append(_fresh(root, params, best_name(name), sweep, ranked[0], len(trials)))
    elif len(trials) > 1:
        notes.append(
            "The best trial was chosen by its score on these seeds, so this score is partly luck "
            "and must not be quoted: with `best.seeds`, the best trial also runs on fresh seeds."
        )
    ends = [key.rpartition(".")[2] for key in keys]
    # A column's header is the last part of its key, or the whole key if another key has the same
    # last part.
    short = [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]
    return render.Section(
        title=f"Sweep {name}",
        header=("Trial", "Rank", sweep.metric, *short),
        rows=[
            (
                trial.name,
                str(place),
                f"{trial.score:.4g}",
                *(as_text(trial.values.get(k)) for k in keys),
            )
            for place, trial in enumerate(ranked, start=1)
        ],
        notes=notes,
    )


def _fresh(
    root: Path, params: Params, best: str, sweep: SweepParams, chosen: Trial, n_trials: int
) -> str:
    """Return a sentence on the best trial's score on seeds that were not used to choose it."""
    scores = scores_of(root, best, params.experiments[best].seeds, sweep)
    fresh = Trial(name=best, values=chosen.values, scores=scores)
    listed = (
        f" ({', '.join(f'{score:.4g}' for score in scores.values())})" if len(scores) > 1 else ""
    )
    return (
        f"The best trial, {chosen.name}, scored {fresh.score:.4g} on the fresh "
        f"{tables.seeds(list(scores))}{listed}, after {chosen.score:.4g} in the sweep. The best "
        f"score of {n_trials} trials is partly luck, so quote the score on the fresh seeds, which "
        f"is in the results of the experiment {best}."
    )
