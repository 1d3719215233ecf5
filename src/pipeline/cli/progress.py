"""The progress of stages in `pipeline run`: bars on a terminal, plain lines elsewhere.

Jobs that are expected to run are the jobs of dvc.yaml that a change affects.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.dag.project import checkout
from pipeline.settings.nodes import to_plain
from pipeline.settings.project.params import Params
from pipeline.settings.project.plan import plan
from pipeline.settings.yaml_file import read_yaml
from pipeline.tracking.console import duration

_EACH_S = 10.0
"""Seconds between progress lines where a line cannot be redrawn in place."""
_FILLED_IN = re.compile(r"\$\{(?:item\.)?(\w+)\}")
"""Pattern of placeholders in dvc.yaml that DVC replaces by a key or value of the runs' table."""
_OURS = re.compile(r"workflow/scripts/|pipeline\.stages")
"""Pattern of the commands of this package's stages, in a checkout and in a project."""


class Job(NamedTuple):
    """A job of the DAG: a stage and its instance, by the names in the stage's progress events."""

    stage: str
    instance: str

    @property
    def title(self) -> str:
        """The job in words, such as `train collector_ppo seed 2`."""
        name = self.instance.replace("/seed", " seed ")
        return self.stage if name == "all" else f"{self.stage} {name}"


@dataclass(frozen=True, slots=True)
class Graph:
    """The jobs of the DAG, the jobs that each job needs, and the names of jobs in `dvc status`."""

    before: Mapping[Job, frozenset[Job]]
    """All jobs that a job needs, directly or indirectly."""
    names: Mapping[str, Job]
    """Jobs by the names that `dvc status` uses."""

    def after(self, changed: Collection[str], wanted: Collection[str]) -> set[Job]:
        """Return the jobs that the `changed` stages affect.

        If `wanted` has names of jobs, only these jobs, and the jobs that they need, are returned.
        """
        # Names that are not in `names` are stages that a user has added.
        first = {self.names[name] for name in changed if name in self.names}
        ends = [self.names[name] for name in wanted if name in self.names]
        # Without `wanted` every job counts. A change of a job affects this job, and all jobs that
        # need it.
        candidates = frozenset(ends).union(*(self.before[end] for end in ends)) or {*self.before}
        return {job for job in candidates if first & {job, *self.before[job]}}


def graph_of(params: Params, root: Path) -> Graph:
    """Return the DAG of params.yaml, from the files that the stages of dvc.yaml read and write."""
    tables = plan(params)["runs"]
    # A project without DVC has the same DAG as the checkout.
    described = root / "dvc.yaml" if (root / "dvc.yaml").is_file() else checkout() / "dvc.yaml"
    stages = to_plain(read_yaml(described, what="The DAG")).get("stages") or {}
    names: dict[str, Job] = {}
    reads: dict[Job, list[str]] = {}
    makers: dict[str, set[Job]] = {}
    """Jobs by the paths that they write, and by all parent folders of these paths."""
    for family, stage in stages.items():
        body = stage.get("do", stage)
        # Stages that a user has added report no progress; `check` makes no result and always runs.
        if family == "check" or "matrix" in stage or not _OURS.search(str(body.get("cmd"))):
            continue
        # The table's name is `train_pretrained` in `${runs.train_pretrained}`.
        table = str(stage.get("foreach", "")).removeprefix("${runs.").removesuffix("}")
        for key, entry in (tables.get(table, {}) if table else {"": {}}).items():
            job = Job(family.partition("_")[0], _instance(key, entry))
            names[f"{family}@{key}" if table else family] = job
            values = {**entry, "key": key}
            reads[job] = _paths(body, ("deps",), values)
            for path in _paths(body, ("outs", "metrics", "plots"), values):
                for place in (path, *map(str, PurePosixPath(path).parents)):
                    makers.setdefault(place, set()).add(job)
    # A job needs the jobs that write into the paths that it reads.
    needs = {
        job: {maker for path in read for maker in makers.get(path, ())}
        for job, read in reads.items()
    }
    before: dict[Job, frozenset[Job]] = {}
    # In topological order, a job comes after the jobs that it needs, so `before` has these jobs.
    for job in TopologicalSorter(needs).static_order():
        before[job] = frozenset(needs[job]).union(*(before[needed] for needed in needs[job]))
    return Graph(before, names)


