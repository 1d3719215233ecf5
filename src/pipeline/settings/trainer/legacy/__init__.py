"""Conversion of configuration files of old ML-Agents releases to the present format."""
