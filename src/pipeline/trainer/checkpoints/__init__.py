"""Checkpoints of a run: write, check, read and restore them."""
