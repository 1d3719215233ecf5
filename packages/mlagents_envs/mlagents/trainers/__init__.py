"""`mlagents.trainers` of ML-Agents, by rl-pipeline."""
