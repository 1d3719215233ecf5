"""`mlagents.plugins` of ML-Agents, by rl-pipeline."""

from pipeline.tracking.sinks.stats_writers import GROUP as ML_AGENTS_STATS_WRITER
