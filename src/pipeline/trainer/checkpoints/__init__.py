"""Checkpoints of a run: written, checked, read, and restored."""
