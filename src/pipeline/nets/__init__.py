"""Torch modules: encoders of observations, distributions of actions, actors and critics."""
