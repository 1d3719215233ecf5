"""What a person sees of the DAG while an engine works: a line when a stage begins and ends.

The stages themselves report their progress (`pipeline.progress`), whichever engine starts them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from pipeline.settings.nodes import to_plain
from pipeline.settings.plan import plan
from pipeline.settings.yaml_file import read_yaml
from pipeline.stages.shared.attempt import WORK, read_map
from pipeline.stages.shared.project import checkout
from pipeline.tracking.console import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from rich.live import Live

    from pipeline.settings.params import Params

_FILLED_IN = re.compile(r"\$\{(?:item\.)?(\w+)\}")
"""Placeholders that DVC fills in for each run of a stage: a key or value of the table of runs."""
_OURS = re.compile(r"workflow/scripts/|pipeline\.stages")
"""Commands of our own stages, in a checkout and in a project of `pipeline init`."""
_EACH_S = 10.0
"""Seconds between progress lines where they cannot be redrawn in place."""
_SHORT_S = 5.0
"""Assumed seconds of a stage without training, until one of its kind has ended."""


class Job(NamedTuple):
    """A stage's instance, as the stage reports it."""

    stage: str
    instance: str

    @property
    def title(self) -> str:
        """For people: `train collector_ppo seed 2`."""
        name = self.instance.replace("/seed", " seed ")
        return self.stage if name == "all" else f"{self.stage} {name}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Jobs of the DAG, the jobs that each needs, and the engines' names for them."""

    needs: Mapping[Job, frozenset[Job]]
    names: Mapping[str, Job]
    """Jobs by the names that `dvc status` uses."""

    def before(self, job: Job) -> set[Job]:
        """Return all jobs that a job needs, directly or not."""
        jobs: set[Job] = set()
        waiting = [job]
        while waiting:
            more = self.needs.get(waiting.pop(), frozenset()) - jobs
            jobs |= more
            waiting += more
        return jobs

    def after(self, changed: Collection[str], wanted: Collection[str]) -> set[Job]:
        """Return the jobs that changes reach; with `wanted`, only those that it needs."""
        first = {self.names[name] for name in changed if name in self.names}
        ends = [self.names[name] for name in wanted if name in self.names]
        candidates = (
            {job for end in ends for job in (end, *self.before(end))} if ends else self.needs
        )
        return {job for job in candidates if job in first or first & self.before(job)}


def graph_of(params: Params, root: Path) -> Graph:
    """Return the DAG of params.yaml, by the files that the stages of dvc.yaml read and write."""
    tables = plan(params)["runs"]
    described = root / "dvc.yaml" if (root / "dvc.yaml").is_file() else checkout() / "dvc.yaml"
    stages = to_plain(read_yaml(described, what="The DAG")).get("stages") or {}
    names: dict[str, Job] = {}
    reads: dict[Job, list[str]] = {}
    makers: dict[str, set[Job]] = {}
    """Jobs by each path that they write, and by the folders above it."""
    for family, stage in stages.items():
        body = stage.get("do", stage)
        # A user's own stage reports no progress; `check` makes no result, and always runs.
        if family == "check" or "matrix" in stage or not _OURS.search(str(body.get("cmd"))):
            continue
        table = str(stage.get("foreach", "")).removeprefix("${runs.").removesuffix("}")
        entries = tables.get(table, {}) if table else {"": {}}
        for key, entry in entries.items():
            job = Job(family.partition("_")[0], _instance(key, entry))
            names[f"{family}@{key}" if table else family] = job
            values = {**entry, "key": key}
            reads[job] = _paths(body, ("deps",), values)
            for path in _paths(body, ("outs", "metrics", "plots"), values):
                for place in (path, *map(str, PurePosixPath(path).parents)):
                    makers.setdefault(place, set()).add(job)
    needs = {
        job: frozenset(maker for path in read for maker in makers.get(path, ()))
        for job, read in reads.items()
    }
    return Graph(needs, names)


def _instance(key: str, entry: Mapping[str, Any]) -> str:
    """Return a stage's own name for its run of a table's entry."""
    if not key:
        return "all"
    if "seed" in entry:
        return f"{entry['experiment']}/seed{entry['seed']}"
    return str(entry.get("trial", key))


