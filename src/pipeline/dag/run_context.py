"""The run that the stages of an experiment work on, and its MLflow record."""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import machine
from pipeline.dag import process
from pipeline.dag.attempt import Attempt, read_map
from pipeline.dag.project import named, planned, project
from pipeline.dag.recorder import ForwardedRun
from pipeline.errors import PipelineError
from pipeline.settings import TrainerSettings, to_mapping
from pipeline.settings.project.experiments import ExperimentParams
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.trainer.run_file import demonstrations
from pipeline.tracking import mlflow_run, run_metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """An experiment with one seed."""

    root: Path
    params: Params
    name: str
    """Name of the experiment."""
    seed: int

    @property
    def experiment(self) -> ExperimentParams:
        """The experiment's section in params.yaml."""
        return self.params.experiment(self.name)

    def reread(self) -> Run:
        """Return the run as params.yaml describes it now."""
        return replace(self, params=load_params(self.root / "params.yaml"))

    def folder(self, stage: str) -> Path:
        """Return the folder of a stage's results, relative to the project."""
        return Path("results") / stage / self.name / f"seed{self.seed}"

    @property
    def instance(self) -> str:
        """Name of the run in a job, such as `collector_ppo/seed1`."""
        return f"{self.name}/seed{self.seed}"

    def runtime(self) -> dict[str, Any]:
        """Return the section `runtime`, with the experiment's own number of threads if set."""
        runtime = self.params.runtime
        threads = self.experiment.resources.threads or runtime.torch_threads
        options = {"torch_threads": threads, "device": runtime.device}
        # The default is left out: a new key would change the fingerprint of earlier runs.
        portable = runtime.deterministic == "portable"
        return options | ({"deterministic": runtime.deterministic} if portable else {})

    def learners(self) -> dict[str, int]:
        """Return `learners`, the number of processes that train together; {} for one process."""
        # The default is left out: a new key would change the fingerprint of earlier runs.
        n = self.experiment.learners
        return {} if n == 1 else {"learners": n}

    def plugins(self) -> dict[str, dict[str, str]]:
        """Return the versions of plug-in packages that the experiment uses; {} without any."""
        versions = self.params.plugins(self.name)
        return {"plugins": versions} if versions else {}


def main(
    description: str | None,
    work: Callable[[Run], None],
    argv: Sequence[str],
    *,
    short: bool = False,
    has_runtime: bool = True,
) -> int:
    """Run a stage for the experiment and seed in command-line arguments; see `process.run`.

    `has_runtime`: whether the stage's result depends on the section `runtime`.
    """
    arguments = _parsed(argv, description)

    def begin() -> None:
        run = find(project(), arguments.experiment, arguments.seed)
        if has_runtime:
            # The kernels are chosen before the work, because this call may start the process again
            # with other environment variables.
            _same_kernels(run.params)
        work(run)

    return process.run(begin, short=short)


def same_kernels(argv: Sequence[str]) -> None:
    """Make a further process of `torchrun` use the numerical kernels of the first process."""
    # A wrong argument must end this process, as it ends the first process.
    _parsed(argv, None)
    with contextlib.suppress(PipelineError):  # the first process reports the error
        _same_kernels(load_params(project() / "params.yaml"))


def _same_kernels(params: Params) -> None:
    if params.runtime.deterministic == "portable":
        machine.restart_in_portable_mode()


