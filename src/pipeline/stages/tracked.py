"""What the stages of an experiment have in common: which run they are, and its MLflow record."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.stages import common, process
from pipeline.tracking import mlflow_run, mlflow_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.settings.params import ExperimentParams, Params

_QUICK_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One experiment with one seed."""

    root: Path
    params: Params
    name: str
    """Of the experiment."""
    seed: int

    @property
    def experiment(self) -> ExperimentParams:
        """Its section of params.yaml."""
        return self.params.experiment(self.name)

    def folder(self, stage: str) -> Path:
        """Where a stage's results lie, relative to the repository."""
        return Path("results") / stage / self.name / f"seed{self.seed}"

    @property
    def instance(self) -> str:
        """As jobs name it."""
        return f"{self.name}/seed{self.seed}"

    def runtime(self) -> dict[str, Any]:
        """The section of that name, with the threads that the experiment asks for."""
        runtime = self.params.runtime
        threads = self.experiment.resources.threads or runtime.torch_threads
        return {"torch_threads": threads, "device": runtime.device}

    def learners(self) -> dict[str, int]:
        """How many processes train the run together, where that is a part of the result."""
        n = self.experiment.learners
        return {} if n == 1 else {"learners": n}


def main(argv: Sequence[str], description: str | None, work: Callable[[Run], None]) -> int:
    """Command line of a stage that belongs to an experiment and a seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("experiment", help="a name under `experiments` in params.yaml")
    parser.add_argument("--seed", type=int, required=True, help="one of the experiment's seeds")
    arguments = parser.parse_args(argv)
    return process.run(lambda: work(find(common.checkout(), arguments.experiment, arguments.seed)))


def find(root: Path, name: str, seed: int) -> Run:
    """The run that params.yaml describes.

    Raises:
        PipelineError: params.yaml has no such experiment or seed, or the plan is out of date.
    """
    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    run = Run(root=root, params=params, name=name, seed=seed)
    seeds = {str(known): known for known in run.experiment.seeds}
    common.named(seeds, str(seed), f"experiments.{name}.seeds")
    return run


def algorithm_of(run: Run) -> str:
    """The trainer types of the experiment's behaviors."""
    settings = run.params.run_settings(run.name)
    return " ".join(sorted({str(one.trainer_type) for one in settings.behaviors.values()}))


@contextlib.contextmanager
def recorded(
    run: Run, attempt: common.Attempt, *, algorithm: str, prefix: bool = False
) -> Iterator[mlflow_run.MlflowRun | None]:
    """An MLflow run for the block, or None when tracking is off; never in the stage's way."""
    if not mlflow_run.enabled():
        yield None
        return
    inputs = {f"input.{path}": digest[:16] for path, digest in attempt.digests.items()}
    store_root = Path(os.environ.get("DVC_ROOT") or run.root).resolve()
    key = mlflow_run.RunKey(
        experiment=run.name,
        seed=run.seed,
        stage=attempt.job.stage,
        fingerprint=attempt.fingerprint,
        root=store_root,
        record=run.root / common.WORK / "mlflow" / f"{run.name}-seed{run.seed}.json",
        tags={
            "pipeline.algorithm": algorithm,
            **mlflow_store.source_tags(run.root),
            **{mlflow_store.clean(name): digest for name, digest in inputs.items()},
        },
    )
    tracking = mlflow_run.MlflowRun(key, prefix=prefix)
    tracking.params(attempt.job.params)
    try:
        yield tracking
    except KeyboardInterrupt:
        tracking.close(status="KILLED", timeout_s=_QUICK_S)
        raise
    except BaseException:
        tracking.close(status="FAILED", timeout_s=_QUICK_S)
        raise
    else:
        tracking.close()
    finally:
        attempt.facts["mlflow_run_id"] = tracking.run_id
        attempt.facts["mlflow_lost"] = tracking.lost
