"""`mlagents_envs.communicator_objects` of ML-Agents, by rl-pipeline."""
