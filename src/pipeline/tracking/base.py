"""Callbacks and sinks of a run, and the tracker, which calls them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.errors import SettingsError
from pipeline.settings import RunSettings
from pipeline.tracking.result import TrainResult

if TYPE_CHECKING:  # `report` and `sweep` would depend on the sources of environments
    from pipeline.envs.side_channels import StatsAggregationMethod

Sample: TypeAlias = "tuple[StatsAggregationMethod, Sequence[float]]"
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
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Losses and other numbers of the update, by tag."""


class Callback:
    """Receives the events of a run, and may end it; subclasses override methods that they need.

    An error in a callback ends the run after its state has been saved, and `train` raises it.
    Events come from the thread that trains. The methods may call `log`, `log_image` and `set`,
    which act on `behavior`, or on every behavior if `behavior` is None.
    """

    stop: bool = False
    """Set `stop` to True to end the run after the present step, as if `max_steps` had been reached.
    """
    _tracker: Tracker | None = None

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Called when a behavior appears for the first time, with its settings as plain values."""

    def on_settings(self, settings: RunSettings) -> None:
        """Called with the settings of the run, from which it can be repeated.

        The first call comes when the environments have connected and every behavior that they have
        can be trained; until then only logs are written. Another call comes when
        `steps_per_update: auto` has become a number. A finished run has no calls.
        """

    def on_exchange(self, steps: Mapping[str, int], n_episodes: Mapping[str, int]) -> None:
        """Called after each exchange with the environments.

        `steps` and `n_episodes` have each behavior's agent steps and ended episodes so far.
        """

    def on_update(self, behavior: str, update: Update) -> None:
        """Called after an update of a behavior's networks, with the state of the behavior."""

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Called for each summary, `{tag: number}`; `step` counts the agents' decisions."""

    def on_checkpoint(self, behavior: str, path: Path, step: int) -> None:
        """Called after a numbered checkpoint of a behavior has been written."""

    def on_end(self, result: TrainResult) -> None:
        """Called with the `TrainResult` of a complete run, after its last files are written."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, in JSON types; checkpoints save it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, after `on_start` and before the first step."""

    def log(self, name: str, value: float, behavior: str | None = None) -> None:
        """Add a number to the statistic `name`; the next summary has its mean.

        Raises:
            SettingsError: No run is training, or the behavior does not exist.
        """
        for learner in self._learners("log", behavior):
            learner.pending_stats.add(name, float(value))

    def log_image(self, name: str, image: AnyArray, behavior: str | None = None) -> None:
        """Send a picture, uint8 [height, width, 3], to the sinks that show pictures.

        Raises:
            SettingsError: The picture is no such array, no run is training, or the behavior does
                not exist.
        """
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise SettingsError(f"log_image: {name} is not a uint8 array [height, width, 3]")
        for learner in self._learners("log_image", behavior):
            self._tracker.tell("on_image", learner.name, name, image, learner.step)  # type: ignore[union-attr]  # checked by _learners

    def set(self, name: str, value: float | None, behavior: str | None = None) -> None:
        """Set a scheduled setting such as `learning_rate` to a value from the next update on.

        The value replaces the schedule until `set` is called again; None restores the schedule.

        Raises:
            SettingsError: The name or the value cannot be set, no run is training, or the behavior
                does not exist.
        """
        for learner in self._learners("set", behavior):
            if name not in (known := learner.algorithm.schedules):
                can = ", ".join(known) or "nothing"
                raise SettingsError(f"set: {name!r} of {learner.name}: only {can} can be set")
            if value is not None and not 0.0 <= value < math.inf:
                raise SettingsError(f"set: {name} is {value}; give a finite number of at least 0")
            values = learner.updates.set_values
            values.pop(name, None)
            values |= {} if value is None else {name: float(value)}

    def _learners(self, method: str, behavior: str | None) -> list[Any]:
        if self._tracker is None or not self._tracker.learners:
            raise SettingsError(f"{method}: call it in a method of a callback while a run trains")
        if self._tracker.is_resuming:  # the checkpoint has the values that were set and logged
            return []
        learners = self._tracker.learners
        if behavior is not None and behavior not in learners:
            raise SettingsError(f"{method}: no behavior {behavior!r}; use one of {list(learners)}")
        return list(learners.values()) if behavior is None else [learners[behavior]]


