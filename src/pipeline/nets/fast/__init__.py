"""Faster computation of small networks; docs/explanation/fast-networks.md has the measurements."""
