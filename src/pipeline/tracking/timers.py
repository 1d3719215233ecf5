"""`timers.json`: where a run's time went, and the range of its numbers, in ML-Agents' tree form."""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.envs.unity import UnityEnvironment
from pipeline.tracking import names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.tracking.base import Update

FORMAT = "0.1.0"


@dataclass(kw_only=True, slots=True)
class _Gauge:
    """A number over the run's summaries."""

    value: float
    min: float
    max: float
    count: int = 1

    def add(self, value: float) -> None:
        self.value, self.count = value, self.count + 1
        self.min, self.max = min(self.min, value), max(self.max, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """Seconds of one part; the count is left out where nobody counts."""

    total: float
    count: int | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        inner = sum(child.total for child in self.children.values())
        counted = {} if self.count is None else {"count": self.count}
        own = {"total": self.total, **counted, "self": max(self.total - inner, 0.0)}
        children = {name: child.written() for name, child in self.children.items()}
        return own | ({"children": children} if children else {})


class TimersSink:
    """Gathers times and gauges, and writes them to `path` when it is closed.

    While a run is under way the seconds are those that summaries bring; `finish` replaces them by
    the exact ones. A run that never starts writes nothing.

    Args:
        path: the file.
        metadata: facts about the run, all text.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        metadata: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._metadata = dict(metadata or {})
        self._clock = clock
        self._made = clock()
        self._started: float | None = None
        self._gauges: dict[str, _Gauge] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._exact: dict[str, float] | None = None
        self._ended: float | None = None
        self._n_updates = 0

    def start(self) -> None:
        """The environments are there, and training begins."""
        if self._started is None:
            self._started = self._clock()

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002  # a sink's form
        """Take one summary."""
        self.start()
        for tag, value in values.items():
            if tag.startswith(names.TIMING):
                spent = self._seconds.setdefault(behavior, {})
                part = tag.removeprefix(names.TIMING)
                spent[part] = spent.get(part, 0.0) + value
                continue
            stat = tag.replace("/", ".").replace(" ", "")
            name = f"{behavior}.{stat}.mean"
            if name in self._gauges:
                self._gauges[name].add(value)
            else:
                self._gauges[name] = _Gauge(value=value, min=value, max=value)

    def updated(self, behavior: str, update: Update) -> None:  # noqa: ARG002  # a sink's form
        """Count one update."""
        self._n_updates += 1

    def finish(self, seconds: Mapping[str, float], *, n_updates: int) -> None:
        """Take the exact seconds of a run that has ended, and write them.

        Args:
            seconds: by part: total, environment, wire, inference, storage, update.
            n_updates: of all behaviors' networks.
        """
        self._exact, self._n_updates = dict(seconds), n_updates
        self._ended = self._clock()
        self.start()
        self.close()

    def close(self) -> None:
        """Write the file; may be called again, and writes it anew."""
        if self._started is None:
            return
        tree = self.tree()
        files.write_whole(self.path, json.dumps(tree, indent=2, allow_nan=False) + "\n")

    def tree(self) -> dict[str, Any]:
        """What is written."""
        now = self._ended or self._clock()
        started = now if self._started is None else self._started
        learning = now - started if self._exact is None else self._exact["total"]
        gauges = {
            name: {"value": one.value, "min": one.min, "max": one.max, "count": one.count}
            for name, one in sorted(self._gauges.items())
        }
        metadata = {
            "timer_format_version": FORMAT,
            "start_time_seconds": str(int(self._made)),
            **self._metadata,
            "end_time_seconds": str(int(now)),
        }
        setup = max(now - self._made - learning, 0.0)
        root = _Node(
            total=max(now - self._made, 0.0),
            count=1,
            children={
                "run_training.setup": _Node(total=setup, count=1),
                "TrainerController.start_learning": self._learning(learning),
            },
        )
        return {"name": "root", "gauges": gauges, "metadata": metadata, **root.written()}

    def _learning(self, total_s: float) -> _Node:
        seconds = self._exact if self._exact is not None else self._summed()
        environment, wire = seconds.get("environment", 0.0), seconds.get("wire", 0.0)
        advance = {
            "env_step": _Node(
                total=environment + wire,
                children={
                    "communicator.exchange": _Node(total=environment),
                    "codec": _Node(total=wire),
                },
            ),
            "TorchPolicy.evaluate": _Node(total=seconds.get("inference", 0.0)),
            "process_trajectory": _Node(total=seconds.get("storage", 0.0)),
            "_update_policy": _Node(total=seconds.get("update", 0.0), count=self._n_updates),
        }
        return _Node(total=total_s, count=1, children=advance)

    def _summed(self) -> dict[str, float]:
        """Seconds by part up to the last summary: stepping serves all behaviors at once."""
        summed: dict[str, float] = {}
        for spent in self._seconds.values():
            for part, value in spent.items():
                before = summed.get(part, 0.0)
                shared = part in ("environment", "wire")
                summed[part] = max(before, value) if shared else before + value
        return summed


def run_metadata(*, trainer: str) -> dict[str, str]:
    """Facts about this process; `mlagents` versions are those that formats and protocol follow.

    Args:
        trainer: name and version of this program.
    """
    return {
        "python_version": platform.python_version(),
        "command_line_arguments": " ".join(sys.argv),
        "trainer": trainer,
        "mlagents_version": UnityEnvironment.PACKAGE_VERSION,
        "mlagents_envs_version": UnityEnvironment.PACKAGE_VERSION,
        "communication_protocol_version": UnityEnvironment.API_VERSION,
        "pytorch_version": _version("torch"),
        "numpy_version": _version("numpy"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
