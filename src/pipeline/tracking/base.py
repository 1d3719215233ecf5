"""The interface of a sink, and the tracker, which protects training from errors of sinks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.envs.side_channels import StatsAggregationMethod

    Sample = tuple[StatsAggregationMethod, Sequence[float]]
    """All values of a statistic in a summary period, and how they are aggregated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The state of a behavior after an update of its networks."""

    step: int
    """Agent steps so far."""
    update_s: float
    """Seconds of all updates since this process began to train."""
    n_episodes: int
    """Episodes that have ended so far."""
    recent_returns: Sequence[float]
    """Returns of the last episodes, oldest first."""


class Sink:
    """Receives the events and numbers of a training; subclasses override methods that they need.

    A resumed run repeats some steps. At a behavior's first summary, a sink that appends to a file
    deletes the behavior's entries of the same and later steps, as `sinks/jsonl.py` does. Sinks do
    not write the statistics in `names.HIDDEN`.
    """

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Called when a behavior has appeared, with its settings as plain values."""

    def samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Called before `metrics`, with all known values of the summary's statistics by tag."""

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Called for each summary, `{tag: number}`; `step` counts the agents' decisions."""

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Called with all values (at least one) of the statistic `tag` in a summary."""

    def updated(self, behavior: str, update: Update) -> None:
        """Called after an update of a behavior's networks."""

    def saved(self, behavior: str, path: Path, step: int) -> None:
        """Called after a numbered checkpoint of a behavior has been written."""

    def ended(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """Called when a complete run has written its last files, with final numbers by behavior.

        If the run was interrupted and not resumed exactly, the numbers include the step at which it
        was interrupted.
        """

    def failed(self, error: BaseException) -> None:
        """Called when the run ends with an error, or was stopped (`Interrupted`)."""

    def close(self) -> None:
        """Write pending data and release files and threads; may be called twice."""


class Tracker:
    """Calls every sink, and catches their errors so that they cannot stop training.

    The first error of a sink is logged as a warning; the sink is still called later. Values that
    are not finite are left out, because they spoil charts.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.failures: dict[str, int] = {}

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Report a new behavior and its settings."""
        self._call_sinks(lambda sink: sink.began(behavior, settings))

    def updated(self, behavior: str, update: Update) -> None:
        """Report an update of a behavior's networks."""
        self._call_sinks(lambda sink: sink.updated(behavior, update))

    def saved(self, behavior: str, path: Path, step: int) -> None:
        """Report a written checkpoint of a behavior."""
        self._call_sinks(lambda sink: sink.saved(behavior, path, step))

    def ended(self, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Report the end of a complete run; missing numbers are left out."""
        # Other numbers are left out here, so that sinks need no check of their own.
        finite = {
            name: _finite({tag: value for tag, value in numbers.items() if value is not None})
            for name, numbers in results.items()
        }
        self._call_sinks(lambda sink: sink.ended(finite))

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Report the finite values of the statistic `tag`, if there are any."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if finite:
            self._call_sinks(lambda sink: sink.distribution(behavior, tag, finite, step))

    def samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Report all values of the next summary's statistics, by tag."""
        self._call_sinks(lambda sink: sink.samples(behavior, samples))

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Report the finite values of a summary."""
        # MLflow stores infinity as 1.8e308, which flattens the rest of a chart.
        finite = _finite(values)
        self._call_sinks(lambda sink: sink.metrics(behavior, finite, step))

    def close(self) -> None:
        """Close every sink."""
        self._call_sinks(lambda sink: sink.close())

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._call_sinks(lambda sink: sink.failed(error))
        # Sinks are also closed after an error, so that their files have all earlier data.
        self.close()

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                call(sink)
            # Not `BaseException`: an interruption of the user must still stop the run.
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                name = type(sink).__name__
                self.failures[name] = self.failures.get(name, 0) + 1
                # Logged once: with a full disk each of thousands of summaries would fail.
                if self.failures[name] == 1:
                    _log.warning(
                        "%s failed (%s: %s); training continues, and later failures are not "
                        "reported",
                        name,
                        type(error).__name__,
                        str(error).partition("\n")[0],
                    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
