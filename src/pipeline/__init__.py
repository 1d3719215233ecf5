"""Reproducible reinforcement learning for game and robot agents."""

__version__ = "0.1.0"
