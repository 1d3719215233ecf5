"""`pipeline compare`: the report's tables for any runs, in the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.commands.parser import aligned
from pipeline.errors import SettingsError
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Outcome, Task, compare
from pipeline.settings import load_run_settings, to_mapping
from pipeline.settings.params import load_params
from pipeline.stages.reporting.results import read_curves, trials_of
from pipeline.stages.shared.attempt import read_map

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    from pipeline.commands.parser import Parser

_CONFIGURATION, _PROGRESS = "configuration.yaml", "progress.csv"
_STAGES = ("pretrain", "train", "export", "evaluate")
_PLACE = re.compile(
    rf"(?P<results>.*/)(?:{'|'.join(_STAGES)})/"
    r"(?P<name>(?!seed\d+$)[^/]+(?:/(?!seed\d+$)[^/]+)?)(?:/seed(?P<seed>\d+))?"
)
"""A stage's folder of an experiment, or of a sweep's trial as `<sweep>/<number>`, or of a seed."""
_COLUMNS = (*tables.HEADER, tables.WALL_CLOCK)
_NARROW = set(_COLUMNS) - {tables.TOLERANCE, "Mean", "Mean height"}


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
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.9,
        help="the target: of the way from lowest start to best end; default: %(default)s",
    )
    forms = parser.add_mutually_exclusive_group()
    for form in ("csv", "json"):
        forms.add_argument(
            f"--{form}",
            dest="form",
            action="store_const",
            const=form,
            default="text",
            help=f"print {form.upper()}",
        )


def run(arguments: argparse.Namespace) -> str:
    """Return the comparison of runs of `pipeline learn` and of the DAG."""
    runs: list[Path] = arguments.runs
    fraction, form = arguments.fraction, arguments.form
    if not 0.0 < fraction <= 1.0:
        raise SettingsError(f"--fraction: {fraction} is not in range; use a value in (0, 1]")
    outcomes = outcomes_of(runs) if runs else _of_params(Path.cwd())
    tasks = compare(outcomes, fraction=fraction)
    if not tasks:
        names = ", ".join(map(str, runs)) or "the experiments of params.yaml"
        raise SettingsError(f"{names}: no episode has ended here yet; train longer")
    if form == "csv":
        columns = (*tables.STANDING_COLUMNS, tables.WALL_CLOCK_COLUMN)
        return tables.csv_text(tables.standing_records(tasks), columns).rstrip()
    if form == "json":
        value = {
            "experiments": tables.standing_records(tasks),
            "improvements": tables.pair_records(tasks),
        }
        # NaN is no JSON; an error here is better than a file that other programs refuse.
        return json.dumps(value, indent=2, allow_nan=False)
    if not runs:
        return _answer(tasks)
    return "\n\n".join([*map(_text, tasks), *_seeds(_learned(runs))])


def answer(root: Path) -> str:
    """Return what every experiment in params.yaml came to, and where there is more to see."""
    return _answer(compare(_of_params(root)))


def _answer(tasks: Sequence[Task]) -> str:
    """Return tables as narrow as a terminal is, and where there is more to see."""
    look = [
        ("Report:", "results/report/report.html"),
        ("Curves:", "pipeline ui  (MLflow on http://127.0.0.1:5000)"),
        ("Change:", "edit params.yaml and run again: only what the change touches runs"),
    ]
    return "\n\n".join([*(_text(task, _NARROW) for task in tasks), "\n".join(aligned(look))])


def _of_params(root: Path) -> list[Outcome]:
    """Return the outcomes of every experiment in params.yaml."""
    from pipeline.stages.reporting.results import outcomes

    return list(outcomes(root, load_params(root / "params.yaml")))


def outcomes_of(runs: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes of folders, those of `pipeline learn` last."""
    # A run folder of `learn` says itself what it is; the DAG's folders are known by their place.
    learned = _learned(runs)
    trials = _apart([(run, _of_dag(run)) for run in runs if run not in learned])
    # A run may be named twice, by its seed and by its experiment.
    once = {(*trial.task, trial.experiment, trial.seed): trial for trial in trials}
    return [*once.values(), *_of_learn(learned, {one.experiment for one in trials})]


def _learned(runs: Sequence[Path]) -> list[Path]:
    return [run for run in runs if (run / _CONFIGURATION).is_file()]


