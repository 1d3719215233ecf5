"""`mlagents_envs.registry.remote_registry_entry` of ML-Agents, by rl-pipeline."""

from pipeline.envs.registry import RemoteRegistryEntry