def _paths(
    stage: Mapping[str, Any], lists: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Return the paths in lists of a stage of dvc.yaml, with placeholders filled in."""
    entries = [entry for name in lists for entry in stage.get(name, ())]
    # with options an entry is a map of one key
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return [
        _FILLED_IN.sub(lambda match: str(values.get(match[1], match[0])), name) for name in names
    ]


@dataclass(slots=True)
class _Running:
    began: float
    first: tuple[float, float]
    """Time and step from which the speed is estimated."""
    step: float = 0.0
    of: float | None = None
    reward: float | None = None
    spoke: float = 0.0
    """Time of the last report of its step."""

    def left(self, now: float) -> float | None:
        """Return the seconds to the last step; None while unknown."""
        (at, step), end = self.first, self.of
        if end is None or self.step <= step or now <= at:
            return None
        # The speed between two reports, not up to now: steps since the last one are not known.
        rate = (self.step - step) / (self.spoke - at)
        return max(0.0, (end - self.step) / rate - (now - self.spoke))


@dataclass(kw_only=True, slots=True)
class Watch:
    """Progress of all jobs, by the events that the stages report."""

    graph: Graph
    waiting: set[Job]
    """Jobs that are expected to run, and have not begun."""
    cores: int = 1
    earlier: Mapping[Job, float] = field(default_factory=dict)
    """Seconds that jobs took in earlier runs."""
    numbers: dict[Job, int] = field(default_factory=dict)
    """Number of each job that has begun, in this order."""
    running: dict[Job, _Running] = field(default_factory=dict)
    took: dict[Job, float] = field(default_factory=dict)
    """Seconds of the jobs that are done."""
    failed: list[Job] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Record an event of a stage; return a line if it begins or ends."""
        job, at = Job(event["stage"], event["instance"]), float(event["at"])
        state = event.get("state")
        if state == "begun":
            self.numbers.setdefault(job, len(self.numbers) + 1)
            # its inputs exist, so jobs for them that have not begun were skipped
            self.waiting -= {job, *self.graph.before(job)}
            self.running[job] = _Running(at, (at, 0.0))
            self.failed = [name for name in self.failed if name != job]  # tried again
            return self._head(job)
        entry = self.running.get(job)
        if entry is None:
            return None
        if state is not None:
            del self.running[job]
            if state != "done":
                self.failed.append(job)
                return f"{self._head(job)}, {state} after {duration(at - entry.began)}"
            self.took[job] = at - entry.began
            return ", ".join(
                [self._head(job), f"done in {duration(at - entry.began)}", *_at(entry)]
            )
        if entry.spoke and entry.first[1] == 0.0:
            entry.first = (entry.spoke, entry.step)  # leaves out start-up and a resumed run's steps
        entry.step, entry.of, entry.reward, entry.spoke = (
            event["step"],
            event["of"],
            event["reward"],
            at,
        )
        return None

    def lines(self, now: float) -> list[str]:
        """Return a line for each job that runs."""
        left = self.left(now)
        ending = [] if left is None else [f"{duration(left)} left in all"]
        return [
            ", ".join([self._head(j), *_at(entry), *ending]) for j, entry in self.running.items()
        ]

    def left(self, now: float) -> float | None:
        """Return an estimate of the seconds left for all jobs; None while unknown."""
        jobs: list[float] = []
        for job, entry in self.running.items():
            by_step, expected = entry.left(now), self._expected(job)
            if by_step is None and expected is None:
                return None
            jobs.append(
                by_step
                if by_step is not None
                else max(0.0, (expected or 0.0) - (now - entry.began))
            )
        for job in self.waiting:
            expected = self._expected(job, now)
            if expected is None:
                return None
            jobs.append(expected)
        # At least the longest job, and at least all work divided by the cores.
        return max(*jobs, sum(jobs) / self.cores) if jobs else None

    def _expected(self, job: Job, now: float | None = None) -> float | None:
        """Return a job's seconds: by its last run, or the mean of its experiment or stage."""
        if job in self.earlier:
            return self.earlier[job]
        seconds = dict(self.took)
        if now is not None:
            for other, entry in self.running.items():
                if (left := entry.left(now)) is not None:
                    seconds[other] = now - entry.began + left
        alike = {other: s for other, s in seconds.items() if other.stage == job.stage}
        name = job.instance.rpartition("/")[0]
        same = [s for other, s in alike.items() if other.instance.rpartition("/")[0] == name]
        samples = same or list(alike.values())
        if samples:
            return sum(samples) / len(samples)
        # Training takes seconds or days, so a guess would mislead; other stages take seconds.
        return None if job.stage == "train" else _SHORT_S

    def _head(self, job: Job) -> str:
        total = len(self.numbers) + len(self.waiting)
        return f"stage {self.numbers[job]} of {total}, {job.title}"


def _at(entry: _Running) -> list[str]:
    parts = []
    if entry.of is not None:
        parts.append(f"step {_count(entry.step)} of {_count(entry.of)}")
    if entry.reward is not None:
        parts.append(f"reward {entry.reward:.4g}")
    return parts


def _count(steps: float) -> str:
    """`120000` gives `120k`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if steps >= size:
            return f"{steps / size:.4g}{unit}"
    return f"{steps:.0f}"


def earlier_seconds(root: Path, jobs: Iterable[Job]) -> dict[Job, float]:
    """Return how long jobs took when they last ran from start to end."""
    seconds = {}
    for job in jobs:
        facts = read_map(root / WORK / job.stage / job.instance / "stage.json")
        # A resumed attempt's duration is a part of the job's.
        if not facts.get("resumed", True) and isinstance(facts.get("duration_s"), float):
            seconds[job] = facts["duration_s"]
    return seconds


class Screen:
    """Prints the progress lines; on a terminal those of running jobs are redrawn in place.

    Args:
        watch: gives the lines.
        events: the file to which stages write their events.
        stream: where to print; standard error if not given.
        clock: seconds since the epoch, as in the events.
    """

    def __init__(
        self,
        watch: Watch,
        events: Path,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._watch, self._clock = watch, clock
        self._stream = stream or sys.stderr
        self._events = events.open(encoding="utf-8")
        self._printed_at = clock()
        self._rest = ""
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, highlight=False, markup=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Show the events since the last call."""
        # A stage may be in the middle of writing a line.
        *complete, self._rest = (self._rest + self._events.read()).split("\n")
        for line in complete:
            event = json.loads(line)
            news = self._watch.take(event)
            if news and (self._live is None or event["state"] != "begun"):
                self._say(news)
        now = self._clock()
        if self._live is not None:
            from rich.text import Text

            lines = self._watch.lines(now)
            text = Text("\n".join(lines), overflow="ellipsis", no_wrap=True)
            self._live.update(text, refresh=True)
        elif now - self._printed_at >= _EACH_S:
            for line in self._watch.lines(now):
                self._say(line)

    def _say(self, line: str) -> None:
        self._printed_at = self._clock()
        if self._live is not None:
            self._live.console.print(line)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()


def last_lines(path: Path, n: int = 15) -> list[str]:
    """Return the end of a log; nothing when it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, n)]
    except OSError:
        return []
