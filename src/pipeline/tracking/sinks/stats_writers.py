"""Third-party statistics writers for ML-Agents, called as `mlagents-learn` calls them.

Writers are found by ML-Agents' entry points. They import their base class from `mlagents`:
ML-Agents' package, or `packages/mlagents_envs`, which exports the classes below.
docs/how-to/migrating.md lists the differences.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.plugins import all_of, brought_by
from pipeline.settings import RunSettings, to_mapping
from pipeline.tracking import names
from pipeline.tracking.base import Sample, Sink
from pipeline.tracking.sinks import TrackedRun

_log = logging.getLogger(__name__)

GROUP = "mlagents.stats_writer"
"""Group of entry points for functions that take a `RunOptions` and return writers."""
_STEP = "Step"
_OURS = (
    names.TIMING,
    names.REWARD_STD,
    "Policy/approx_kl",
    "Policy/clip_fraction",
    "Policy/explained_variance",
)
"""Prefixes of statistics that ML-Agents does not have."""


class StatsSummary(NamedTuple):
    """All values of a statistic since the last summary."""

    full_dist: list[float]
    aggregation_method: StatsAggregationMethod

    @property
    def mean(self) -> float:
        """Mean of all values."""
        return float(np.mean(self.full_dist))

    @property
    def std(self) -> float:
        """Population standard deviation of all values."""
        return float(np.std(self.full_dist))

    @property
    def num(self) -> int:
        """Number of values."""
        return len(self.full_dist)

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return float(np.sum(self.full_dist))

    @property
    def aggregated_value(self) -> float:
        """The value to chart: the sum for the method SUM, else the mean."""
        return self.sum if self.aggregation_method == StatsAggregationMethod.SUM else self.mean


class StatsPropertyType(Enum):
    """Types of properties for `add_property`."""

    HYPERPARAMETERS = "hyperparameters"
    SELF_PLAY = "selfplay"


class StatsWriter(ABC):
    """Base class of statistics writers."""

    def on_add_stat(  # noqa: B027  # overriding is optional
        self,
        category: str,
        key: str,
        value: float,
        aggregation: StatsAggregationMethod = StatsAggregationMethod.AVERAGE,
    ) -> None:
        """Called with each value of a statistic."""

    @abstractmethod
    def write_stats(self, category: str, values: dict[str, StatsSummary], step: int) -> None:
        """Called for each summary of a behavior, with all values of each statistic by name."""

    def add_property(  # noqa: B027  # overriding is optional
        self, category: str, property_type: StatsPropertyType, value: Any
    ) -> None:
        """Called with a property of a behavior."""


class RunOptions:
    """The settings of a run by ML-Agents' names, for functions that make writers."""

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        self._settings = settings
        self.checkpoint_settings = _CheckpointSettings(settings.checkpoint_settings, folder)

    def __getattr__(self, name: str) -> Any:
        """Return a section: `behaviors`, `env_settings`, `engine_settings` and so on."""
        return getattr(self._settings, name)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        return to_mapping(self._settings)


class _CheckpointSettings:
    def __init__(self, settings: Any, folder: Path) -> None:
        self._settings = settings
        self.write_path = str(folder)
        self.run_logs_dir = str(folder / "run_logs")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


def for_run(run: TrackedRun) -> StatsWriterSink | None:
    """Return a sink for the statistics writers of installed packages; None if there is none."""
    # ML-Agents also has entry points for its own writers, which duplicate this package's sinks.
    points = [point for point in all_of(GROUP) if brought_by(point)[0] != "mlagents"]
    if not points:
        return None
    options = RunOptions(run.settings, run.folder)
    writers: list[StatsWriter] = []
    for point in points:
        try:
            writers += list(point.load()(options))
        except Exception as error:  # noqa: BLE001  # a warning only: the user has not chosen it
            _log.warning(
                "The statistics writer %r of %s is not used in this run (%s: %s)%s",
                point.name,
                " ".join(brought_by(point)),
                type(error).__name__,
                error,
                _remedy(error),
            )
    return StatsWriterSink(writers) if writers else None


def _remedy(error: Exception) -> str:
    name = (getattr(error, "name", None) or "").partition(".")[0]
    missing = isinstance(error, ModuleNotFoundError) and name in ("mlagents", "mlagents_envs")
    return "; `pip install ./packages/mlagents_envs` installs that module" if missing else ""


class StatsWriterSink(Sink):
    """Calls statistics writers as `mlagents-learn` does; the category is the behavior."""

    def __init__(self, writers: Sequence[StatsWriter]) -> None:
        self._writers = tuple(writers)
        self._samples: dict[str, Mapping[str, Sample]] = {}
        # If ML-Agents is installed, writers get the enumerations of ML-Agents, because writers
        # compare values with these enumerations.
        found = find_spec("mlagents") is not None
        self._mlagents_stats = import_module("mlagents.trainers.stats" if found else __name__)

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Report a behavior's settings, and self-play if the behavior uses it."""
        kinds = self._mlagents_stats.StatsPropertyType
        self._tell("add_property", behavior, kinds.HYPERPARAMETERS, dict(settings))
        if settings.get("self_play") is not None:
            self._tell("add_property", behavior, kinds.SELF_PLAY, True)

    def on_samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Keep the values for the next summary."""
        self._samples[behavior] = samples

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Report every value, and then the summary."""
        samples = self._samples.pop(behavior, {})
        latest = StatsAggregationMethod.MOST_RECENT
        # ML-Agents also reports the step as a statistic, so writers may expect it.
        stats: dict[str, Sample] = {_STEP: (latest, [float(step)])}
        for tag, value in values.items():
            # Writers were made for ML-Agents' statistics, so other statistics are left out.
            if not tag.startswith(_OURS):
                aggregation = latest if tag.startswith(names.LESSON_NUMBER) else latest.AVERAGE
                stats[tag] = samples.get(tag, (aggregation, [value]))
        summaries = {}
        for tag, (method, sample_values) in stats.items():
            their_method = self._mlagents_stats.StatsAggregationMethod(method.value)
            for value in sample_values:
                self._tell("on_add_stat", behavior, tag, value, their_method)
            summaries[tag] = self._mlagents_stats.StatsSummary(list(sample_values), their_method)
        self._tell("write_stats", behavior, summaries, step)

    def _tell(self, method: str, *values: Any) -> None:
        failed: list[tuple[str, Exception]] = []
        for writer in self._writers:
            try:
                getattr(writer, method)(*values)
            except Exception as error:  # noqa: BLE001  # the other writers must be called too
                text = f"{type(writer).__name__}: {type(error).__name__}: {error}"
                failed.append((text, error))
        # Errors are raised after the loop, so that all other writers get the values.
        if failed:
            raise RuntimeError("; ".join(text for text, _ in failed)) from failed[0][1]
