"""`pipeline compare`: the report's tables for any runs, in the terminal."""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.commands.parser import Parser, aligned, option
from pipeline.errors import PipelineError, SettingsError, brief
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Outcome, Task, compare
from pipeline.settings import RunSettings, load_run_settings, to_mapping
from pipeline.settings.experiments import ExperimentParams
from pipeline.settings.params import Params, load_params
from pipeline.settings.sweeps import MOST_TRIALS, best_file
from pipeline.stages.reporting.results import (
    against_first,
    as_text,
    read_curves,
    setup_of,
    trials_of,
)
from pipeline.stages.reporting.results import outcomes as planned_outcomes
from pipeline.stages.shared.attempt import read_map

Settings = Mapping[str, tuple[RunSettings, ExperimentParams | None]]
Experiments = dict[str, dict[int, tuple[Path, str]]]
"""Runs of `pipeline learn`: folder and environment by experiment and seed."""

_CONFIGURATION, _PROGRESS = "configuration.yaml", "progress.csv"
_STAGES = ("pretrain", "train", "export", "evaluate")
_PLACE = re.compile(
    rf"(?P<results>.*/)(?:{'|'.join(_STAGES)})/"
    r"(?P<name>(?!seed\d+$)[^/]+(?:/(?!seed\d+$)[^/]+)?)(?:/seed(?P<seed>\d+))?"
)
"""A stage's folder of an experiment, or of a sweep's trial as `<sweep>/<number>`, or of a seed."""
_COLUMNS = (*tables.HEADER, tables.WALL_CLOCK)
_NARROW = set(_COLUMNS) - {tables.TOLERANCE, "Mean", "Mean height"}
_RUN_FIRST = "run them first (`pipeline run`), or name runs of `pipeline learn`: results/<run-id>"


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline compare`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="results/<run-id> of `pipeline learn`, results/train/<experiment>, or one seed of it; "
        "runs of `learn` that differ only in the seed are one experiment; default: every "
        "experiment in params.yaml, and where there is more to see",
    )
    text = "the target: of the way from lowest start to best end"
    option(parser, "--fraction X", text, default=0.9)
    forms = parser.add_mutually_exclusive_group()
    option(forms, "--csv", "print CSV")
    option(forms, "--json", "print JSON")


def run(arguments: argparse.Namespace) -> str:
    """Return the comparison of runs of `pipeline learn` and of the DAG."""
    runs: list[Path] = arguments.runs
    fraction: float = arguments.fraction
    if not 0.0 < fraction <= 1.0:
        raise SettingsError(f"--fraction: {fraction} is not in range; use a value in (0, 1]")
    if not runs and not Path("params.yaml").exists():
        raise SettingsError(
            "there is no params.yaml here; name runs, as in `pipeline compare results/*`, or go to "
            "a project, where each experiment of its params.yaml is compared"
        )
    params = None if runs else load_params(Path.cwd() / "params.yaml")
    trials, learned = _found(runs)
    planned = () if params is None else planned_outcomes(Path.cwd(), params)
    tasks = compare([*trials, *_of_learn(learned), *planned], fraction=fraction)
    if not tasks:
        names = ", ".join(map(str, runs)) or "the experiments of params.yaml"
        remedy = "train longer" if runs else _RUN_FIRST
        raise SettingsError(f"{names}: no episode has ended here yet; {remedy}")
    if arguments.csv:
        columns = (*tables.STANDING_COLUMNS, tables.WALL_CLOCK_COLUMN)
        return tables.csv_text(tables.standing_records(tasks), columns).rstrip()
    if arguments.json:
        value = {
            "experiments": tables.standing_records(tasks),
            "improvements": tables.pair_records(tasks),
        }
        # NaN is no JSON; an error here is better than a file that other programs refuse.
        return json.dumps(value, indent=2, allow_nan=False)
    if params is not None:
        return _answer(tasks, Path.cwd(), params)
    settings = _settings_of(runs, learned, tasks)
    return "\n\n".join([*(_text(task, settings) for task in tasks), *_seeds(learned)])


def answer(root: Path, runs: Collection[tuple[str, int]] | None = None) -> str:
    """Return the comparison of all experiments in params.yaml, and where to see more.

    Of `runs`, experiments and seeds, alone if they are given; empty if none has a result to show.
    """
    params = load_params(root / "params.yaml")
    if runs is None:
        return _answer(compare(planned_outcomes(root, params)), root, params)
    outcomes: list[Outcome] = []
    for name, seed in dict.fromkeys(runs):
        setup = params.experiment(name)
        environment, stages = setup.environment, setup.stages
        outcomes += trials_of(root / "results", name, seed, environment=environment, stages=stages)
    tasks = compare(outcomes)
    return _answer(tasks, root, params, {name for name, _ in runs}) if tasks else ""


def _answer(
    tasks: Sequence[Task], root: Path, params: Params, names: Collection[str] | None = None
) -> str:
    """Return tables that fit a terminal, the choices of sweeps, and where to see more."""
    report = Path("results/report/report.html")
    swept = {name.partition("/")[0] for name in names} if names else params.sweeps
    look = [
        *(("Sweep:", text) for name in swept if (text := _chosen(root, params, name))),
        # A run of some names leaves the report as it was.
        *([("Report:", str(report))] if names is None and (root / report).is_file() else []),
        ("Curves:", "pipeline ui  (MLflow on http://127.0.0.1:5000)"),
        ("Change:", "edit params.yaml and run again: only what the change touches runs"),
    ]
    settings = _of_experiments(params, tasks)
    texts = [_text(task, settings, _NARROW) for task in tasks]
    return "\n\n".join([*texts, "\n".join(aligned(look))])


def _chosen(root: Path, params: Params, name: str) -> str:
    """Return which trial is the best of a sweep, and where the others are; empty if unknown."""
    best = read_map(root / best_file(name))
    score = read_map(root / best_file(name).with_name("metrics.json"))
    if name not in params.sweeps or not best or not score:
        return ""
    metric = params.sweeps[name].metric
    values = (f"{key.rpartition('.')[2]} {as_text(best['values'][key])}" for key in best["values"])
    return (
        f"{best['trial']} is the best of {score['trials']}, with {metric} "
        f"{tables.number(score[metric])} ({', '.join(values)}); "
        f"all: {best_file(name).with_name('trials.csv')}, `pipeline compare results/train/{name}`"
    )


def _of_experiments(params: Params, tasks: Iterable[Task]) -> Settings:
    """Return the settings of the experiments that params.yaml has."""
    found = {}
    for name in {standing.experiment for task in tasks for standing in task.standings}:
        with suppress(PipelineError, KeyError):  # a run of before, or a trial not yet proposed
            found[name] = (params.run_settings(name), params.experiment(name))
    return found


def _settings_of(runs: Sequence[Path], learned: Experiments, tasks: Iterable[Task]) -> Settings:
    """Return the settings of experiments of these runs, by the name that they are compared by."""
    found: dict[str, tuple[RunSettings, ExperimentParams | None]] = {}
    of_dag = [run for run in runs if not (run / _CONFIGURATION).is_file()]
    places = (_PLACE.fullmatch(run.resolve().as_posix()) for run in of_dag)
    files_of = {Path(place["results"]).parent / "params.yaml" for place in places if place}
    for file in files_of:
        if file.is_file() and len(files_of) == 1:
            found |= _of_experiments(load_params(file), tasks)
    for name, members in learned.items():
        run, _ = next(iter(members.values()))
        found[name] = (load_run_settings(run / _CONFIGURATION), None)
    return found


def outcomes_of(runs: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes of run folders, those of `pipeline learn` last."""
    trials, learned = _found(runs)
    return [*trials, *_of_learn(learned)]


def _found(runs: Sequence[Path]) -> tuple[list[Outcome], Experiments]:
    """Return the outcomes of the DAG's folders, and the runs of `learn` by experiment."""
    # A run folder of `learn` has a configuration; the DAG's folders are known by their path.
    learned = [run for run in runs if (run / _CONFIGURATION).is_file()]
    trials = _apart([(run, _of_dag(run)) for run in runs if run not in learned])
    # A run may be named twice, by its seed and by its experiment.
    unique = {(*trial.task, trial.experiment, trial.seed): trial for trial in trials}
    return [*unique.values()], _experiments(learned, {trial.experiment for trial in trials})


def _apart(runs: Sequence[tuple[Path, Sequence[Outcome]]]) -> list[Outcome]:
    """Return the DAG's outcomes, with the path in the names of another project's experiments."""
    results: dict[str, Path] = {}
    outcomes: list[Outcome] = []
    for run, trials in runs:
        folder = Path(_PLACE.sub(r"\g<results>", run.resolve().as_posix()))
        for trial in trials:
            name = trial.experiment
            if results.setdefault(name, folder) != folder:
                name = str(folder / name)
            outcomes.append(replace(trial, experiment=name))
    return outcomes


def _of_dag(run: Path) -> list[Outcome]:
    """Return the outcomes of one seed, of an experiment's seeds, or of a sweep's trials."""
    if not run.is_dir():
        raise SettingsError(f"{run}: there is no such folder; name the folder of a run")
    # Resolved, because the path `.` or a link does not show the stage and the seed.
    inside = run.resolve()
    place = _PLACE.fullmatch(inside.as_posix())
    results, name, only_seed = place.group("results", "name", "seed") if place else ("", "", None)
    seeds = sorted(
        {
            int(path.name.removeprefix("seed"))
            # In the folders of all stages, because an experiment need not have every one.
            for stage in _STAGES
            for path in Path(results, stage, name).glob("seed*")
            if name and path.name.removeprefix("seed").isdecimal()
        }
    )
    if only_seed is not None:
        seeds = [int(only_seed)]
    trials = _ranked(
        [path for path in inside.iterdir() if path.name.isdigit()],
        Path(results) / best_file(name).relative_to("results").with_name("trials.csv"),
    )
    if name and not seeds and trials:
        return [outcomes for path in trials for outcomes in _of_dag(path)]
    if not seeds:
        raise SettingsError(
            f"{run}: is not the folder of a run: it has no {_CONFIGURATION} of `pipeline learn`, "
            "and is not like results/train/<experiment> or results/train/<experiment>/seed<k>"
        )
    environment = _environment_of(Path(results), name)
    outcomes = [
        trial
        for seed in seeds
        for trial in trials_of(Path(results), name, seed, environment=environment)
    ]
    if not outcomes:
        raise SettingsError(f"{run}: has neither a learning curve nor episodes; train it first")
    return outcomes


def _ranked(trials: Iterable[Path], table: Path) -> list[Path]:
    """Return the folders of a sweep's trials, best first if they have been ranked."""
    ranks: dict[str, int] = {}
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            ranks = {f"{int(row['trial']):03}": int(row["rank"]) for row in csv.DictReader(file)}
    return sorted(trials, key=lambda path: (ranks.get(path.name, MOST_TRIALS + 1), path.name))


def _environment_of(results: Path, experiment: str) -> str:
    """Return the environment that params.yaml gives an experiment; empty if it gives none."""
    path = results.parent / "params.yaml"
    if not path.is_file():
        return ""
    params = load_params(path)
    sweep = params.sweeps.get(experiment.partition("/")[0])
    setup = params.experiments.get(experiment if sweep is None else sweep.experiment)
    return "" if setup is None else setup.environment


def _of_learn(experiments: Experiments) -> list[Outcome]:
    """Return the outcomes of runs of `pipeline learn`."""
    outcomes: list[Outcome] = []
    for name, members in experiments.items():
        for seed, (run, environment) in members.items():
            seconds = read_map(run / "run_logs/seconds.json").get("total")  # None while it goes on
            status = read_map(run / "run_logs/training_status.json")
            outcomes += [
                Outcome(
                    experiment=name,
                    environment=environment,
                    behavior=behavior,
                    seed=seed,
                    curve=curve,
                    steps=_last_checkpoint(status, behavior),
                    seconds=seconds,
                )
                for behavior, curve in read_curves(run / _PROGRESS).items()
            ]
    return outcomes


def _last_checkpoint(status: dict[str, Any], behavior: str) -> int | None:
    """Return the steps of a behavior's last checkpoint; None if a run's status does not say it."""
    with suppress(KeyError, TypeError, ValueError):
        return int(status[behavior]["final_checkpoint"]["steps"])
    return None


def _experiments(runs: Sequence[Path], used_names: Collection[str]) -> Experiments:
    """Group runs that differ only in the seed: run and environment by seed, by experiment.

    Only the settings decide which runs belong together. A name is a mere label: one in
    `used_names` is replaced by the path of a run, which no other experiment has.
    """
    groups: dict[str, dict[int, tuple[Path, str]]] = {}
    for run in runs:
        key, seed, environment = _identity(run / _CONFIGURATION)
        members = groups.setdefault(key, {})
        if seed in members:
            raise SettingsError(
                f"{run}: has the configuration and the seed, {seed}, of {members[seed][0]}; a "
                "repetition is no further seed: leave one out"
            )
        members[seed] = (run, environment)
    experiments: Experiments = {}
    for members in groups.values():
        paths = [run.resolve() for run, _ in members.values()]
        names = (_name_of([path.name for path in paths]), paths[0].name, str(paths[0]))
        unused = (name for name in names if name not in experiments and name not in used_names)
        experiments[next(unused)] = members
    return experiments


def _identity(configuration: Path) -> tuple[str, int, str]:
    """Return a digest equal for runs of one experiment, the seed, and the environment's name."""
    settings = load_run_settings(configuration)
    content: dict[str, Any] = to_mapping(settings)
    # Without the run's name and folder; but initial weights and inference change the results.
    checkpoints = content.pop("checkpoint_settings", {})
    content["begins"] = {key: checkpoints.get(key) for key in ("initialize_from", "inference")}
    environment = content.get("env_settings", {})
    # What differs between the seeds of one experiment must not be a part of its identity.
    for key in ("seed", "base_port"):
        environment.pop(key, None)
    path = settings.env_settings.env_path
    is_id = path is not None and path.startswith(("gymnasium:", "pettingzoo:"))  # with any slashes
    name = "Unity Editor" if path is None else path if is_id else Path(path).name
    return files.fingerprint(content), settings.env_settings.seed, name


def _seeds(learned: Experiments) -> Iterator[str]:
    """Yield a list of the runs of `pipeline learn` that count as seeds of one experiment."""
    groups = [members for members in learned.values() if len(members) > 1]
    lines = [", ".join(str(run) for run, _ in members.values()) for members in groups]
    if lines:
        yield "\n".join(["One experiment each, since only their seeds differ:", *lines])


def _name_of(names: Sequence[str]) -> str:
    """Return the common start of the names of runs, without a dangling `seed`."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    # All names share the start that the least and the greatest name share.
    n = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    common = first[:n].rstrip("-_. ")
    return common.removesuffix("seed").rstrip("-_. ") or names[0]


def _text(task: Task, settings: Settings, columns: Collection[str] = _COLUMNS) -> str:
    rows = [_COLUMNS, *tables.rows(task, wall_clock=True)]
    indices = [k for k, name in enumerate(_COLUMNS) if name in columns]
    lines = [
        brief(task.name),
        tables.conclusion(task),
        "",
        *aligned([[row[k] for k in indices] for row in rows], first_number=1),
    ]
    names = [standing.experiment for standing in task.standings]
    if names[0] in settings:
        setups = {
            name: setup_of(settings[name][0], task.behavior, settings[name][1])
            for name in names
            if name in settings
        }
        different = against_first(setups).items()
        lines += ["", *(f"{name}, against {names[0]}: {text}" for name, text in different)]
    if any(len(standing.seeds) > 1 for standing in task.standings) and task.improvements:
        lines += ["", *aligned([tables.PAIRS_HEADER, *tables.pairs(task)], first_number=2)]
    return "\n".join([*lines, "", *tables.notes(task), *tables.cautions(task)])