class Sink(Callback):
    """Writes the events and numbers of a run; subclasses override methods that they need.

    Errors of a sink are logged, and do not end the run. A sink does not write the statistics
    `names.HIDDEN`.

    A resumed run repeats some steps. So a sink that appends to a file must, at the first summary of
    a behavior, delete the behavior's entries from that step on, as `sinks/jsonl.py` does.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for old in _RENAMED.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{old} has a new name: on_{_RENAMED[old]}")

    def on_samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Called before `on_summary`, with all values of each statistic that has several values."""

    def on_distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Called with all values (at least one) of the statistic `tag` in a summary."""

    def on_image(self, behavior: str, tag: str, image: AnyArray, step: int) -> None:
        """Called with a picture that a callback sends: uint8 [height, width, 3]."""

    def on_failure(self, error: BaseException) -> None:
        """Called when the run ends with an error, or was stopped (`Interrupted`)."""

    def close(self) -> None:
        """Write pending data and release files and threads; may be called twice."""


_OLD = ["began", "samples", "metrics", "distribution", "updated", "saved", "ended", "failed"]
_NEW = ["start", "samples", "summary", "distribution", "update", "checkpoint", "end", "failure"]
_RENAMED = dict(zip(_OLD, _NEW, strict=True))
_EVENTS = [name for name in {**vars(Callback), **vars(Sink)} if name.startswith("on_")] + ["close"]


class Tracker:
    """Calls the callbacks and sinks of a run for each event, and keeps the run's curves.

    The first error of a sink is logged as a warning; the sink is still called later. The first
    error of a callback that is no sink ends the run. Values that are not finite are left out,
    because they spoil charts.

    Raises:
        SettingsError: A callback is not an object of a subclass of `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)
        self.failures: dict[str, int] = {}
        self.error: Exception | None = None
        """Error of a callback that is no sink."""
        self.curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        """For each behavior and tag: the step and the value of each summary."""
        self.learners: Mapping[str, Any] = {}
        """The behaviors' learners, for `log` and `set`."""
        self.is_resuming = False
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise SettingsError(
                    f"callbacks: {callback!r} is not an object of a subclass of pipeline.Callback"
                )
            callback._tracker = self  # `log` and `set` need the tracker
        # Only methods that a class overrides are called, because most callbacks override few.
        self._listeners = {
            event: [(x, getattr(x, event)) for x in self.callbacks if _overrides(type(x), event)]
            for event in _EVENTS
        }
        self.hears_exchanges = bool(self._listeners["on_exchange"])
        kinds = [type(callback).__name__ for callback in self.callbacks]
        self._named = {
            f"{kind} {kinds[:n].count(kind)}": self.callbacks[n] for n, kind in enumerate(kinds)
        }

    def on_exchange(self) -> None:
        """Report the steps and ended episodes of each behavior."""
        # Comprehensions are avoided, because each is a function call in Python 3.11, and this
        # method runs in every step.
        steps, n_episodes = {}, {}
        for name, learner in self.learners.items():
            steps[name], n_episodes[name] = learner.step, learner.statistics.n_episodes
        self.tell("on_exchange", steps, n_episodes)

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Report and keep the finite values of a summary."""
        # Values that are not finite are left out, because MLflow stores infinity as 1.8e308, which
        # flattens the rest of a chart.
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        curves = self.curves.setdefault(behavior, {})
        for tag, value in finite.items():
            curves.setdefault(tag, []).append((step, value))
        self.tell("on_summary", behavior, finite, step)

    def on_distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Report the finite values of the statistic `tag`, if there are any."""
        finite = [float(value) for value in values if math.isfinite(value)]
        if finite:
            self.tell("on_distribution", behavior, tag, finite, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of callbacks and the values that callbacks have set; {} without any."""
        try:
            # States become plain values, which a checkpoint can have; an array raises a TypeError.
            given = {name: callback.state_dict() for name, callback in self._named.items()}
            states = json.loads(json.dumps({name: x for name, x in given.items() if x}))
        except Exception as error:  # noqa: BLE001  # no callback may stop training
            self.error, states = self.error or error, {}
        learners = self.learners.values()
        values = {x.name: dict(x.updates.set_values) for x in learners if x.updates.set_values}
        return {"callbacks": {"states": states, "values": values}} if states or values else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, after the learners have been restored."""
        self.is_resuming = False
        saved = state.get("callbacks", {})
        for name, callback in self._named.items():
            if name in saved.get("states", {}):
                callback.load_state_dict(saved["states"][name])
        for name, learner in self.learners.items():
            learner.updates.set_values |= saved.get("values", {}).get(name, {})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None or self.error is not None:
            self.tell("on_failure", error or self.error)
        self.tell("close")
        if error is None and self.error is not None:
            raise self.error

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method `event` of each callback that overrides it.

        After an error of a callback that is no sink, only the methods of sinks are called.
        """
        for callback, method in self._listeners[event]:
            try:
                if self.error is None or isinstance(callback, Sink):
                    method(*facts)
            except Exception as error:  # noqa: BLE001  # no sink may stop training
                if not isinstance(callback, Sink):
                    self.error = error
                    continue
                name = type(callback).__name__
                self.failures[name] = self.failures.get(name, 0) + 1
                # Only the first failure is logged: with a full disk thousands of summaries fail.
                if self.failures[name] == 1:
                    _log.warning(
                        "%s failed (%s: %s); training continues, and later failures are not "
                        "reported",
                        name,
                        type(error).__name__,
                        str(error).partition("\n")[0],
                    )


def _overrides(kind: type, event: str) -> bool:
    return getattr(kind, event, None) not in (None, getattr(Sink, event))
