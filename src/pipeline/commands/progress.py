"""What `pipeline run` shows of the stages: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.commands.graph import Graph, Job
from pipeline.tracking.console import duration

_EACH_S = 10.0
"""Seconds between progress lines where they cannot be redrawn in place."""


class Screen:
    """Counts the stages by the events that they write into a file, and shows their progress.

    A context of `bars` draws them on a terminal. `waiting` has the jobs that are expected to run
    and have not begun, `clock` gives seconds since the epoch, as in the events.
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
        """Number of each job that has begun, in this order."""
        self.running: dict[Job, dict[str, Any]] = {}
        """Bar and start of each running job, and its last report."""
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
            file.seek(self._n_read)
            for line in file:
                if line.endswith(b"\n"):  # a stage may be in the middle of writing it
                    self._n_read += len(line)
                    event = json.loads(line)
                    self._take(Job(event["stage"], event["instance"]), event)
        now = self._clock()
        left, is_whole = self._left(now)
        least = "" if is_whole else "at least "
        ending = [] if left is None else [f"{least}{duration(left)} left in all"]
        is_due = self.bars.disable and now - self._printed_at >= _EACH_S
        for job, entry in self.running.items():
            name, parts = self._name(job), [*_parts(entry), *ending]
            done, total = entry.get("step"), entry.get("of")
            self.bars.update(entry["bar"], completed=done, total=total, description=name)
            self.bars.update(entry["bar"], text=", ".join(parts))
            if is_due:
                self._say(name, *parts)
        self.bars.refresh()

    def _take(self, job: Job, event: dict[str, Any]) -> None:
        state = event.pop("state", None)
        if state is None and job in self.running:
            self.running[job] |= event
            return
        entry = self.running.pop(job, None)
        if entry is not None:
            self.bars.remove_task(entry["bar"])
        if state == "begun":
            self.numbers.setdefault(job, len(self.numbers) + 1)
            # its inputs exist, so jobs for them that have not begun were skipped
            self.waiting -= {job, *self._graph.before.get(job, ())}
            self.failed = [name for name in self.failed if name != job]  # tried again
            self.running[job] = {"bar": self.bars.add_task("", text=""), "began": event["at"]}
            if self.bars.disable:
                self._say(self._name(job))
        elif entry is not None:
            took = event["at"] - entry["began"]
            if state == "done":
                self._took_s.setdefault(job.stage, []).append(took)
                self._say(self._name(job), f"done in {duration(took)}", *_parts(entry))
            else:
                self.failed.append(job)
                self._say(self._name(job), f"{state} after {duration(took)}")

    def _left(self, now: float) -> tuple[float | None, bool]:
        """Return an estimate of the seconds left, None while unknown, and whether it is of all.

        A stage is expected to take the mean of the same stage's runs, so one that has not run yet
        is left out.
        """
        left = {job: _seconds_left(entry, now) for job, entry in self.running.items()}
        took = {stage: list(times) for stage, times in self._took_s.items()}
        for job, seconds in left.items():
            if seconds is not None:
                took.setdefault(job.stage, []).append(now - self.running[job]["began"] + seconds)
        mean = {stage: fmean(times) for stage, times in took.items()}
        jobs = [mean[job.stage] for job in self.waiting if job.stage in mean]
        for job, seconds in left.items():
            if seconds is not None:
                jobs.append(seconds)
            elif job.stage in mean:
                jobs.append(max(0.0, mean[job.stage] - (now - self.running[job]["began"])))
        if "train" not in mean or not jobs:
            return None, False
        # At least the longest job, and at least all work divided by the cores.
        is_whole = {job.stage for job in (*self.waiting, *left)} <= mean.keys()
        return max(*jobs, sum(jobs) / self._cores), is_whole

    def _name(self, job: Job) -> str:
        return f"stage {self.numbers[job]} of {len(self.numbers) + len(self.waiting)}, {job.title}"

    def _say(self, *parts: str) -> None:
        self._printed_at = self._clock()
        self.bars.console.print(", ".join(parts), soft_wrap=True)


def _seconds_left(entry: dict[str, Any], now: float) -> float | None:
    end, rate = entry.get("of"), entry.get("rate")
    left = (end - entry["step"]) / rate - (now - entry["at"]) if end and rate else None
    return None if left is None else float(max(0.0, left))


def _parts(entry: dict[str, Any]) -> list[str]:
    """Return what a stage has reported last, for people."""
    of, rate, reward = entry.get("of"), entry.get("rate"), entry.get("reward")
    return [
        *([] if of is None else [f"step {_count(entry['step'])} of {_count(of)}"]),
        *([f"{_count(rate)} steps/s"] if rate else []),
        *([] if reward is None else [f"reward {reward:.4g}"]),
    ]


def _count(steps: float) -> str:
    """`120000` gives `120k`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if steps >= size:
            return f"{steps / size:.4g}{unit}"
    return f"{steps:.0f}"
