"""Where numbers go: the interface of a sink, and the tracker that keeps training safe from them."""

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
    """All values behind a number of a summary, and how they become one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The state of a behavior just after an update of its networks."""

    step: int
    """Agent steps so far."""
    update_s: float
    """Seconds spent in updates since this process began to train."""
    n_episodes: int
    """Episodes that have ended so far."""
    recent_returns: Sequence[float]
    """Returns of the last of them, oldest first."""


class Sink:
    """Receives what training reports; subclasses override the methods they need.

    A run that resumes repeats some steps. A sink that appends to a file drops its entries from the
    step of a behavior's first summary on, as `sinks/jsonl.py` does, and leaves out `names.HIDDEN`.
    """

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """A behavior has appeared, and will be trained with these settings (plain values)."""

    def samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Take the values behind the numbers of the next summary, as far as known."""

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Take one summary, `{tag: number}`; `step` counts the agents' decisions."""

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Take all values behind the mean `tag` of a summary; there is at least one."""

    def updated(self, behavior: str, update: Update) -> None:
        """The networks of a behavior have been updated."""

    def saved(self, behavior: str, path: Path, step: int) -> None:
        """A numbered checkpoint of a behavior has been written."""

    def ended(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """The run is complete and its last files are written; take final numbers by behavior.

        The numbers of a run that was interrupted and not resumed exactly include the step.
        """

    def failed(self, error: BaseException) -> None:
        """The run ends with an error, or was stopped (`Interrupted`)."""

    def close(self) -> None:
        """Write what is pending and release files and threads; may be called twice."""


class Tracker:
    """Passes everything to every sink, and keeps training safe from all of them.

    A sink that raises is counted and named in one warning; it still gets the later summaries.
    Values that are not finite are left out, because they ruin charts.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.failures: dict[str, int] = {}

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Announce a behavior and its settings, once."""
        self._call_sinks(lambda sink: sink.began(behavior, settings))

    def updated(self, behavior: str, update: Update) -> None:
        """Report an update of a behavior's networks."""
        self._call_sinks(lambda sink: sink.updated(behavior, update))

    def saved(self, behavior: str, path: Path, step: int) -> None:
        """Report a written checkpoint of a behavior."""
        self._call_sinks(lambda sink: sink.saved(behavior, path, step))

    def ended(self, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Report the end of a complete run, without missing numbers."""
        finite = {
            name: _finite({tag: value for tag, value in numbers.items() if value is not None})
            for name, numbers in results.items()
        }
        self._call_sinks(lambda sink: sink.ended(finite))

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Give the finite values behind the mean `tag`, if there are any."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if finite:
            self._call_sinks(lambda sink: sink.distribution(behavior, tag, finite, step))

    def samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Give every sink the values behind the next summary."""
        self._call_sinks(lambda sink: sink.samples(behavior, samples))

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Give every sink the finite values."""
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
        self.close()

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                name = type(sink).__name__
                self.failures[name] = self.failures.get(name, 0) + 1
                # Once: a full disk would fail at each of thousands of summaries.
                if self.failures[name] == 1:
                    _log.warning(
                        "%s failed (%s: %s); training goes on, and what it loses later is not "
                        "reported",
                        name,
                        type(error).__name__,
                        str(error).partition("\n")[0],
                    )


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
