"""Results of an experiment's runs, read from the DAG's folders, and differences of settings."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.dag.attempt import read_map
from pipeline.errors import SettingsError, StageError, brief, few
from pipeline.evaluation.comparison import Curve, Outcome
from pipeline.settings import RunSettings, to_mapping
from pipeline.settings.project.experiments import ExperimentParams
from pipeline.settings.project.params import Params
from pipeline.tracking.curve_csv import read_rows
from pipeline.tracking.run_metadata import INTERRUPTED, POLICY_DIGEST, STOCHASTIC, dvc_digest

ALL = ("train", "evaluate")
# Settings that are not listed as differences: the report shows the trainer's type and the seeds
# elsewhere, and the other settings do not change what is learned.
_NO_PART_OF_RESULTS = (
    *("trainer_type", "checkpoint_interval", "keep_checkpoints", "even_checkpoints"),
    *("seed", "base_port"),
)
_MOST_DIFFERENCES = 6
_COLUMNS = ("environment", "seed", "step", "value")
_RENAMED = {
    **dict.fromkeys(("env", "env_id", "env_name", "task", "game"), "environment"),
    **dict.fromkeys(("run", "seeds", "trial"), "seed"),
    **dict.fromkeys(("steps", "timesteps", "global_step", "frames", "x"), "step"),
    **dict.fromkeys(("return", "returns", "reward", "score", "episodic_return", "y"), "value"),
}
"""For each other name that a column may have in files of other programs: the name in `_COLUMNS`."""


def outcomes(root: Path, params: Params) -> Iterator[Outcome]:
    """Yield an `Outcome` for each behavior of each run in params.yaml that has results."""
    for name, experiment in params.experiments.items():
        for seed in experiment.seeds:
            yield from trials_of(
                root / "results",
                name,
                seed,
                environment=experiment.environment,
                stages=experiment.stages,
            )


def trials_of(
    results: Path,
    experiment: str,
    seed: int,
    *,
    environment: str,
    stages: Collection[str] = ALL,
) -> list[Outcome]:
    """Return an `Outcome` for each behavior in a run of the DAG; [] for a run without results.

    Only results of `stages` are read: an earlier plan may have left results of other stages.

    Raises:
        StageError: A file does not have the form that the stages write.
    """
    run = f"{experiment}/seed{seed}"
    metrics = results / "evaluate" / run / "metrics.json"
    progress = results / "train" / run / "progress.csv"
    was_trained, was_evaluated = "train" in stages, "evaluate" in stages
    measured = read_evaluation(metrics) if was_evaluated and metrics.is_file() else {}
    policy = progress.with_name("policy.pt")
    outdated = was_trained and was_evaluated and is_outdated(metrics, policy)
    # Returns of an earlier policy must not be compared with the curve of the present policy.
    returns = {name: numbers["mean_return"] for name, numbers in measured.items() if not outdated}
    curves = read_curves(progress) if was_trained and progress.is_file() else {}
    trained = read_map(progress.with_name("metrics.json")) if was_trained else {}
    # No engine tracks this file; without it the training's time is unknown.
    facts = read_map(results / ".work/train" / run / "stage.json")
    return [
        Outcome(
            experiment=experiment,
            environment=environment,
            behavior=behavior,
            seed=seed,
            evaluated=returns.get(behavior),
            curve=curves.get(behavior),
            steps=trained.get(behavior, {}).get("steps"),
            # For a resumed attempt the seconds are unknown (None), because it has only recorded the
            # time since it was resumed.
            seconds=None if facts.get("resumed", True) else facts.get("duration_s"),
            exact=INTERRUPTED not in trained.get(behavior, {}),
            outdated=outdated,
            stochastic=bool(measured.get(behavior, {}).get(STOCHASTIC)),
        )
        # The names are sorted, because the order of a set differs between processes.
        for behavior in sorted({*returns, *curves})
    ]


def is_outdated(record: Path, policy: Path) -> bool:
    """Return whether an evaluation or export was made from another policy than `policy`.

    `record` is the metrics.json of `evaluate` or the export.json of `export`. False if `policy`,
    the run's policy.pt, does not exist, as in a clone without DVC's files.
    """
    noted = {
        values.get(POLICY_DIGEST)
        for values in read_map(record).values()
        if isinstance(values, dict)
    }
    # Earlier versions recorded no digest (None); such a record counts as up to date.
    return policy.is_file() and not noted <= {None, dvc_digest(policy)}


def read_evaluation(path: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of each behavior in a metrics.json of `evaluate`.

    Raises:
        StageError: The file does not have the form that the stage writes, or a number is not
            finite.
    """
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        return {behavior: _numbers(values) for behavior, values in metrics.items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as problem:
        raise StageError(
            f"{path}: cannot be read as an evaluation ({problem!r}); evaluate the policy again"
        ) from problem


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {
        name: float(value)
        for name, value in values.items()
        if name != POLICY_DIGEST and value is not None
    }
    # `mean_return` is required: NaN stands in for a missing value and raises below.
    for name, value in ({"mean_return": math.nan} | numbers).items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    return numbers


def read_curves(path: Path) -> dict[str, Curve]:
    """Return the learning curve of each behavior in a progress.csv.

    A curve has a point for each summary in which an episode ended.

    Raises:
        StageError: The file is not a progress.csv.
    """
    points: dict[str, tuple[list[float], list[float]]] = {}
    try:
        # `stat` raises an error if there is no file; `read_rows` would return no rows.
        path.stat()
        _, rows, is_whole = read_rows(path)
        for row in rows:
            # The reward is empty if no episode ended in the summary period.
            if not row["reward"]:
                continue
            steps, returns = points.setdefault(row["behavior"].partition("?")[0], ([], []))
            step = float(row["step"])
            # With two teams, a step has a row for each team, and only the first row is used.
            if not steps or step > steps[-1]:
                steps.append(step)
                returns.append(float(row["reward"]))
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise StageError(
            f"{path}: cannot be read as a learning curve ({problem!r}); train again, or leave the "
            "run out"
        ) from problem
    if not (rows or is_whole):
        raise StageError(
            f"{path}: cannot be read as a learning curve (no line has the columns behavior and "
            "step); train again, or leave the run out"
        )
    return {
        behavior: Curve(steps=np.array(steps), returns=np.array(returns))
        for behavior, (steps, returns) in points.items()
    }


def read_published(
    path: Path, tasks: Mapping[str, Collection[tuple[str, str]]], note: str | None = None
) -> tuple[list[Outcome], str]:
    """Return other people's per-seed results, and a text on how they were measured.

    The lines `# note: TEXT` and `# returns: evaluation` (or `training`, the default) of the file
    are about all its values. A seed's score is the mean of its values over the last tenth of the
    steps, as for a training run of this program.

    Args:
        path: a CSV file with the columns of `_COLUMNS`; its stem is the experiment's name.
        tasks: the tasks here, as pairs (environment, behavior), by each name that the file may use.
        note: replaces the note in the file.

    Raises:
        SettingsError: The file cannot be read, has no note, or has results on none of `tasks`.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read as CSV ({error})") from error
    # `note` and `returns` are in comment lines and not in columns, because they hold for the whole
    # file.
    pairs = (line.removeprefix("#").split(":", 1) for line in lines if re.match("#[^:]+:", line))
    about = {"returns": "training"} | {key.strip().lower(): text.strip() for key, text in pairs}
    if about["returns"] not in ("training", "evaluation"):
        text = f"{brief(about['returns'])!r} is not allowed. Allowed: training, evaluation"
        raise SettingsError(f"{path}: # returns: {text}")
    note = note or about.get("note")
    if not note:
        text = "add a line `# note: TEXT`, or give --note TEXT"
        raise SettingsError(f"{path}: does not say how its values were measured; {text}")
    curves = _published_curves(path, lines)
    left_out = sorted({name for name, _ in curves} - {*tasks})
    if len(left_out) == len({name for name, _ in curves}):
        text = f"has {few(left_out, 6)}, but the experiments here have {few(sorted(tasks), 6)}"
        raise SettingsError(f"{path}: {text}; write one of these names into the column environment")
    outcomes = []
    for (name, seed), points in sorted(curves.items()):
        if len(tasks.get(name, ())) > 1:
            known = ", ".join(sorted(behavior for _, behavior in tasks[name]))
            text = f"{name} has several behaviors; write one of {known} into the column environment"
            raise SettingsError(f"{path}: {text}")
        for environment, behavior in tasks.get(name, ()):
            steps, values = (
                np.array(column) for column in zip(*sorted(points.items()), strict=True)
            )
            curve = Curve(steps=steps, returns=values)
            outcome = Outcome(
                experiment=path.stem,
                environment=environment,
                behavior=behavior,
                seed=seed,
                curve=curve,
                evaluated=curve.final if about["returns"] == "evaluation" else None,
            )
            outcomes.append(outcome)
    more = f" Left out, without an experiment here: {few(left_out, 6)}." if left_out else ""
    return outcomes, f"Other people's results, measured by them: {note.rstrip('.')}.{more}"


def _published_curves(path: Path, lines: list[str]) -> dict[tuple[str, int], dict[float, float]]:
    """Return published learning curves (value by step), by environment and seed."""
    # The CSV is read line by line, so that an error can name the line.
    rows = [
        (number, [cell.strip() for cell in next(csv.reader([line]))])
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    header = [name.lower() for name in rows[0][1]] if rows else []
    if sorted(header) != sorted(_COLUMNS):
        renamed = [f"{name} to {_RENAMED[name]}" for name in header if name in _RENAMED]
        remedy = f"; rename {', '.join(renamed)}" if renamed else ""
        has = brief(", ".join(header)) or "no line"
        raise SettingsError(f"{path}: needs the columns {', '.join(_COLUMNS)}, has {has}{remedy}")
    curves: dict[tuple[str, int], dict[float, float]] = {}
    for line, cells in rows[1:]:
        try:
            row = dict(zip(header, cells, strict=True))
            seed, step, value = int(row["seed"]), float(row["step"]), float(row["value"])
        except ValueError:
            seed = -1  # marks a row with a wrong number of cells, or with text instead of a number
        if seed < 0 or not (row["environment"] and math.isfinite(step + value)):
            text = "needs a name, a seed from 0, and two finite numbers: step and value"
            raise SettingsError(f"{path}:{line}: {brief(','.join(cells))}: {text}")
        points = curves.setdefault((row["environment"], seed), {})
        if step in points:
            text = f"repeats step {step:g} of seed {seed} of {brief(row['environment'])}"
            raise SettingsError(f"{path}:{line}: {text}; keep one line for each step")
        points[step] = value
    if not curves:
        raise SettingsError(f"{path}: has no rows below its header")
    return curves


def setup_of(
    settings: RunSettings, behavior: str, experiment: ExperimentParams | None = None
) -> dict[str, Any]:
    """Return the settings, including the experiment's, on which a behavior's results depend."""
    full = to_mapping(settings)
    # A behavior without a section of its own has the default settings, as in ML-Agents.
    setup = dict(full["behaviors"].get(behavior) or full["default_settings"] or {})
    if experiment is not None:
        setup["pretrain"] = experiment.pretrain and asdict(experiment.pretrain)
        setup["learners"] = experiment.learners
    return setup | {key: full[key] for key in ("environment_parameters", "env_settings")}


def against_first(setups: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return for each setup after the first, by name, its differences from the first as text."""
    texts: dict[str, str] = {}
    first: Mapping[str, Any] | None = None
    for name, setup in setups.items():
        if first is None:
            first = setup
            continue
        differences = _differences(first, setup)
        shown = [*islice(differences, _MOST_DIFFERENCES)]
        # `islice` has taken the differences that are shown; the iterator still has all others.
        if n_more := sum(1 for _ in differences):
            shown.append(f"{n_more} more")
        texts[name] = ", ".join(shown) or "the same"
    return texts


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], place: str = ""
) -> Iterator[str]:
    """Yield a text for each setting in which the nested settings `other` differ from `first`."""
    for key in dict.fromkeys([*first, *other]):
        was, now = first.get(key), other.get(key)
        name = f"{place}{key}"
        if isinstance(was, dict) and isinstance(now, dict):
            # Names of hyperparameters are unique, so they are shown without their section.
            yield from _differences(was, now, "" if key == "hyperparameters" else f"{name}.")
        elif isinstance(was, dict) or isinstance(now, dict):
            yield f"{'with' if now else 'without'} {name}"
        # A setting that only one of two trainers has does not count as a difference.
        elif was != now and {key} <= {*first} & {*other} and key not in _NO_PART_OF_RESULTS:
            yield f"{name} {as_text(now)} instead of {as_text(was)}"


def as_text(value: Any) -> str:
    """Return a setting's value as text; a dash for None."""
    return "-" if value is None else str(value)
