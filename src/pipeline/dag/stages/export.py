"""The `export` stage: write the trained policy as ONNX, and check that both give equal actions."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.dag import policies, provenance, run_context
from pipeline.dag.attempt import Job, attempt_at, read_map
from pipeline.tracking import mlflow_run, run_metadata


def job_of(run: run_context.Run) -> Job:
    """Return the stage's job for a run."""
    return Job(
        stage="export",
        instance=run.instance,
        params={"runtime": run.runtime()},
        inputs=(run.folder("train") / "policy.pt",),
        outputs=(run.folder("export"),),
    )


def export(run: run_context.Run) -> None:
    """Make a folder with `<Behavior>.onnx` for each behavior and the reports of the checks."""
    import torch

    # The number of threads decides the order of additions, and so the rounding.
    torch.set_num_threads(run.params.runtime.torch_threads)
    job = job_of(run)
    with (
        attempt_at(job, run.root, lambda: job_of(run.reread())) as attempt,
        run_context.recorded(run, attempt) as record,
    ):
        folder = attempt.out(job.outputs[0].name)
        # Checkpoints are written into `run`, because the declared folder may only have the ONNX
        # files and their report.
        checkpoints = policies.split(run.root / job.inputs[0], attempt.run)
        history = [
            *policies.history(run.root / job.inputs[0]),
            provenance.of_stage(run, attempt, job.params),
        ]
        made_from = {run_metadata.POLICY_DIGEST: run_metadata.dvc_digest(run.root / job.inputs[0])}
        reports = {
            name: publish(path, folder, history=history) | made_from
            for name, path in checkpoints.items()
        }
        files.write_json(folder / "export.json", reports)
        if record is not None:
            tell(record, run, folder)


main = partial(run_context.main, __doc__, export, short=True)


def tell(record: mlflow_run.MlflowRun, run: run_context.Run, folder: Path) -> None:
    """Write the policies in a folder to MLflow."""
    record.made(folder)
    for name in read_map(folder / "export.json"):
        record.model(files.named(folder, name, ".onnx"), environment=run.experiment.environment)


def publish(
    checkpoint: Path,
    folder: Path,
    *,
    label: str = "",
    history: Sequence[provenance.Record] = (),
) -> dict[str, Any]:
    """Write `<Behavior><label>.onnx` into `folder`, and return the report of its checks.

    Raises:
        PipelineError: The checkpoint cannot be read, or its policy cannot be exported.
    """
    from pipeline.export.publish import publish as write
    from pipeline.export.publish import record
    from pipeline.trainer.checkpoints.restore import load_policy

    saved = load_policy(checkpoint)
    # The export is compared with the policy on observations and masks recorded during training.
    recording = record(saved.policy, saved.recorded_obs, saved.recorded_masks)
    target = files.named(folder, saved.behavior, f"{label}.onnx")
    if history and not any("interrupted_at_steps" in entry for entry in history):
        # The record of the stage `train` already has the steps at which the run was interrupted; a
        # record of `pipeline learn` may lack them.
        history = [*history[:-1], provenance.interrupted(history[-1], saved.interrupted)]
    metadata = {provenance.KEY: provenance.text(history)} if history else {}
    report = write(saved.policy, target, recording=recording, metadata=metadata)
    return {**asdict(report), "step": saved.step}
