"""Driving environments: launch them, step them, and read their agents as arrays."""
