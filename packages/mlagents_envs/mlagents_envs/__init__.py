"""`mlagents_envs` of ML-Agents, by rl-pipeline."""

__version__ = "1.1.0"
