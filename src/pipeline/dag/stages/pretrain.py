"""The `pretrain` stage: behavioral cloning of demonstrations into the initial policy of `train`.

The stage saves nothing before its end, so a stopped attempt starts again from the beginning.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline import files
from pipeline.dag import policies, provenance, run_context
from pipeline.dag.attempt import Job, attempt_at
from pipeline.errors import StageError
from pipeline.settings import to_mapping

OUTPUTS = ("policy.pt", "metrics.json", "progress.csv")


def job_of(run: run_context.Run) -> Job:
    """Return the stage's job for a run."""
    pretrain = run.experiment.pretrain
    if pretrain is None:
        raise StageError(
            f"params.yaml: experiments.{run.name} has no section 'pretrain'; add the section to "
            "run this stage"
        )
    return Job(
        stage="pretrain",
        instance=run.instance,
        params={
            # The job depends only on the networks' settings: a new learning rate of the trainer
            # must not rerun this stage.
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
    """Pretrain the policy, and write the policy, its last losses, and the losses of each epoch."""
    import torch

    from pipeline import trainer

    job = job_of(run)
    runtime = run.runtime()
    torch.set_num_threads(runtime["torch_threads"])
    with attempt_at(job, run.root, lambda: job_of(run.reread())) as attempt:
        if attempt.done:
            return
        result = trainer.pretrain(
            [run.root / job.inputs[0]],
            run.params.network_settings(run.name),
            seed=run.seed,
            run_dir=attempt.run,
            **job.params["pretrain"],
            device=runtime["device"],
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
        rows = [f"{n},{loss:.6g},{held:.6g}" for n, (loss, held) in enumerate(result.losses, 1)]
        lines = ["step,loss,held_out_loss", *rows, ""]
        files.write_whole(attempt.out("progress.csv"), "\n".join(lines))
        # With a stage `train` the MLflow run belongs to `train`, which writes these losses to it.
        if "train" not in run.experiment.stages:
            with run_context.recorded(run, attempt) as record:
                if record is not None:
                    run_context.tell_pretraining(record, attempt.out("progress.csv").parent)


main = partial(run_context.main, __doc__, pretrain)
