"""`pipeline run NAME...`: some experiments, runs, sweeps or subsets, with either engine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.engines import environment, mend_lock
from pipeline.errors import SettingsError, StageError
from pipeline.settings.params import load_params
from pipeline.settings.plan import RUNS_FILE, key_of, write_plan
from pipeline.settings.reader import suggestion

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pipeline.commands.parser import Parser
    from pipeline.settings.params import Params


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline run`."""
    parser.add_argument("names", nargs="+", help="as in params.yaml; a run is <experiment>-<seed>")
    parser.add_argument("--engine", choices=("dvc", "snakemake"), default="snakemake")
    parser.add_argument("--stage", default=None, help="the last stage; default: all of them")
    parser.add_argument("--cores", type=int, default=1, help="jobs at a time; default: %(default)s")
    parser.add_argument("-n", "--dry-run", action="store_true", help="print the engine's command")


def run(arguments: argparse.Namespace) -> str:
    """Plan, then let an engine bring what the names stand for up to date.

    Raises:
        PipelineError: params.yaml has a mistake or no such name, or the engine failed.
    """
    root, engine = Path.cwd(), arguments.engine
    params = load_params(root / "params.yaml")
    write_plan(params, root / RUNS_FILE)
    wanted = targets(params, arguments.names, stage=arguments.stage)
    if engine == "dvc":
        mend_lock(root)
        command = ["dvc", "repro", *(one.dvc for one in wanted)]
    else:
        command = ["snakemake", "--cores", str(arguments.cores), *(one.file for one in wanted)]
    if arguments.dry_run:
        return " ".join(command)
    done = subprocess.run(command, cwd=root, env=environment(), check=False)  # noqa: S603  # fixed
    if done.returncode != 0:
        raise StageError(
            f"`{' '.join(command[:3])} ...` ended with exit code {done.returncode}; what failed "
            "stands above. The same command goes on where it stopped."
        )
    return f"{engine}: {', '.join(arguments.names)} up to date."


@dataclass(frozen=True, slots=True)
class Target:
    """The end of one run, as each engine calls it."""

    dvc: str
    """The stage of dvc.yaml."""
    file: str
    """One of its outputs, which Snakemake is asked for."""


def targets(params: Params, names: Sequence[str], *, stage: str | None = None) -> list[Target]:
    """Return what the engines must make for the names.

    Raises:
        SettingsError: A name stands for nothing, or its experiment has no such stage.
    """
    pairs: dict[tuple[str, int], None] = {}
    for name in names:
        found = params.runs_of(name)
        if not found:
            known = [*params.subsets, *params.experiments, *params.sweeps]
            raise SettingsError(
                f"{params.path}: no subset, experiment, sweep or run is called {name!r}"
                f"{suggestion(name, known)} Known: {', '.join(known)}"
            )
        pairs |= dict.fromkeys(found)
    return [_target(params, experiment, seed, stage) for experiment, seed in pairs]


def _target(params: Params, name: str, seed: int, stage: str | None) -> Target:
    experiment = params.experiment(name)
    last = stage or experiment.stages[-1]
    if last not in experiment.stages:
        raise SettingsError(
            f"{params.path}: {name!r} has no stage {last!r}, only {', '.join(experiment.stages)}"
        )
    family: str = last
    if last == "train" and experiment.best_of is not None:
        family = "train_best"
    elif last == "train" and "pretrain" in experiment.stages:
        family = "train_pretrained"
    ends = {"export": "", "evaluate": "/metrics.json"}
    folder = f"results/{last}/{name}/seed{seed}"
    return Target(f"{family}@{key_of(name, seed)}", folder + ends.get(last, "/policy.pt"))
