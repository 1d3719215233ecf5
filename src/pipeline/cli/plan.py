"""`pipeline plan`: write the table of runs, and list results that no run makes any more."""

import argparse
import contextlib
import logging
import re
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from pipeline import machine
from pipeline.cli.parser import Parser, option
from pipeline.dag.attempt import WORK
from pipeline.dag.engines import drop_from_lock, locked_stages, truncate_incomplete_dvc_lock
from pipeline.dag.stages.check import check_ids
from pipeline.errors import PipelineError, few
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import RUNS_FILE, check_plan, key_of, plan, write_plan

_log = logging.getLogger(__name__)

_OF_RUNS = ("pretrain", "train", "export", "evaluate")
_RUN = re.compile(rf"results/(?:{'|'.join(_OF_RUNS)})/(.+?)/seed(\d+)")
_RESULT = re.compile(
    rf"{_RUN.pattern}|results/(?:sweep/[^/]+|(?:demos|propose)/.+\.json)|build/env/[^/]+"
)
"""Pattern of the path of the folder or file that one run of a stage makes."""
_MADE = {
    **dict.fromkeys(("demonstrations", "file_demonstrations"), "results/demos/{key}.json"),
    "proposals": "results/propose/{trial}.json",
    "sweeps": "results/sweep/{key}",
    **dict.fromkeys(("environments", "path_environments", "unity_environments"), "build/env/{key}"),
}
"""For each table of the plan with entries that are not runs: the path of an entry's result."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline plan`."""
    which = parser.add_mutually_exclusive_group()
    option(which, "--check", "only check whether the list of runs is up to date")
    text = (
        "delete results and dvc.lock entries of runs that params.yaml no longer has; mark the "
        "runs' rows in MLflow as not current"
    )
    option(which, "--prune", text)


def run(arguments: argparse.Namespace) -> str:
    """Write the table of runs of the working folder's params.yaml; `--check` only checks it."""
    params = load_params(Path("params.yaml"))
    check_ids(params)
    if arguments.check:
        check_plan(params)
        return f"{RUNS_FILE} is up to date."
    write_plan(params)
    # `dvc repro`, the usual next command, cannot read an incomplete dvc.lock.
    truncate_incomplete_dvc_lock(Path())
    left = left_over(params)
    tables = plan(params)["runs"].values()
    runs = {key for entries in tables for key, entry in entries.items() if "seed" in entry}
    lines = []
    # Results are kept without --prune: a removed experiment may have taken days of training.
    if arguments.prune:
        lines.append(_prune(left, runs))
    elif left:
        _log.warning(
            "params.yaml no longer has %s, but results/ or dvc.lock still has their results; "
            "`pipeline plan --prune` deletes the results, and removes the runs from MLflow's "
            "tables.",
            _listed(left, runs),
        )
    cores = machine.n_processors()
    lines.append(f"Wrote {RUNS_FILE}. Run `pipeline run --cores {cores}`, or `dvc repro`.")
    with contextlib.suppress(PipelineError):  # `pipeline run` reports mistakes in trainer files
        lines.append(_amount(params))
    return "\n".join(lines)


def _amount(params: Params) -> str:
    tables = plan(params)["runs"].items()
    trainings = Counter(
        entry["experiment"]
        for table, entries in tables
        if table.startswith("train")
        for entry in entries.values()
    )
    steps = 0
    for name, n_seeds in trainings.items():
        try:
            settings = params.run_settings(name)
        # A trial that is not proposed yet has as many steps as the experiment of its sweep.
        except PipelineError:
            settings = params.run_settings(params.experiment(name).base or name)
        # A trainer file may have only `default_settings`; then one behavior is assumed.
        behaviors = settings.behaviors.values() or [settings.default_settings]
        steps += n_seeds * sum(behavior.max_steps for behavior in behaviors if behavior)
    # Only names of trials have a slash.
    n_trials = sum("/" in name for name in trainings)
    n_others = len(trainings) - n_trials
    kinds = f"{n_others} experiment{'s' * (n_others != 1)}"
    kinds += f" and {n_trials} trials" * bool(n_trials)
    n_runs = trainings.total()
    return f"To train in all: {kinds}, {n_runs} run{'s' * (n_runs != 1)}, {steps:,} steps."


