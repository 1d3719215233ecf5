"""`pipeline run NAME...`: some experiments, runs, sweeps or subsets, with either engine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pipeline.commands.engines import environment
from pipeline.errors import SettingsError, StageError
from pipeline.settings.params import load_params
from pipeline.settings.plan import RUNS_FILE, key_of, write_plan
from pipeline.settings.reader import suggestion
from pipeline.settings.subsets import runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.settings.params import Params


def run(
    root: Path, names: Sequence[str], *, engine: str, stage: str | None, cores: int, dry: bool
) -> str:
    """Plan, then let an engine bring what the names stand for up to date.

    Args:
        root: the repository.
        names: subsets, experiments, sweeps, or runs as `<experiment>-<seed>`.
        engine: `dvc` or `snakemake`.
        stage: the last stage to run; None for all of each experiment.
        cores: jobs at a time; DVC runs one.
        dry: only say what would be asked of the engine.

    Raises:
        PipelineError: params.yaml has a mistake or no such name, or the engine failed.
    """
    params = load_params(root / "params.yaml")
    write_plan(params, root / RUNS_FILE)
    wanted = targets(params, names, stage=stage)
    if engine == "dvc":
        command = ["dvc", "repro", *(one.dvc for one in wanted)]
    else:
        command = ["snakemake", "--cores", str(cores), *(one.file for one in wanted)]
    if dry:
        return " ".join(command)
    done = subprocess.run(command, cwd=root, env=environment(), check=False)  # noqa: S603  # fixed
    if done.returncode != 0:
        raise StageError(
            f"`{' '.join(command[:3])} ...` ended with exit code {done.returncode}; what failed "
            "stands above. The same command goes on where it stopped."
        )
    return f"{engine}: {', '.join(names)} up to date."


class Target:
    """The end of one run, as each engine calls it.

    Args:
        stage: name of the last stage to run.
        experiment: whose.
        seed: of the run.
        best: whether it is the best of a sweep, whose training is a stage of its own.
        pretrained: whether training begins with a pretrained policy.
    """

    def __init__(
        self, stage: str, experiment: str, seed: int, *, best: bool, pretrained: bool
    ) -> None:
        family = stage
        if stage == "train" and (best or pretrained):
            family = "train_best" if best else "train_pretrained"
        self.dvc = f"{family}@{key_of(experiment, seed)}"
        folder = f"results/{stage}/{experiment}/seed{seed}"
        ends = {"export": "", "evaluate": "/metrics.json"}
        self.file = folder + ends.get(stage, "/policy.pt")


def targets(params: Params, names: Sequence[str], *, stage: str | None = None) -> list[Target]:
    """What the engines must make for the names.

    Raises:
        SettingsError: A name stands for nothing, or its experiment has no such stage.
    """
    pairs: dict[tuple[str, int], None] = {}
    for name in names:
        found = runs_of(params, name)
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
    return Target(
        last,
        name,
        seed,
        best=experiment.best_of is not None,
        pretrained="pretrain" in experiment.stages,
    )
