"""Trajectories, rollout storage, demonstrations and running statistics (NumPy only)."""
