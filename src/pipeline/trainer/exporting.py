"""From a checkpoint to the ONNX file that Unity loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


def publish(checkpoint: Path, folder: Path, *, label: str = "") -> dict[str, Any]:
    """Write `<Behavior><label>.onnx` into `folder`, and give what was proven of it.

    Raises:
        PipelineError: The checkpoint cannot be read, or its policy cannot be exported.
    """
    from pipeline.export.publish import publish as write
    from pipeline.export.torch_policy import describe_policy, record
    from pipeline.trainer.saved import load_policy

    saved = load_policy(checkpoint)
    seen = record(saved.policy, saved.recorded_obs, saved.recorded_masks)
    target = folder / f"{saved.behavior}{label}.onnx"
    report = write(describe_policy(saved.policy), target, recording=seen)
    return {**report.as_dict(), "step": saved.step}
