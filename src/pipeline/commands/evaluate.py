"""`pipeline evaluate`: episodes of one ONNX policy in any executable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.stages.evaluate import metrics_of, play
from pipeline.stages.executable import Build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def evaluate(model: Path, env: Path, *, episodes: int, seed: int, args: Sequence[str]) -> str:
    """A line for each behavior.

    Raises:
        PipelineError: The model cannot be run, or the environment cannot be used.
    """
    build = Build(file=env, args=tuple(args), simulator=None)
    metrics = metrics_of(play({model.stem: model}, build, episodes=episodes, seed=seed))
    return "\n".join(
        f"{behavior}: {one['episodes']} episodes, mean return {one['mean_return']:.3f} "
        f"({one['min_return']:.3f} to {one['max_return']:.3f}), "
        f"mean length {one['mean_length']:.1f}"
        for behavior, one in metrics.items()
    )