def _apart(found: Sequence[tuple[Path, Sequence[Outcome]]]) -> list[Outcome]:
    """Return outcomes of the DAG; an experiment of another project gets its path in the name."""
    results: dict[str, Path] = {}
    outcomes: list[Outcome] = []
    for run, trials in found:
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
    # `.` or a link has no name that tells the stage and the seed.
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
    trials = sorted(path for path in inside.iterdir() if path.name.isdigit())
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


def _environment_of(results: Path, experiment: str) -> str:
    """Return the environment that params.yaml gives an experiment; empty if it gives none."""
    path = results.parent / "params.yaml"
    if not path.is_file():
        return ""
    params = load_params(path)
    sweep = params.sweeps.get(experiment.partition("/")[0])
    setup = params.experiments.get(experiment if sweep is None else sweep.experiment)
    return "" if setup is None else setup.environment


def _of_learn(runs: Sequence[Path], taken: Collection[str]) -> list[Outcome]:
    """Return the outcomes of runs of `pipeline learn`, under other names than those `taken`."""
    outcomes: list[Outcome] = []
    for name, members in _experiments(runs, taken).items():
        for seed, (run, environment) in members.items():
            seconds = read_map(run / "run_logs/seconds.json").get("total")  # None while it goes on
            for behavior, curve in read_curves(run / _PROGRESS).items():
                outcome = Outcome(
                    experiment=name, environment=environment, behavior=behavior, seed=seed
                )
                outcomes.append(replace(outcome, curve=curve, seconds=seconds))
    return outcomes


def _experiments(
    runs: Sequence[Path], taken: Collection[str] = ()
) -> dict[str, dict[int, tuple[Path, str]]]:
    """Return run and environment of each seed by experiment: runs that differ only in the seed.

    Settings alone decide what belongs together. A name is only a label, so one that is taken
    already is replaced by the path of a run, which belongs to no other experiment.
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
    experiments: dict[str, dict[int, tuple[Path, str]]] = {}
    for members in groups.values():
        paths = [run.resolve() for run, _ in members.values()]
        names = (_name_of([path.name for path in paths]), paths[0].name, str(paths[0]))
        unused = (one for one in names if one not in experiments and one not in taken)
        experiments[next(unused)] = members
    return experiments


def _identity(configuration: Path) -> tuple[str, int, str]:
    """Return a digest equal for runs of one experiment, the seed, and the environment's name."""
    settings = load_run_settings(configuration)
    content: dict[str, Any] = to_mapping(settings)
    # Not its name and folder; but first weights and acting without learning give other results.
    checkpoints = content.pop("checkpoint_settings", {})
    content["begins"] = {key: checkpoints.get(key) for key in ("initialize_from", "inference")}
    environment = content.get("env_settings", {})
    # What differs between the seeds of one experiment must not be a part of its identity.
    for key in ("seed", "base_port"):
        environment.pop(key, None)
    path = settings.env_settings.env_path
    name = "Unity Editor" if path is None else Path(path).name
    return files.fingerprint(content), settings.env_settings.seed, name


def _seeds(learned: Sequence[Path]) -> Iterator[str]:
    """Yield which runs of `pipeline learn` were taken as seeds of one experiment."""
    groups = [members for members in _experiments(learned).values() if len(members) > 1]
    lines = [", ".join(str(run) for run, _ in members.values()) for members in groups]
    if lines:
        yield "\n".join(["One experiment each, since only their seeds differ:", *lines])


def _name_of(names: Sequence[str]) -> str:
    """Return the common start of the names of runs, without a dangling `seed`."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    # What the least and the greatest name share at their start, all names share.
    n = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    common = first[:n].rstrip("-_. ")
    return common.removesuffix("seed").rstrip("-_. ") or names[0]


def _text(task: Task, columns: Collection[str] = _COLUMNS) -> str:
    rows = [_COLUMNS, *tables.rows(task, wall_clock=True)]
    shown = [k for k, name in enumerate(_COLUMNS) if name in columns]
    lines = [task.name, "", *aligned([[row[k] for k in shown] for row in rows], first_number=1)]
    if task.improvements:
        lines += ["", *aligned([tables.PAIRS_HEADER, *tables.pairs(task)], first_number=2)]
    return "\n".join([*lines, "", *tables.notes(task), *tables.cautions(task)])
