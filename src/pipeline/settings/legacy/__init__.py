"""Configuration files of every age of ML-Agents, brought to the present format."""
