"""The `train` stage: train the policy of an experiment with one seed."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.algos.process_group import launched
from pipeline.dag import policies, provenance, run_context
from pipeline.dag.attempt import Attempt, Job, attempt_at, read_map
from pipeline.envs import executable
from pipeline.errors import CheckpointError
from pipeline.settings import RunSettings
from pipeline.tracking import names
from pipeline.tracking.base import Callback
from pipeline.tracking.curve_csv import read_points
from pipeline.tracking.sinks import TrackedRun, standard_sinks

_log = logging.getLogger(__name__)

OUTPUTS = ("policy.pt", "metrics.json", "progress.csv")


def main(argv: Sequence[str]) -> int:
    """Run the stage with command-line arguments; `torchrun` may start several processes."""
    # torchrun starts this script once per rank. Only rank 0 does the engine's job: it holds the
    # lock and writes the temporary files and the outputs.
    if launched()[0] > 0:
        run_context.same_kernels(argv)
        from pipeline.trainer.worker import work

        return work()
    return run_context.main(__doc__, train, argv)


def job_of(run: run_context.Run) -> Job:
    """Return the stage's job for a run."""
    inputs = [Path(run.experiment.trainer), executable.folder_of(run.experiment.environment)]
    if "pretrain" in run.experiment.stages:
        inputs.append(run.folder("pretrain") / "policy.pt")
        inputs.append(Path(f"data/demos/{run.experiment.demonstrations}.demo"))
    if run.experiment.chosen is not None:
        inputs.append(run.experiment.chosen)
    return Job(
        stage="train",
        instance=run.instance,
        params={
            "overrides": run.params.resolved_overrides(run.name),
            "runtime": run.runtime(),
            "seed": run.seed,
            **run.learners(),
            **run.plugins(),
        },
        inputs=tuple(inputs),
        outputs=tuple(run.folder("train") / name for name in OUTPUTS),
        takes_long=True,
    )


def train(run: run_context.Run) -> None:
    """Train the policy, and write the policy, its metrics and its learning curve."""
    with attempt_at(job_of(run), run.root, lambda: job_of(run.reread())) as attempt:
        # A finished attempt already has copies of its outputs; to train again could take hours.
        if attempt.done:
            return
        build = executable.load(run.root / executable.folder_of(run.experiment.environment))
        settings = run.params.run_settings(run.name, env_path=str(build.file))
        _restart_if_not_exact(run, attempt, settings)
        started_from = None
        if "pretrain" in run.experiment.stages:
            policy = run.root / run.folder("pretrain") / "policy.pt"
            # The trainer takes a checkpoint per behavior; policy.pt has all of them in one file,
            # because engines must know the outputs before the behaviors are known.
            started_from = policies.split(policy, attempt.run / "pretrained")
        metrics = _train(run, attempt, settings, build, started_from)
        files.write_json(attempt.out("metrics.json"), metrics)
        shutil.copyfile(attempt.run / "progress.csv", attempt.out("progress.csv"))


def _restart_if_not_exact(run: run_context.Run, attempt: Attempt, settings: RunSettings) -> None:
    """With `exact: required`, empty the folder of an attempt that cannot be resumed exactly."""
    from pipeline.trainer.checkpoints.restore import resumes_exactly

    if not attempt.resumed or run.experiment.exact != "required":
        return
    # A checkpoint that cannot be read cannot be resumed exactly either.
    with contextlib.suppress(CheckpointError):
        n_learners, device = run.experiment.learners, run.runtime()["device"]
        if resumes_exactly(attempt.run, settings, n_learners=n_learners, device=device):
            return
    text = "%s: cannot be resumed exactly, as `exact: required` demands; starting from step 0"
    _log.info(text, run.instance)
    shutil.rmtree(attempt.run)
    attempt.run.mkdir()
    attempt.resumed = False


