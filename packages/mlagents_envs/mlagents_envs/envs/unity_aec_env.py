"""`mlagents_envs.envs.unity_aec_env` of ML-Agents, by rl-pipeline."""

from pipeline.envs.pettingzoo_wrapper import UnityAECEnv
