"""Torch modules: encoders, distributions, actor and critic."""
