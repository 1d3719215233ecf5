"""Where a run's time goes: the parts that are measured, as they add up and between summaries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeline.envs.workers import WorkerSet
    from pipeline.trainer.learner import Learner


class Stopwatch:
    """Measures the environments, and puts the learners' own measurements beside them.

    Args:
        workers: which measure the time that messages take to be read and written.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._began = time.perf_counter()
        self._stepping_s = 0.0
        self._reported: dict[str, dict[str, float]] = {}

    def timed(self, stepping: Callable[[], None]) -> None:
        """Let the environments work, and count the time as theirs."""
        began = time.perf_counter()
        stepping()
        self._stepping_s += time.perf_counter() - began

    def since_last(self, learner: Learner) -> dict[str, float]:
        """Seconds of each part since the learner's last summary, by tag."""
        now = {**self._environments(), **learner.seconds}
        before = self._reported.get(learner.name, {})
        self._reported[learner.name] = now
        return {f"Time/{part}": value - before.get(part, 0.0) for part, value in now.items()}

    def seconds(self, learners: Iterable[Learner]) -> dict[str, float]:
        """Seconds of each part since the beginning, and in total."""
        found = {"total": time.perf_counter() - self._began}
        for learner in learners:
            for part, value in learner.seconds.items():
                found[part] = found.get(part, 0.0) + value
        return found | self._environments()

    def _environments(self) -> dict[str, float]:
        wire = self._workers.codec_seconds
        return {"environment": max(self._stepping_s - wire, 0.0), "wire": wire}
