"""Where numbers go: the interface of a sink, and the fan-out in which each sink fails alone."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

_log = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Something that takes the summary of a behavior: `{tag: number}` at a step."""

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Take one summary; `step` counts the agents' decisions."""

    def close(self) -> None:
        """Write what is pending and let go of files and threads; may be called twice."""


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


@runtime_checkable
class TakesBeginnings(Protocol):
    """A sink that wants to know each behavior's settings."""

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """A behavior is there and will be trained with these settings, as plain values."""


@runtime_checkable
class TakesUpdates(Protocol):
    """A sink that wants to know of every update."""

    def updated(self, behavior: str, update: Update) -> None:
        """The networks of a behavior have been updated."""


@runtime_checkable
class TakesDistributions(Protocol):
    """A sink that wants all values behind a mean."""

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Take the values behind `tag` in a summary period; there is at least one."""


class Tracker:
    """Passes each summary to every sink, and keeps training safe from all of them.

    A sink that raises is counted and named in one warning; it still gets the later summaries.
    Values that are not finite are left out, because they ruin charts. What only some sinks want
    goes to those that have the method.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._for_beginnings = [one for one in self._sinks if isinstance(one, TakesBeginnings)]
        self._for_updates = [one for one in self._sinks if isinstance(one, TakesUpdates)]
        self._for_distributions = [
            one for one in self._sinks if isinstance(one, TakesDistributions)
        ]
        self.failures: dict[str, int] = {}

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Say once that a behavior is there, and with which settings it is trained."""
        for sink in self._for_beginnings:
            self._safely(sink, partial(sink.began, behavior, settings))

    def updated(self, behavior: str, update: Update) -> None:
        """Say that a behavior's networks have been updated."""
        for sink in self._for_updates:
            self._safely(sink, partial(sink.updated, behavior, update))

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Give the values behind the mean `tag` to those that chart them; non-finite ones not."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return
        for sink in self._for_distributions:
            self._safely(sink, partial(sink.distribution, behavior, tag, finite, step))

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Give the finite ones of `values` to every sink."""
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        for sink in self._sinks:
            self._safely(sink, partial(sink.metrics, behavior, finite, step))

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            self._safely(sink, sink.close)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _safely(self, sink: object, give: Callable[[], None]) -> None:
        try:
            give()
        except Exception as error:  # noqa: BLE001  # no sink may stop training
            self._failed(sink, error)

    def _failed(self, sink: object, error: Exception) -> None:
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
