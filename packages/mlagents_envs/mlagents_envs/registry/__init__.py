"""`mlagents_envs.registry` of ML-Agents, by rl-pipeline."""

from pipeline import UnityEnvRegistry
from pipeline.envs.registry import default_registry