def _instance(key: str, entry: Mapping[str, Any]) -> str:
    """Return the name that progress events give to a job's instance, for an entry of the runs."""
    if not key:
        return "all"
    if "seed" in entry:
        return f"{entry['experiment']}/seed{entry['seed']}"
    return str(entry.get("trial", key))


def _paths(
    stage: Mapping[str, Any], lists: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Return the paths in the given lists of a stage of dvc.yaml; `values` fills placeholders."""
    entries = [entry for name in lists for entry in stage.get(name, ())]
    # An entry with options is a map with the path as its only key.
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return [
        _FILLED_IN.sub(lambda match: str(values.get(match[1], match[0])), name) for name in names
    ]


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
        now = self._clock()
        left, is_whole = self._left(now)
        least = "" if is_whole else "at least "
        ending = [] if left is None else [f"{least}{duration(left)} left in all"]
        # Where bars are disabled, as in a log file, a line is printed from time to time.
        is_due = self.bars.disable and now - self._printed_at >= _EACH_S
        for job, entry in self.running.items():
            name, parts = self._name(job), [*_parts(entry), *ending]
            done, total = entry.get("step"), entry.get("of")
            self.bars.update(entry["bar"], completed=done, total=total, description=name)
            self.bars.update(entry["bar"], text=", ".join(parts))
            if is_due:
                self._print_line(name, *parts)
        self.bars.refresh()

    def _apply_event(self, job: Job, event: dict[str, Any]) -> None:
        state = event.pop("state", None)
        # An event without a state is a report of progress.
        if state is None and job in self.running:
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

    def _left(self, now: float) -> tuple[float | None, bool]:
        """Return the estimated seconds left, and whether this estimate counts all stages.

        The estimate is None if no time of a training is known, or if no job with a known time is
        left.

        A job is expected to take the mean time of its stage's other jobs; stages without a time are
        not counted.
        """
        left = {job: _seconds_left(entry, now) for job, entry in self.running.items()}
        took = {stage: list(times) for stage, times in self._took_s.items()}
        for job, seconds in left.items():
            if seconds is not None:
                took.setdefault(job.stage, []).append(now - self.running[job]["began"] + seconds)
        mean = {stage: fmean(times) for stage, times in took.items()}
        # `jobs` has the expected seconds of each job that waits or runs.
        jobs = [mean[job.stage] for job in self.waiting if job.stage in mean]
        for job, seconds in left.items():
            if seconds is not None:
                jobs.append(seconds)
            elif job.stage in mean:
                jobs.append(max(0.0, mean[job.stage] - (now - self.running[job]["began"])))
        # Without a measured time of training, the longest stage, an estimate would mislead.
        if "train" not in mean or not jobs:
            return None, False
        is_whole = {job.stage for job in (*self.waiting, *left)} <= mean.keys()
        # The rest takes at least as long as the longest job, and as all work divided by the cores.
        return max(*jobs, sum(jobs) / self._cores), is_whole

    def _name(self, job: Job) -> str:
        return f"stage {self.numbers[job]} of {len(self.numbers) + len(self.waiting)}, {job.title}"

    def _print_line(self, *parts: str) -> None:
        self._printed_at = self._clock()
        self.bars.console.print(", ".join(parts), soft_wrap=True)


def _seconds_left(entry: dict[str, Any], now: float) -> float | None:
    end, rate = entry.get("of"), entry.get("rate")
    # The time since the report is subtracted, because the job went on meanwhile.
    left = (end - entry["step"]) / rate - (now - entry["at"]) if end and rate else None
    return None if left is None else float(max(0.0, left))


def _parts(entry: dict[str, Any]) -> list[str]:
    of, rate, reward = entry.get("of"), entry.get("rate"), entry.get("reward")
    return [
        *([] if of is None else [f"step {_count(entry['step'])} of {_count(of)}"]),
        *([f"{_count(rate)} steps/s"] if rate else []),
        *([] if reward is None else [f"reward {reward:.4g}"]),
    ]


def _count(steps: float) -> str:
    """Return a number of steps in short form: 120000 as `120k`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if steps >= size:
            return f"{steps / size:.4g}{unit}"
    return f"{steps:.0f}"
