"""The progress of stages in `pipeline run`: bars on a terminal, plain lines elsewhere."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.dag.graph import Graph, Job
from pipeline.tracking.console import duration

_EACH_S = 10.0
"""Seconds between progress lines where a line cannot be redrawn in place."""


class Screen:
    """Reads the events that stages write into a file, and shows the stages' progress.

    `bars` is a context manager that draws bars on a terminal. `waiting` has the jobs that are
    expected to run and have not begun; `clock` returns seconds since the epoch, as in the events.
    """

    def __init__(
        self,
        graph: Graph,
        waiting: set[Job],
        events: Path,
        *,
        cores: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.waiting, self.failed = waiting, list[Job]()
        self.numbers: dict[Job, int] = {}
        """Numbers of the jobs that have begun, counted in the order of the jobs' starts."""
        self.running: dict[Job, dict[str, Any]] = {}
        """Bar, start and last report of each running job."""
        self._graph, self._cores, self._clock = graph, cores, clock
        self._took_s: dict[str, list[float]] = {}
        self._events, self._n_read, self._printed_at = events, 0, clock()
        stream = stream or sys.stderr
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream, highlight=False, markup=False, emoji=False),
            auto_refresh=False,
            transient=True,
            disable=not stream.isatty(),
        )

    def update(self) -> None:
        """Show the events since the last call."""
        with self._events.open("rb") as file:
            # Only new lines are read. The position is counted in bytes, because a line may be
            # incomplete and is then read again.
            file.seek(self._n_read)
            for line in file:
                if line.endswith(b"\n"):  # a line without its end is still being written
                    self._n_read += len(line)
                    event = json.loads(line)
                    self._apply_event(Job(event["stage"], event["instance"]), event)
        left = self._left(now := self._clock())
        # Where bars are disabled, as in a log file, a line is printed from time to time.
        is_due = self.bars.disable and now - self._printed_at >= _EACH_S
        for job, entry in self.running.items():
            name, parts = self._name(job), [*_parts(entry), *left]
            self.bars.update(entry["bar"], description=name, text=", ".join(parts))
            self.bars.update(entry["bar"], completed=entry.get("step"), total=entry.get("of"))
            if is_due:
                self._print_line(name, *parts)
        self.bars.refresh()

    def _apply_event(self, job: Job, event: dict[str, Any]) -> None:
        state = event.pop("state", None)
        if state is None and job in self.running:  # a report of progress
            self.running[job] |= event
            return
        entry = self.running.pop(job, None)
        if entry is not None:
            self.bars.remove_task(entry["bar"])
        if state == "begun":
            self.numbers.setdefault(job, len(self.numbers) + 1)
            # The job's inputs exist, so the engine has skipped earlier jobs that have not begun.
            self.waiting -= {job, *self._graph.before.get(job, ())}
            # The engine tries a failed job again, so the job no longer counts as failed.
            self.failed = [name for name in self.failed if name != job]
            self.running[job] = {"bar": self.bars.add_task("", text=""), "began": event["at"]}
            if self.bars.disable:
                self._print_line(self._name(job))
        elif entry is not None:
            took = event["at"] - entry["began"]
            if state == "done":
                self._took_s.setdefault(job.stage, []).append(took)
                self._print_line(self._name(job), f"done in {duration(took)}", *_parts(entry))
            else:
                self.failed.append(job)
                self._print_line(self._name(job), f"{state} after {duration(took)}")

    def _left(self, now: float) -> list[str]:
        """Return a text with the estimated time left, from mean times of stages; [] if unknown."""
        left: dict[Job, float] = {}
        took = {stage: list(times) for stage, times in self._took_s.items()}
        for job, entry in self.running.items():
            if entry.get("of") and entry.get("rate"):
                end = entry["at"] + (entry["of"] - entry["step"]) / entry["rate"]
                left[job] = max(0.0, end - now)
                took.setdefault(job.stage, []).append(now - entry["began"] + left[job])
        began = dict.fromkeys(self.waiting, now)
        began |= {job: entry["began"] for job, entry in self.running.items()}
        for job in began.keys() - left.keys():
            if job.stage in took:
                left[job] = max(0.0, fmean(took[job.stage]) - (now - began[job]))
        # Without a measured time of training, the longest stage, an estimate would mislead.
        if "train" not in took or not left:
            return []
        # The rest takes at least as long as the longest job, and as all work divided by the cores.
        seconds = max(*left.values(), sum(left.values()) / self._cores)
        least = "at least " if began.keys() - left.keys() else ""
        return [f"{least}{duration(seconds)} left in all"]

    def _name(self, job: Job) -> str:
        return f"stage {self.numbers[job]} of {len(self.numbers) + len(self.waiting)}, {job.title}"

    def _print_line(self, *parts: str) -> None:
        self._printed_at = self._clock()
        self.bars.console.print(", ".join(parts), soft_wrap=True)


def _parts(entry: dict[str, Any]) -> list[str]:
    of, rate, reward = entry.get("of"), entry.get("rate"), entry.get("reward")
    return [
        *([] if of is None else [f"step {_count(entry['step'])} of {_count(of)}"]),
        *([f"{_count(rate)} steps/s"] if rate else []),
        *([] if reward is None else [f"reward {reward:.4g}"]),
    ]


def _count(steps: float) -> str:
    """Return a number of steps in short form: 120000 as `120k`."""
    size, unit = (1e6, "M") if steps >= 1e6 else (1e3, "k")
    return f"{steps / size:.4g}{unit}" if steps >= size else f"{steps:.0f}"
