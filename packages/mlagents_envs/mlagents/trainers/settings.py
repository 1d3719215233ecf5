"""`mlagents.trainers.settings` of ML-Agents, by rl-pipeline."""

from pipeline.tracking.sinks.stats_writers import RunOptions
