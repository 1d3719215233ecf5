"""`mlagents_envs.side_channel.stats_side_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel
from pipeline import StatsAggregationMethod, StatsSideChannel

__getattr__ = _missing.reasons(
    {
        "EnvironmentStats StatList": "an alias for type hints",
    },
    __name__,
)