def left_over(params: Params) -> list[str]:
    """Return the paths of results, on disk or in dvc.lock, for which params.yaml has no run."""
    places = [path.as_posix() for path in Path("build/env").glob("*/environment.json")]
    for stage in _OF_RUNS:
        places += [path.as_posix() for path in Path("results", stage).rglob("seed*")]
    for pattern in ("sweep/*", "propose/**/*.json", "demos/*.json"):
        places += [path.as_posix() for path in Path("results").glob(pattern)]
    present = {match[0] for place in places if (match := _RESULT.match(place))}
    return sorted(present.union(*_locked().values()) - _made(params))


def _made(params: Params) -> set[str]:
    of_runs = "results/{stage}/{experiment}/seed{seed}"
    return {
        _MADE.get(table, of_runs).format_map(entry | {"stage": table.partition("_")[0], "key": key})
        for table, entries in plan(params)["runs"].items()
        for key, entry in entries.items()
    }


def _locked() -> dict[str, set[str]]:
    """Return the paths of results in dvc.lock, by the stage that made them."""
    lock = Path("dvc.lock")
    stages = locked_stages(lock.read_text(encoding="utf-8")) if lock.is_file() else None
    return {
        name: {match[0] for out in stage.get("outs", ()) if (match := _RESULT.match(out["path"]))}
        for name, stage in (stages or {}).items()
    }


def _listed(left: Collection[str], runs: Collection[str]) -> str:
    """Return the names of removed runs, and the paths of other left-over results, as text."""
    names: dict[str, None] = {}
    for place in left:
        match = _RUN.fullmatch(place)
        key = match and key_of(match[1], match[2])
        names[place if key is None or key in runs else key] = None
    return few(sorted(names, key=lambda name: "/" in name))


def _prune(left: Collection[str], runs: Collection[str]) -> str:
    """Delete left-over results, and return a line with their number."""
    for place in map(Path, left):
        # The paths are the result itself, and the folder of its unfinished attempts.
        paths = [place, WORK / place.with_suffix("").relative_to(place.parts[0])]
        if place.parent == Path("results/demos"):
            paths.append(Path("data/demos", f"{place.stem}.demo"))
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            # A folder with files of other runs is not empty, and stays.
            with contextlib.suppress(OSError):
                for parent in path.parents[:-2]:
                    parent.rmdir()
    # A stage is removed from dvc.lock if it had results, and if all of them are deleted.
    gone = {name for name, results in _locked().items() if results and results <= set(left)}
    drop_from_lock(Path(), gone)
    done = f"Deleted results: {len(left)}; stages of dvc.lock: {len(gone)}"
    return f"{done}; {_taken_out_of_mlflow(runs)}."


def _taken_out_of_mlflow(runs: Collection[str]) -> str:
    """Mark rows of this project's removed runs as not current; return a text with their number."""
    from pipeline.cli.runs import rows_of
    from pipeline.tracking import mlflow_store, run_metadata

    root = Path.cwd()
    try:
        store = mlflow_store.Store.existing(root)
    except PipelineError as error:
        return f"MLflow's tables were not changed ({error})"
    gone = [
        row
        for row in rows_of(store)
        if row.current
        and row.own_folder is None
        and row.variant == run_metadata.WORKSPACE
        and (store.is_local or row.tags.get(mlflow_store.CHECKOUT) == run_metadata.checkout(root))
        and key_of(row.experiment, row.seed) not in runs
    ]
    for row in gone:
        store.set_tags(row.run, {mlflow_store.CURRENT: "no"})
    return f"rows removed from MLflow's tables: {len(gone)}"
