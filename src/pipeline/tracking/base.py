"""Where numbers go: the interface of a sink, and the fan-out in which each sink fails alone."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_log = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Something that takes the summary of a behavior: `{tag: number}` at a step."""

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Take one summary; `step` counts the agents' decisions."""

    def close(self) -> None:
        """Write what is pending and let go of files and threads; may be called twice."""


@runtime_checkable
class DistributionSink(Protocol):
    """A sink that can also chart how values were distributed."""

    def distributions(
        self, behavior: str, values: Mapping[str, Sequence[float]], step: int
    ) -> None:
        """Take all values of each tag since the last summary, at least one each."""


class Tracker:
    """Passes each summary to every sink, and keeps training safe from all of them.

    A sink that raises is counted and named in one warning; it still gets the later summaries.
    Values that are not finite are left out, because they ruin charts.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.failures: dict[str, int] = {}

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Give the finite ones of `values` to every sink."""
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        for sink in self._sinks:
            try:
                sink.metrics(behavior, finite, step)
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                self._failed(sink, error)

    def distributions(
        self, behavior: str, values: Mapping[str, Sequence[float]], step: int
    ) -> None:
        """Give the finite ones of `values` to every sink that charts distributions."""
        finite = {tag: [one for one in many if math.isfinite(one)] for tag, many in values.items()}
        finite = {tag: many for tag, many in finite.items() if many}
        if not finite:
            return
        for sink in self._sinks:
            if not isinstance(sink, DistributionSink):
                continue
            try:
                sink.distributions(behavior, finite, step)
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                self._failed(sink, error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                self._failed(sink, error)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _failed(self, sink: Sink, error: Exception) -> None:
        name = type(sink).__name__
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] == 1:
            _log.warning(
                "%s lost a summary (%s: %s); training goes on, and later losses of this kind are "
                "not reported",
                name,
                type(error).__name__,
                error,
            )
