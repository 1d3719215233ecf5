"""`timers.json`: seconds of a run's parts and ranges of statistics, in ML-Agents' format."""

import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.envs.unity import UnityEnvironment
from pipeline.tracking import names
from pipeline.tracking.base import Sink, Update
from pipeline.tracking.result import TrainResult

FORMAT = "0.1.0"


def _node(
    total: float, count: int | None = None, children: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the node of a part of the run: its seconds, its count if known, and its own parts."""
    node: dict[str, Any] = {"total": total}
    if count is not None:
        node["count"] = count
    inner = sum(child["total"] for child in (children or {}).values())
    # Parts are measured by other clocks, so their sum may be above the total.
    node["self"] = max(total - inner, 0.0)
    return node | ({"children": children} if children else {})


class TimersSink(Sink):
    """Collects times and gauges of a run, and writes both to `path` when the sink is closed.

    During a run the seconds come from summaries; `on_end` replaces them by the exact seconds. A run
    that does not start writes nothing.
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
        self._created = clock()
        self._started: float | None = None
        self._gauges: dict[str, dict[str, float]] = {}
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._exact: dict[str, float] | None = None
        self._ended: float | None = None
        self._n_updates = 0
        self._n_exchanges: int | None = None

    def start(self) -> None:
        """Store the time at which training begins, after the environments have started."""
        if self._started is None:
            self._started = self._clock()

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002  # all sinks get it
        """Add the seconds and the statistics of a summary."""
        self.start()
        for tag, value in values.items():
            if tag.startswith(names.TIMING):
                self._seconds[behavior][tag.removeprefix(names.TIMING)] += value
                continue
            # These are ML-Agents' names for gauges.
            name = f"{behavior}.{tag.replace('/', '.').replace(' ', '')}.mean"
            start = {"value": value, "min": value, "max": value, "count": 0}
            gauge = self._gauges.setdefault(name, start)
            gauge["value"] = value
            gauge["min"], gauge["max"] = min(gauge["min"], value), max(gauge["max"], value)
            gauge["count"] += 1

    def on_update(self, behavior: str, update: Update) -> None:  # noqa: ARG002  # all sinks get it
        """Count one update."""
        self._n_updates += 1

    def on_end(self, result: TrainResult) -> None:
        """Replace the collected seconds and counts by the exact numbers of the ended run."""
        self._metadata |= {name: str(count) for name, count in result.counts.items()}
        self._exact, self._n_exchanges = dict(result.seconds), result.n_exchanges
        self._n_updates = sum(behavior.n_updates for behavior in result.behaviors.values())
        self._ended = self._clock()

    def close(self) -> None:
        """Write the timers and gauges to `path`; a second call replaces the file."""
        if self._started is None:
            return
        tree = self.tree()
        # `allow_nan` is off, because NaN is not JSON and readers would refuse the file.
        files.write_whole(self.path, json.dumps(tree, indent=2, allow_nan=False) + "\n")

    def tree(self) -> dict[str, Any]:
        """Return timers, gauges and metadata in the format of ML-Agents' `timers.json`."""
        now = self._ended or self._clock()
        started = now if self._started is None else self._started
        # Without exact seconds, only the time since the start of training is known.
        learning_s = now - started if self._exact is None else self._exact["total"]
        metadata = {
            "timer_format_version": FORMAT,
            "start_time_seconds": str(int(self._created)),
            **self._metadata,
            "end_time_seconds": str(int(now)),
        }
        parts = {
            # The difference is limited to 0, because the exact seconds come from another clock.
            "run_training.setup": _node(max(now - self._created - learning_s, 0.0), 1),
            "TrainerController.start_learning": _node(learning_s, 1, self._parts()),
        }
        return {
            "name": "root",
            "gauges": {name: self._gauges[name] for name in sorted(self._gauges)},
            "metadata": metadata,
            **_node(max(now - self._created, 0.0), 1, parts),
        }

    def _parts(self) -> dict[str, Any]:
        seconds = self._exact if self._exact is not None else self._summed()
        environment, wire = seconds.get("environment", 0.0), seconds.get("wire", 0.0)
        update, compiling = seconds.get("update", 0.0), seconds.get("compile", 0.0)
        compiled = {"compile": _node(compiling)} if compiling else None
        exchange = {"communicator.exchange": _node(environment), "codec": _node(wire)}
        return {
            "env_step": _node(environment + wire, self._n_exchanges, exchange),
            "TorchPolicy.evaluate": _node(seconds.get("inference", 0.0)),
            "process_trajectory": _node(seconds.get("storage", 0.0)),
            # ML-Agents has no node for compiling, so the node of updates contains the compile time.
            "_update_policy": _node(update + compiling, self._n_updates, compiled),
        }

    def _summed(self) -> dict[str, float]:
        spent = list(self._seconds.values())
        # Behaviors step together and report the same seconds of stepping, so the maximum is taken.
        return {
            part: (max if part in ("environment", "wire") else sum)(
                behavior_seconds[part] for behavior_seconds in spent
            )
            for part in {part for behavior_seconds in spent for part in behavior_seconds}
        }


def process_facts(*, trainer: str) -> dict[str, str]:
    """Return facts about this process, for the metadata of `timers.json`.

    ML-Agents need not be installed: its versions here are the versions whose formats and protocol
    this package uses.
    """
    return {
        "python_version": platform.python_version(),
        "command_line_arguments": " ".join(sys.argv),
        "trainer": trainer,
        "mlagents_version": UnityEnvironment.PACKAGE_VERSION,
        "mlagents_envs_version": UnityEnvironment.PACKAGE_VERSION,
        "communication_protocol_version": UnityEnvironment.API_VERSION,
        "pytorch_version": version("torch"),
        "numpy_version": version("numpy"),
    }
