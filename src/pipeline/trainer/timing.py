"""The seconds that each part of training takes, and statistics that environments report."""

import time
from collections.abc import Callable, Iterable, Sequence

from pipeline.core.steps import Steps
from pipeline.envs.side_channels import Stats
from pipeline.envs.workers import WorkerSet
from pipeline.trainer.learner import Learner


class Stopwatch:
    """Measures the time that environments take, and adds the times that learners have measured.

    `n_exchanges` counts how often the environments got actions.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self.n_exchanges = 0
        self._workers = workers
        self._began = time.perf_counter()
        self._stepping_s = 0.0
        self._reported: dict[str, dict[str, float]] = {}

    def timed(
        self, stepping: Callable[[Sequence[int] | None], None], group: Sequence[int] | None
    ) -> None:
        """Call `stepping` with a group of workers, and add the call's time to the stepping time."""
        began = time.perf_counter()
        stepping(group)
        self._stepping_s += time.perf_counter() - began

    def since_last(self, learner: Learner) -> dict[str, float]:
        """Return the seconds of each part of training since the learner's last summary, by tag."""
        now = {**self._environments(), **learner.seconds}
        before = self._reported.get(learner.name, {})
        self._reported[learner.name] = now
        return {f"Time/{part}": value - before.get(part, 0.0) for part, value in now.items()}

    def seconds(self, learners: Iterable[Learner]) -> dict[str, float]:
        """Return the seconds of each part of training since the start, and in total."""
        seconds = {"total": time.perf_counter() - self._began}
        for learner in learners:
            for part, value in learner.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + value
        return seconds | self._environments()

    def _environments(self) -> dict[str, float]:
        wire = self._workers.codec_seconds
        # The time of steps includes the coding of messages, which is subtracted. Two clocks measure
        # these times, so the difference could be slightly negative.
        return {"environment": max(self._stepping_s - wire, 0.0), "wire": wire}


def add_reports(
    taken: Sequence[tuple[str, Learner, list[Steps]]], reports: Sequence[Stats]
) -> None:
    """Add each worker's reported statistics to the behaviors that have agents in the worker."""
    for worker, stats in enumerate(reports):
        if stats:
            # The learners are collected by name, because the teams of a behavior share a learner,
            # which must get a report only once.
            seen = {
                candidate.name: candidate
                for _, candidate, steps in taken
                if any(map(len, steps[worker]))
            }
            for learner in seen.values():
                learner.pending_stats.add_environment(stats, with_most_recent=worker == 0)
