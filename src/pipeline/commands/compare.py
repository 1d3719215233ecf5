"""`pipeline compare`: the report's tables for any runs, in the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.errors import SettingsError
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Task, Trial, compare
from pipeline.settings import load_run_settings, to_mapping
from pipeline.stages.outcomes import read_curves, trials_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONFIGURATION, _PROGRESS = "configuration.yaml", "progress.csv"
_STAGES = ("pretrain", "train", "export", "evaluate")


def compare_runs(runs: Sequence[Path], *, fraction: float, form: str = "text") -> str:
    """The comparison of runs of `pipeline learn` and of the DAG.

    Args:
        runs: folders of `pipeline learn`, or experiments or seeds of the DAG. Runs of `learn` whose
            configurations differ only in their seed and name are one experiment.
        fraction: in (0, 1], where the target lies.
        form: `text`, `csv` or `json`.

    Raises:
        PipelineError: A folder is not that of a run, or has nothing to compare.
    """
    if not 0.0 < fraction <= 1.0:
        raise SettingsError(f"--fraction: {fraction} is not in range; use a value in (0, 1]")
    learned = [run for run in runs if (run / _CONFIGURATION).is_file()]
    trials = [trial for run in runs if run not in learned for trial in _of_dag(run)]
    tasks = compare([*_once(trials), *_of_learn(learned)], fraction=fraction)
    if not tasks:
        names = ", ".join(map(str, runs))
        raise SettingsError(f"{names}: no episode has ended here yet; train longer")
    if form == "csv":
        columns = (*tables.STANDING_COLUMNS, "training_s")
        return tables.csv_text(tables.standing_records(tasks, wall_clock=True), columns).rstrip()
    if form == "json":
        value = {
            "experiments": tables.standing_records(tasks, wall_clock=True),
            "improvements": tables.pair_records(tasks),
        }
        return json.dumps(value, indent=2, allow_nan=False)
    return "\n\n".join(_text(task) for task in tasks)


def _of_dag(run: Path) -> list[Trial]:
    """What a seed, all seeds of an experiment, or all trials of a sweep of the DAG came to."""
    if not run.is_dir():
        raise SettingsError(f"{run}: there is no such folder; name the folder of a run")
    inside = run.resolve()
    one = _seed_of(inside)
    experiment = inside.parent if one is not None else inside
    results, name = _place_of(experiment)
    seeds = sorted(
        {
            seed
            for stage in _STAGES
            for path in (results / stage / name).glob("seed*")
            if (seed := _seed_of(path)) is not None
        }
        if name
        else ()
    )
    if one is not None:
        seeds = [one] if one in seeds else []
    trials = sorted(path for path in experiment.iterdir() if path.name.isdigit())
    if name and not seeds and trials:
        return [found for path in trials for found in _of_dag(path)]
    if not seeds:
        raise SettingsError(
            f"{run}: is not the folder of a run: it has no {_CONFIGURATION} of `pipeline learn`, "
            "and is not like results/train/<experiment> or results/train/<experiment>/seed<k>"
        )
    environment = _environment_of(results, name)
    found = [
        trial for seed in seeds for trial in trials_of(results, name, seed, environment=environment)
    ]
    if not found:
        raise SettingsError(f"{run}: has neither a learning curve nor episodes; train it first")
    return found


def _place_of(experiment: Path) -> tuple[Path, str]:
    """The folder of all results, and the experiment's name, or `<sweep>/<number>` of a trial.

    The name is empty where the folder is no experiment's.
    """
    for stage in experiment.parents[:2]:
        if stage.name in _STAGES:
            return stage.parent, experiment.relative_to(stage).as_posix()
    return experiment, ""


def _once(trials: Sequence[Trial]) -> list[Trial]:
    """A run that was named twice, by its seed and by its experiment, counts once."""
    keyed = {(*trial.task, trial.experiment, trial.seed): trial for trial in trials}
    return list(keyed.values())


def _seed_of(path: Path) -> int | None:
    number = path.name.removeprefix("seed")
    return int(number) if number != path.name and number.isdigit() else None


def _environment_of(results: Path, experiment: str) -> str:
    """As params.yaml beside the results says; empty when that does not know the experiment."""
    from pipeline.settings.params import load_params

    path = results.parent / "params.yaml"
    if not path.is_file():
        return ""
    params = load_params(path)
    sweep = params.sweeps.get(experiment.partition("/")[0])
    found = params.experiments.get(experiment if sweep is None else sweep.experiment)
    return "" if found is None else found.environment


def _of_learn(runs: Sequence[Path]) -> list[Trial]:
    """Runs of `pipeline learn`, those that differ only in the seed as one experiment."""
    groups: dict[str, list[tuple[Path, int, str]]] = {}
    for run in runs:
        key, seed, environment = _identity(run / _CONFIGURATION)
        groups.setdefault(key, []).append((run, seed, environment))
    found: list[Trial] = []
    taken: set[str] = set()
    for members in groups.values():
        _refuse_repetitions(members)
        name = _name_of([run.resolve().name for run, _, _ in members])
        name = name if name not in taken else members[0][0].resolve().name
        taken.add(name)
        for run, seed, environment in members:
            seconds = _learned_in(run)
            for behavior, curve in read_curves(run / _PROGRESS).items():
                one = Trial(experiment=name, environment=environment, behavior=behavior, seed=seed)
                found.append(replace(one, curve=curve, seconds=seconds))
    return found


def _identity(configuration: Path) -> tuple[str, int, str]:
    """What makes runs one experiment, the seed, and the environment's name."""
    settings = load_run_settings(configuration)
    content: dict[str, Any] = to_mapping(settings)
    content.pop("checkpoint_settings", None)
    environment = content.get("env_settings", {})
    for key in ("seed", "base_port"):
        environment.pop(key, None)
    path = settings.env_settings.env_path
    name = "Unity Editor" if path is None else Path(path).name
    return files.fingerprint(content), settings.env_settings.seed, name


def _refuse_repetitions(members: Sequence[tuple[Path, int, str]]) -> None:
    seen: dict[int, Path] = {}
    for run, seed, _ in members:
        if seed in seen:
            raise SettingsError(
                f"{run}: has the configuration and the seed, {seed}, of {seen[seed]}; a repetition "
                "is no further seed: leave one out"
            )
        seen[seed] = run


def _name_of(names: Sequence[str]) -> str:
    """What the names of runs have in common at their start, without a dangling `seed`."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    n = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    common = first[:n].rstrip("-_. ")
    return common.removesuffix("seed").rstrip("-_. ") or names[0]


def _learned_in(run: Path) -> float | None:
    """Wall-clock of training; None when it is not known, as while the run goes on."""
    try:
        facts = json.loads((run / "run_logs/seconds.json").read_text(encoding="utf-8"))
        return float(facts["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _text(task: Task) -> str:
    header = (*tables.HEADER, tables.WALL_CLOCK)
    lines = [task.name, "", *_aligned(header, tables.rows(task, wall_clock=True), first_number=1)]
    if task.improvements:
        lines += ["", *_aligned(tables.PAIRS_HEADER, tables.pairs(task), first_number=2)]
    return "\n".join([*lines, "", *tables.notes(task), *tables.cautions(task)])


def _aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, first_number: int
) -> list[str]:
    """Columns of the width of their widest cell; numbers at the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n >= first_number else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (header, *rows)
    ]
