"""`mlagents.trainers.stats` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

from pipeline import StatsAggregationMethod
from pipeline.tracking.sinks.stats_writers import StatsPropertyType, StatsSummary, StatsWriter

__getattr__ = _missing.reasons(
    {
        "StatsReporter": "gathers what trainers report; a writer is given it by `write_stats`",
        "ConsoleWriter GaugeWriter TensorboardWriter": "writes what our sinks write already: docs/how-to/tracking.md",
    },
    __name__,
)
