"""The `pretrain` stage: behavioral cloning of demonstrations, for the `train` stage to start from.

It takes seconds, so an attempt that was stopped starts afresh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline import files
from pipeline.errors import StageError
from pipeline.settings import to_mapping
from pipeline.stages.shared import policies, provenance, run_context
from pipeline.stages.shared.attempt import Job, attempt_at
from pipeline.tracking.base import Sink

OUTPUTS = ("policy.pt", "metrics.json", "progress.csv")


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    return run_context.main(argv, __doc__, pretrain)


def job_of(run: run_context.Run) -> Job:
    """Return what the stage depends on and makes."""
    pretrain = run.experiment.pretrain
    if pretrain is None:
        raise StageError(f"params.yaml: experiments.{run.name} has no section 'pretrain'")
    return Job(
        stage="pretrain",
        instance=run.instance,
        params={
            # Not all settings: a new learning rate of the trainer must not repeat this stage.
            "network": to_mapping(run.params.network_settings(run.name))["behaviors"],
            "pretrain": asdict(pretrain),
            "runtime": run.runtime(),
            "seed": run.seed,
            **run.plugins(),
        },
        inputs=(Path(f"data/demos/{run.experiment.demonstrations}.demo"),),
        outputs=tuple(run.folder("pretrain") / name for name in OUTPUTS),
        takes_long=True,
    )


def pretrain(run: run_context.Run) -> None:
    """Pretrain the policy, and write it, its losses and their curve."""
    import torch

    from pipeline import trainer

    job = job_of(run)
    runtime = run.runtime()
    torch.set_num_threads(runtime["torch_threads"])
    with attempt_at(job, run.root, lambda: job_of(run.reread())) as attempt:
        if attempt.done:
            return
        losses = _Losses()
        result = trainer.pretrain(
            [run.root / job.inputs[0]],
            run.params.network_settings(run.name),
            seed=run.seed,
            run_dir=attempt.run,
            **job.params["pretrain"],
            device=runtime["device"],
            sinks=[losses],
        )
        demonstrations = (run.experiment.demonstrations, job.inputs[0])
        made_by = provenance.of_stage(run, attempt, job.params, demonstrations=demonstrations)
        checkpoints = {result.behavior: result.checkpoint}
        policies.join(checkpoints, attempt.out("policy.pt"), history=[made_by])
        metrics = {
            "rows": result.n_rows,
            "epochs": result.epochs,
            "loss": result.loss,
            "held_out_loss": result.held_out_loss,
        }
        files.write_json(attempt.out("metrics.json"), {result.behavior: metrics})
        files.write_whole(attempt.out("progress.csv"), "\n".join([*losses.lines, ""]))
        # Otherwise the run in MLflow belongs to `train`, which copies these losses into it.
        if "train" not in run.experiment.stages:
            with run_context.recorded(run, attempt) as record:
                if record is not None:
                    run_context.tell_pretraining(record, attempt.out("progress.csv").parent)


class _Losses(Sink):
    """The loss after each epoch, on learned and on held-out steps, as lines of a CSV."""

    def __init__(self) -> None:
        self.lines = ["step,loss,held_out_loss"]

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002  # one behavior
        """Take both losses."""
        from pipeline.trainer.pretraining import CHECK_LOSS, TRAIN_LOSS  # a second, for torch

        # By name: the tracker leaves out what is not finite.
        loss, held_out = (values.get(name, math.nan) for name in (TRAIN_LOSS, CHECK_LOSS))
        self.lines.append(f"{step},{loss:.6g},{held_out:.6g}")
