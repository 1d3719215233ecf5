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
from pipeline.cli.parser import Parser, aligned, option
from pipeline.dag.attempt import read_map
from pipeline.dag.reporting.results import (
    against_first,
    as_text,
    read_curves,
    read_published,
    setup_of,
    trials_of,
)
from pipeline.dag.reporting.results import outcomes as planned_outcomes
from pipeline.errors import PipelineError, SettingsError, brief
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Outcome, Task, compare
from pipeline.settings import RunSettings, load_run_settings, to_mapping
from pipeline.settings.project.experiments import ExperimentParams
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.sweeps import MOST_TRIALS, best_file

Settings = Mapping[str, tuple[RunSettings, ExperimentParams | None]]
Experiments = dict[str, dict[int, tuple[Path, str]]]
"""Runs of `pipeline learn`: for each experiment and seed the run's folder and environment."""

_CONFIGURATION, _PROGRESS = "configuration.yaml", "progress.csv"
_STAGES = ("pretrain", "train", "export", "evaluate")
# The lookaheads keep a folder `seed<k>` from being taken for an experiment's name.
_PLACE = re.compile(
    rf"(?P<results>.*/)(?:{'|'.join(_STAGES)})/"
    r"(?P<name>(?!seed\d+$)[^/]+(?:/(?!seed\d+$)[^/]+)?)(?:/seed(?P<seed>\d+))?"
)
"""Pattern of a folder of results: the folder of an experiment, of a sweep's trial
(`<sweep>/<number>`), or of one seed of an experiment or trial."""
_COLUMNS = (*tables.HEADER, tables.WALL_CLOCK)
_NARROW = set(_COLUMNS) - {tables.TOLERANCE, "Mean", "Mean height"}
_RUN_FIRST = "run them first (`pipeline run`), or give runs of `pipeline learn`: results/<run-id>"


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline compare`."""
    text = (
        "results/<run-id> of `pipeline learn`, results/train/<experiment>, or one of its seeds; "
        "runs of `learn` that differ only in the seed are one experiment; default: every "
        "experiment in params.yaml, and the best trials of sweeps"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=text)
    text = (
        "target return, as a fraction of the way from the lowest first return to the best last "
        "return of the compared experiments"
    )
    option(parser, "--fraction X", text, default=0.9)
    text = (
        "also compare other people's results of each seed: a CSV file with the columns "
        "environment, seed, step and value (docs/how-to/paper.md); may be repeated"
    )
    # The option may be repeated, because a paper may compare with the results of several papers.
    option(parser, "--with FILE", text, dest="published", action="append", default=[])
    option(parser, "--note TEXT", "how the values of --with were measured, if the file has no note")
    text = "also write the report of this comparison, with its curves, into a new folder"
    option(parser, "-o --output FOLDER", text)
    forms = parser.add_mutually_exclusive_group()
    option(forms, "--csv", "print CSV")
    option(forms, "--json", "print JSON")


def run(arguments: argparse.Namespace) -> str:
    """Return a text that compares runs of `pipeline learn` and of the DAG."""
    runs: list[Path] = arguments.runs
    fraction: float = arguments.fraction
    if not 0.0 < fraction <= 1.0:
        raise SettingsError(f"--fraction: {fraction} is not in range; use a value in (0, 1]")
    if not runs and not Path("params.yaml").exists():
        raise SettingsError(
            "there is no params.yaml here; give runs, as in `pipeline compare results/*`, or "
            "change to the folder of a project to compare the experiments of its params.yaml"
        )
    params = None if runs else load_params(Path.cwd() / "params.yaml")
    if arguments.output is not None and params is None:
        raise SettingsError("--output writes the report of params.yaml's experiments; give no RUN")
    trials, learned = _found(runs)
    # Without RUN arguments the experiments of params.yaml are compared.
    planned = () if params is None else planned_outcomes(Path.cwd(), params)
    own = [*trials, *_of_learn(learned), *planned]
    if not own:
        names = ", ".join(map(str, runs)) or "the experiments of params.yaml"
        remedy = "train longer" if runs else _RUN_FIRST
        raise SettingsError(f"{names}: no episode has ended yet; {remedy}")
    others, notes = _published(arguments.published, arguments.note, own, params)
    tasks = compare([*own, *others], fraction=fraction)
    told = ["\n".join(f"{name}: {text}" for name, text in notes.items())] if notes else []
    if params is not None and arguments.output is not None:
        from pipeline.dag.stages.report import write_pages

        with files.whole_folder(arguments.output) as folder:
            write_pages(tasks, folder.joinpath, Path.cwd(), params, notes)
        told.append(f"Wrote {arguments.output / 'report.html'}.")
    if arguments.csv or arguments.json:
        return _machine_readable(tasks, notes, as_csv=arguments.csv)
    if params is not None:
        return "\n\n".join([_answer(tasks, Path.cwd(), params), *told])
    settings = _settings_of(runs, learned, tasks)
    return "\n\n".join([*(_text(task, settings) for task in tasks), *told, *_seeds(learned)])


def _machine_readable(tasks: Sequence[Task], notes: Mapping[str, str], *, as_csv: bool) -> str:
    if as_csv:
        # A CSV file has only one table; --json also gives the improvements of pairs.
        columns = (*tables.STANDING_COLUMNS, tables.WALL_CLOCK_COLUMN)
        return tables.csv_text(tables.standing_records(tasks), columns).rstrip()
    value: dict[str, Any] = {
        "experiments": tables.standing_records(tasks),
        "improvements": tables.pair_records(tasks),
    }
    if notes:
        value["notes"] = notes
    # JSON has no NaN (RFC 8259, section 6): an error here is better than output that other
    # programs cannot read.
    return json.dumps(value, indent=2, allow_nan=False)


def _published(
    paths: Sequence[str], note: str | None, own: Sequence[Outcome], params: Params | None
) -> tuple[list[Outcome], dict[str, str]]:
    """Return other people's results from the files of `--with`, and the note of each file.

    Only results on the tasks of `own` are read.
    """
    if note is not None and not paths:
        raise SettingsError("--note belongs to --with FILE, which is not given")
    tasks: dict[str, set[tuple[str, str]]] = {}
    for environment, behavior in {outcome.task for outcome in own}:
        source = None if params is None else params.environments.get(environment)
        named = getattr(source, "id", "") or environment  # an id such as gymnasium:Hopper-v5
        for name in {environment, behavior, named, named.partition(":")[2]} - {""}:
            tasks.setdefault(name, set()).add((environment, behavior))
    outcomes, notes = list[Outcome](), dict[str, str]()
    for path in map(Path, paths):
        if path.stem in {outcome.experiment for outcome in (*own, *outcomes)}:
            raise SettingsError(
                f"{path}: its results would have the name of the experiment {path.stem}; rename "
                "the file"
            )
        found, notes[path.stem] = read_published(path, tasks, note)
        outcomes += found
    return outcomes, notes


def answer(root: Path, runs: Collection[tuple[str, int]] | None = None) -> str:
    """Return a text that compares the experiments of params.yaml, and says where to see more.

    If `runs` (pairs of experiment and seed) are given, only these are compared. The text is empty
    if no run has a result.
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
    """Return tables that fit into a terminal, and lines that say where to see more.

    A line for each sweep that has been ranked names its best trial.
    """
    report = Path("results/report/report.html")
    # A trial's name begins with its sweep's name.
    swept = {name.partition("/")[0] for name in names} if names else params.sweeps
    look = [
        *(("Sweep:", text) for name in swept if (text := _chosen(root, params, name))),
        # A run of named experiments does not write the report again, so the report may be old.
        *([("Report:", str(report))] if names is None and (root / report).is_file() else []),
        ("Curves:", "pipeline ui  (MLflow on http://127.0.0.1:5000)"),
        ("Change:", "edit params.yaml and run again: only jobs that the change affects run"),
    ]
    settings = _of_experiments(params, tasks)
    texts = [_text(task, settings, _NARROW) for task in tasks]
    return "\n\n".join([*texts, "\n".join(aligned(look))])


def _chosen(root: Path, params: Params, name: str) -> str:
    """Return a text on a sweep's best trial, and where all are; empty until they are ranked."""
    best = read_map(root / best_file(name))
    score = read_map(root / best_file(name).with_name("metrics.json"))
    # The ranking is written last, so it is absent while the sweep runs.
    if name not in params.sweeps or not best or not score:
        return ""
    metric = params.sweeps[name].metric
    values = (f"{key.rpartition('.')[2]} {as_text(best['values'][key])}" for key in best["values"])
    return (
        f"{best['trial']} is the best of {score['trials']} trials, with {metric} "
        f"{tables.number(score[metric])} ({', '.join(values)}); "
        f"all: {best_file(name).with_name('trials.csv')}, `pipeline compare results/train/{name}`"
    )


def _of_experiments(params: Params, tasks: Iterable[Task]) -> Settings:
    found = {}
    for name in {standing.experiment for task in tasks for standing in task.standings}:
        # The experiment may have been removed, and a trial may not be proposed yet.
        with suppress(PipelineError, KeyError):
            found[name] = (params.run_settings(name), params.experiment(name))
    return found


def _settings_of(runs: Sequence[Path], learned: Experiments, tasks: Iterable[Task]) -> Settings:
    found: dict[str, tuple[RunSettings, ExperimentParams | None]] = {}
    # Settings of the DAG's runs come from params.yaml; runs of `learn` have their own file.
    of_dag = [run for run in runs if not (run / _CONFIGURATION).is_file()]
    places = (_PLACE.fullmatch(run.resolve().as_posix()) for run in of_dag)
    files_of = {Path(place["results"]).parent / "params.yaml" for place in places if place}
    for file in files_of:
        # With several projects, equal names could mean different experiments.
        if file.is_file() and len(files_of) == 1:
            found |= _of_experiments(load_params(file), tasks)
    for name, members in learned.items():
        # All members have the same settings except the seed, so any of them will do.
        run, _ = next(iter(members.values()))
        found[name] = (load_run_settings(run / _CONFIGURATION), None)
    return found


def outcomes_of(runs: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes of run folders; runs of `pipeline learn` come last."""
    trials, learned = _found(runs)
    return [*trials, *_of_learn(learned)]


def _found(runs: Sequence[Path]) -> tuple[list[Outcome], Experiments]:
    """Return the outcomes of the DAG's folders, and the runs of `learn` by experiment."""
    # A run folder of `learn` has a configuration; a folder of the DAG is recognized by its path.
    learned = [run for run in runs if (run / _CONFIGURATION).is_file()]
    trials = _with_unique_names([(run, _of_dag(run)) for run in runs if run not in learned])
    # The same run may be given twice, by its seed and by its experiment.
    unique = {(*trial.task, trial.experiment, trial.seed): trial for trial in trials}
    return [*unique.values()], _experiments(learned, {trial.experiment for trial in trials})


def _with_unique_names(runs: Sequence[tuple[Path, Sequence[Outcome]]]) -> list[Outcome]:
    """Return the DAG's outcomes; a later project's experiment with a used name gets its path."""
    results: dict[str, Path] = {}
    outcomes: list[Outcome] = []
    for run, trials in runs:
        # This is the folder `results` of the run's project.
        folder = Path(_PLACE.sub(r"\g<results>", run.resolve().as_posix()))
        for trial in trials:
            name = trial.experiment
            # Experiments of the first project keep their short names.
            if results.setdefault(name, folder) != folder:
                name = str(folder / name)
            outcomes.append(replace(trial, experiment=name))
    return outcomes


def _of_dag(run: Path) -> list[Outcome]:
    if not run.is_dir():
        raise SettingsError(f"{run}: does not exist; give the folder of a run")
    # The path is resolved, because `.` or a link does not have the stage and the seed in its path.
    inside = run.resolve()
    place = _PLACE.fullmatch(inside.as_posix())
    results, name, only_seed = place.group("results", "name", "seed") if place else ("", "", None)
    seeds = sorted(
        {
            int(path.name.removeprefix("seed"))
            # The folders of all stages are searched, because an experiment need not have every
            # stage.
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
            "and its path is not results/train/<experiment> or results/train/<experiment>/seed<k>"
        )
    environment = _environment_of(Path(results), name)
    trials_by_seed = (
        trials_of(Path(results), name, seed, environment=environment) for seed in seeds
    )
    outcomes = [trial for found in trials_by_seed for trial in found]
    if not outcomes:
        raise SettingsError(f"{run}: has neither a learning curve nor episodes; train it first")
    return outcomes


def _ranked(trials: Iterable[Path], table: Path) -> list[Path]:
    """Return the folders of a sweep's trials, best first if the sweep has ranked them."""
    ranks: dict[str, int] = {}
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            ranks = {f"{int(row['trial']):03}": int(row["rank"]) for row in csv.DictReader(file)}
    # Trials without a rank come last, in the order of their numbers.
    return sorted(trials, key=lambda path: (ranks.get(path.name, MOST_TRIALS + 1), path.name))


def _environment_of(results: Path, experiment: str) -> str:
    path = results.parent / "params.yaml"
    if not path.is_file():
        return ""
    params = load_params(path)
    # A trial has the environment of its sweep's experiment.
    sweep = params.sweeps.get(experiment.partition("/")[0])
    setup = params.experiments.get(experiment if sweep is None else sweep.experiment)
    return "" if setup is None else setup.environment


def _of_learn(experiments: Experiments) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for name, members in experiments.items():
        for seed, (run, environment) in members.items():
            # seconds.json is written when the run ends; before that the time is None.
            seconds = read_map(run / "run_logs/seconds.json").get("total")
            status = read_map(run / "run_logs/training_status.json")
            outcomes += [
                Outcome(
                    experiment=name,
                    environment=environment,
                    behavior=behavior,
                    seed=seed,
                    curve=curve,
                    # The curve may end before the last step; the status has the exact number of
                    # steps.
                    steps=_last_checkpoint(status, behavior),
                    seconds=seconds,
                )
                for behavior, curve in read_curves(run / _PROGRESS).items()
            ]
    return outcomes


def _last_checkpoint(status: dict[str, Any], behavior: str) -> int | None:
    """Return the step of a behavior's last checkpoint; None if the status has no checkpoint."""
    with suppress(KeyError, TypeError, ValueError):
        return int(status[behavior]["final_checkpoint"]["steps"])
    return None


def _experiments(runs: Sequence[Path], used_names: Collection[str]) -> Experiments:
    """Return runs of `pipeline learn` by experiment and seed; the names are not `used_names`.

    Runs with equal settings except the seed are one experiment.
    """
    groups: dict[str, dict[int, tuple[Path, str]]] = {}
    for run in runs:
        key, seed, environment = _identity(run / _CONFIGURATION)
        members = groups.setdefault(key, {})
        # Seeds are samples: a run that counts twice would narrow the interval without new evidence.
        if seed in members:
            raise SettingsError(
                f"{run}: has the same configuration and seed, {seed}, as {members[seed][0]}; a "
                "repeated seed is not a further sample: leave one run out"
            )
        members[seed] = (run, environment)
    experiments: Experiments = {}
    for members in groups.values():
        paths = [run.resolve() for run, _ in members.values()]
        # The experiment gets the first unused name of: the common start of its runs' names, the
        # first run's name, the path of this run.
        names = (_name_of([path.name for path in paths]), paths[0].name, str(paths[0]))
        unused = (name for name in names if name not in experiments and name not in used_names)
        experiments[next(unused)] = members
    return experiments


def _identity(configuration: Path) -> tuple[str, int, str]:
    """Return a digest of the settings without the seed, the seed, and the environment's name."""
    settings = load_run_settings(configuration)
    content: dict[str, Any] = to_mapping(settings)
    # The run's name and folder do not change its results; its initial weights and `inference` do.
    checkpoints = content.pop("checkpoint_settings", {})
    content["begins"] = {key: checkpoints.get(key) for key in ("initialize_from", "inference")}
    environment = content.get("env_settings", {})
    # These settings differ between the runs of one experiment, so they are removed.
    for key in ("seed", "base_port"):
        environment.pop(key, None)
    path = settings.env_settings.env_path
    # An id with slashes, such as `gymnasium:ALE/Pong-v5`, is no path and is not shortened.
    is_id = path is not None and path.startswith(("gymnasium:", "pettingzoo:"))
    name = "Unity Editor" if path is None else path if is_id else Path(path).name
    return files.fingerprint(content), settings.env_settings.seed, name


def _seeds(learned: Experiments) -> Iterator[str]:
    """Yield one text that lists the runs of each experiment with several runs, if there are any."""
    groups = [members for members in learned.values() if len(members) > 1]
    lines = [", ".join(str(run) for run, _ in members.values()) for members in groups]
    if lines:
        yield "\n".join(["Runs of one experiment, because only their seeds differ:", *lines])


def _name_of(names: Sequence[str]) -> str:
    """Return the common start of the names of runs, without `seed` at its end."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    # The common start of the first and the last name in sorted order is the common start of all
    # names.
    n = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    # `walk-seed1` and `walk-seed2` share `walk-seed`, which becomes `walk`.
    common = first[:n].rstrip("-_. ")
    return common.removesuffix("seed").rstrip("-_. ") or names[0]


def _text(task: Task, settings: Settings, columns: Collection[str] = _COLUMNS) -> str:
    # `tables.rows` returns every column; the table shows only those in `columns`.
    rows = [_COLUMNS, *tables.rows(task, wall_clock=True)]
    indices = [k for k, name in enumerate(_COLUMNS) if name in columns]
    table = aligned([[row[k] for k in indices] for row in rows], first_number=1)
    lines = [brief(task.name), tables.conclusion(task), "", *table]
    names = [standing.experiment for standing in task.standings]
    if names[0] in settings:
        known = {name: settings[name] for name in names if name in settings}
        setups = {name: setup_of(run, task.behavior, dag) for name, (run, dag) in known.items()}
        # Differences of the settings explain the figures, so they are printed below the table.
        different = against_first(setups).items()
        lines += ["", *(f"{name}, against {names[0]}: {text}" for name, text in different)]
    # With one seed per experiment there is no interval, so comparisons of pairs would say nothing.
    if any(len(standing.seeds) > 1 for standing in task.standings) and task.improvements:
        lines += ["", *aligned([tables.PAIRS_HEADER, *tables.pairs(task)], first_number=2)]
    return "\n".join([*lines, "", *tables.notes(task), *tables.cautions(task)])
