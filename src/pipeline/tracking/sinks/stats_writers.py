"""Third-party statistics writers for ML-Agents, called as `mlagents-learn` would call them.

They are found by ML-Agents' entry points, and import their base class from `mlagents`, which is
ML-Agents' own or that of `packages/mlagents_envs`, whose names are the classes below.
docs/how-to/migrating.md says what differs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.plugins import all_of, brought_by
from pipeline.settings import RunSettings, to_mapping
from pipeline.tracking import names
from pipeline.tracking.base import Sink
from pipeline.tracking.sinks import TrackedRun

if TYPE_CHECKING:
    from pipeline.tracking.base import Sample

_log = logging.getLogger(__name__)

GROUP = "mlagents.stats_writer"
"""The group of their entry points: functions of a `RunOptions` that return writers."""
_STEP = "Step"
_OURS = (
    names.TIMING,
    names.REWARD_STD,
    "Policy/approx_kl",
    "Policy/clip_fraction",
    "Policy/explained_variance",
)
"""Prefixes of our tags that ML-Agents does not have."""


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
        """How many values there are."""
        return len(self.full_dist)

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return float(np.sum(self.full_dist))

    @property
    def aggregated_value(self) -> float:
        """The number to chart: the sum where that is asked for, else the mean."""
        return self.sum if self.aggregation_method == StatsAggregationMethod.SUM else self.mean


class StatsPropertyType(Enum):
    """Kinds of properties that `add_property` takes."""

    HYPERPARAMETERS = "hyperparameters"
    SELF_PLAY = "selfplay"


class StatsWriter(ABC):
    """The base class of writers."""

    def on_add_stat(  # noqa: B027  # may be left as it is
        self,
        category: str,
        key: str,
        value: float,
        aggregation: StatsAggregationMethod = StatsAggregationMethod.AVERAGE,
    ) -> None:
        """Take one value of a statistic."""

    @abstractmethod
    def write_stats(self, category: str, values: dict[str, StatsSummary], step: int) -> None:
        """Take a summary of a behavior, by statistic."""

    def add_property(  # noqa: B027  # may be left as it is
        self, category: str, property_type: StatsPropertyType, value: Any
    ) -> None:
        """Take a fact about a behavior."""


class RunOptions:
    """The settings of a run under ML-Agents' names, for the functions that make writers."""

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
    """Return a sink for the statistics writers of installed packages; None without any."""
    # ML-Agents has entry points for its own writers, which write the same as our sinks
    points = [point for point in all_of(GROUP) if brought_by(point)[0] != "mlagents"]
    if not points:
        return None
    options = RunOptions(run.settings, run.folder)
    writers: list[StatsWriter] = []
    for point in points:
        try:
            writers += list(point.load()(options))
        except Exception as error:  # noqa: BLE001  # it is used because it is installed
            _log.warning(
                "The statistics writer %r of %s takes no part in this run (%s: %s)%s",
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
    return "; `pip install ./packages/mlagents_envs` brings that module" if missing else ""


class StatsWriterSink(Sink):
    """Calls writers as `mlagents-learn` does; a behavior is their category."""

    def __init__(self, writers: Sequence[StatsWriter]) -> None:
        self._writers = tuple(writers)
        self._samples: dict[str, Mapping[str, Sample]] = {}
        # ML-Agents' own module where it is installed, because writers compare with its values.
        found = find_spec("mlagents") is not None
        self._mlagents_stats = import_module("mlagents.trainers.stats" if found else __name__)

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Pass on the settings of a behavior, and whether it plays against itself."""
        kinds = self._mlagents_stats.StatsPropertyType
        self._tell("add_property", behavior, kinds.HYPERPARAMETERS, dict(settings))
        if settings.get("self_play") is not None:
            self._tell("add_property", behavior, kinds.SELF_PLAY, True)

    def samples(self, behavior: str, samples: Mapping[str, Sample]) -> None:
        """Keep the values for the summary that follows."""
        self._samples[behavior] = samples

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Pass on every single value, and then the summary."""
        samples = self._samples.pop(behavior, {})
        latest = StatsAggregationMethod.MOST_RECENT
        # ML-Agents has the step among the statistics as well.
        stats: dict[str, Sample] = {_STEP: (latest, [float(step)])}
        for tag, value in values.items():
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
        """Call a method of every writer, and raise their errors afterwards."""
        failed: list[tuple[str, Exception]] = []
        for writer in self._writers:
            try:
                getattr(writer, method)(*values)
            except Exception as error:  # noqa: BLE001  # the others must be called too
                text = f"{type(writer).__name__}: {type(error).__name__}: {error}"
                failed.append((text, error))
        if failed:
            raise RuntimeError("; ".join(text for text, _ in failed)) from failed[0][1]
