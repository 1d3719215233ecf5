"""Trainer configuration: the schema, the files, and the formats of older ML-Agents."""
