"""How far training is, told to `pipeline run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import progress
from pipeline.tracking import names
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.tracking.tracked_run import TrackedRun


def for_run(run: TrackedRun) -> ProgressSink | None:
    """Return a sink if `pipeline run` watches this process."""
    return ProgressSink(run.max_steps) if progress.watched() else None


class ProgressSink(Sink):
    """Tells each summary's step and reward.

    Args:
        max_steps: last step of each behavior.
    """

    def __init__(self, max_steps: Mapping[str, int]) -> None:
        self._max_steps = max_steps

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Tell one summary."""
        reward = values.get(names.REWARD)
        progress.tell(step=step, of=self._max_steps.get(behavior), reward=reward)