def _parsed(argv: Sequence[str], description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("experiment", help="a name under `experiments` in params.yaml")
    parser.add_argument("--seed", type=int, required=True, help="one of the experiment's seeds")
    return parser.parse_args(argv)


def find(root: Path, name: str, seed: int) -> Run:
    """Return the run of an experiment and seed in params.yaml.

    Raises:
        PipelineError: params.yaml does not have the experiment or seed, or the plan is out of date.
    """
    run = Run(root=root, params=planned(root), name=name, seed=seed)
    seeds = {str(seed_value): seed_value for seed_value in run.experiment.seeds}
    named(seeds, str(seed), f"experiments.{name}.seeds")
    return run


@contextlib.contextmanager
def recorded(
    run: Run,
    attempt: Attempt,
    *,
    prefix: bool = False,
    key: run_metadata.RunKey | None = None,
    row: run_metadata.RunMetadata | None = None,
) -> Iterator[mlflow_run.MlflowRun | None]:
    """Yield the MLflow run of the stage, or None if tracking is off.

    Errors of tracking never fail the stage. `key` and `row` are the results of `key_of` and
    `row_of`, if the caller has them already.
    """
    track = run.params.track
    if not mlflow_run.enabled() or (track is not None and "mlflow" not in track):
        yield None
        return
    # One MLflow run per experiment and seed: `train`, `export` and `evaluate` write to it.
    tracking = ForwardedRun(key or key_of(run, attempt), prefix=prefix)
    tracking.describe(row or row_of(run), run.root)
    # The status also stays FAILED after a SystemExit; otherwise MLflow would show the run as
    # RUNNING.
    status = "FAILED"
    try:
        yield tracking
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracking.end(status)
        attempt.facts["mlflow_run_id"] = tracking.run_id
        attempt.facts["mlflow_lost"] = tracking.lost


def key_of(run: Run, attempt: Attempt) -> run_metadata.RunKey:
    """Return the key of the MLflow run that a stage writes to."""
    stage, policy = attempt.job.stage, run.root / run.folder("train") / "policy.pt"
    return run_metadata.RunKey(
        experiment=run.name,
        seed=run.seed,
        stage=stage,
        fingerprint=attempt.fingerprint,
        # A later stage writes to the MLflow run of its policy; `train` makes a new policy.
        policy=run_metadata.dvc_digest(policy) if stage != "train" and policy.exists() else None,
        resumed=attempt.resumed,
        # `dvc exp run --temp` works in a copy; DVC_ROOT is the repository that has the MLflow
        # store.
        root=Path(os.environ.get("DVC_ROOT") or run.root).resolve(),
        tags=run_metadata.tags(
            run.params.run_settings(run.name),
            environment=run.experiment.environment,
            source=f"pipeline run {run.name}-{run.seed}",
        )
        | run_metadata.source_tags(run.root),
    )


def tell_pretraining(record: mlflow_run.MlflowRun, folder: Path) -> None:
    """Write the losses of the stage `pretrain` by epoch to MLflow, from files in `folder`.

    The MLflow run belongs to the stage `train`, which may run again without `pretrain`.
    """
    with (folder / "progress.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    curves = {name: [(int(row["step"]), float(row[name])) for row in rows] for name in names}
    record.points(curves, stage="pretrain")


def row_of(run: Run) -> run_metadata.RunMetadata:
    """Return the metadata that every stage of a run writes to MLflow."""
    experiment = run.experiment
    settings = run.params.run_settings(run.name)
    folders = [str(run.folder(stage)) for stage in experiment.stages]
    return run_metadata.row(
        to_mapping(settings),
        name=run.name,
        seed=run.seed,
        runtime=run.runtime(),
        facts={
            "environment": experiment.environment,
            "trainer": experiment.trainer,
            "pretrain": {} if experiment.pretrain is None else asdict(experiment.pretrain),
        },
        data=_data_of(run, settings.behaviors.values()),
        note=run_metadata.note(run.name, run.seed, folders=folders),
    )


def _data_of(run: Run, trainers: Iterable[TrainerSettings]) -> list[run_metadata.InputData]:
    name = run.experiment.environment
    built = f"build/env/{name}"
    facts = read_map(run.root / built / "environment.json")
    data = [run_metadata.InputData(name=name, path=built, context="environment", facts=facts)]
    paths = [path for trainer in trainers for _, path in demonstrations(trainer)]
    if run.experiment.demonstrations is not None:
        paths.insert(0, f"data/demos/{run.experiment.demonstrations}.demo")
    # Several reward signals may read the same file, which is listed once.
    for path in dict.fromkeys(paths):
        stem = Path(path).stem
        facts = read_map(run.root / "results/demos" / f"{stem}.json")
        data.append(
            run_metadata.InputData(name=stem, path=path, context="demonstrations", facts=facts)
        )
    return data
