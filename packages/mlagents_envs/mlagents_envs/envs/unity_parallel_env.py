"""`mlagents_envs.envs.unity_parallel_env` of ML-Agents, by rl-pipeline."""

from pipeline.envs.pettingzoo_wrapper import UnityParallelEnv