def _train(
    run: run_context.Run,
    attempt: Attempt,
    settings: RunSettings,
    build: executable.Build,
    started_from: Mapping[str, Path] | None,
) -> dict[str, Any]:
    from pipeline import trainer

    runtime = run.runtime()
    # Key and row are computed once for MLflow and all other sinks, because this computation calls
    # git and resolves every setting.
    key, row = run_context.key_of(run, attempt), run_context.row_of(run)
    # With several behaviors, each metric's name begins with its behavior.
    prefix = len(settings.behaviors) > 1
    with run_context.recorded(run, attempt, prefix=prefix, key=key, row=row) as record:
        tracked = TrackedRun(
            folder=attempt.run,
            max_steps={name: behavior.max_steps for name, behavior in settings.behaviors.items()},
            settings=settings,
            key=key,
            row=row,
            record=record,
        )
        callbacks: list[Callback] = [*standard_sinks(tracked, run.params.track)]
        if record is not None and started_from is not None:
            run_context.tell_pretraining(record, run.root / run.folder("pretrain"))
        pruner = _pruner(run)
        if pruner is not None:
            callbacks.append(pruner)
        job = trainer.JobSpec(
            build.file,
            settings,
            seed=run.seed,
            run_dir=attempt.run,
            num_envs=settings.env_settings.num_envs,
            env_args=build.args,
            init_from=started_from or {},
            # The pretrained policy has the same network, so every tensor must fit.
            whole_weights=True,
            log_folder=attempt.run / "logs",
            resume=attempt.resumed,
            torch_threads=runtime["torch_threads"],
        )
        device, n_learners = runtime["device"], run.experiment.learners
        result = trainer.train(job, device=device, callbacks=callbacks, learners=n_learners)
        attempt.facts["pruned"] = pruner is not None and pruner.stop
        checkpoints = {name: behavior.checkpoint for name, behavior in result.behaviors.items()}
        history = _history(run, attempt, result.interrupted)
        policies.join(checkpoints, attempt.out("policy.pt"), history=history)
        metrics = {name: behavior.numbers() for name, behavior in result.behaviors.items()}
        # Times go to stage.json, which no engine tracks, because outputs must be reproducible.
        attempt.facts["seconds"] = dict(result.seconds)
        attempt.facts["interrupted_at_steps"] = list(result.interrupted)
        if record is not None:
            record.trained(
                metrics,
                curve=read_points(attempt.run / "progress.csv"),
                seconds=None if attempt.resumed else result.seconds["total"],
                interrupted=result.interrupted,
            )
            record.made(attempt.out("policy.pt"))
    return metrics


class Pruner(Callback):
    """Ends a sweep's trial at a summary with a reward below the median of earlier trials.

    Only rewards at the same step are compared, so a resumed run ends at the same step. `medians`
    has the median reward by step. `behavior` names the behavior that is compared; None for the only
    behavior.
    """

    def __init__(self, medians: Mapping[int, float], behavior: str | None) -> None:
        self._medians = medians
        self._behavior = behavior

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """End the trial if the summary's reward is below the median at the same step."""
        if self._behavior in (None, behavior.partition("?")[0]):
            # If no episode ended in the period, there is no reward: the trial continues.
            reward = values.get(names.REWARD, math.inf)
            self.stop = self.stop or reward < self._medians.get(step, -math.inf)


def _pruner(run: run_context.Run) -> Pruner | None:
    if run.experiment.chosen is None:
        return None
    below = read_map(run.root / run.experiment.chosen).get("prune_below")
    if not below:
        return None
    behavior = run.params.sweeps[run.name.partition("/")[0]].behavior
    return Pruner({int(step): reward for step, reward in below}, behavior)


def _history(
    run: run_context.Run, attempt: Attempt, interrupted: Sequence[int]
) -> list[provenance.Record]:
    environment = run.experiment.environment
    read = (environment, executable.folder_of(environment))
    parameters = provenance.train_parameters(run)
    made_by = provenance.of_stage(run, attempt, parameters, environment=read)
    before = []
    if "pretrain" in run.experiment.stages:
        before = policies.history(run.root / run.folder("pretrain") / "policy.pt")
    return [*before, provenance.interrupted(made_by, interrupted)]
