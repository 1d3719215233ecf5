"""Specifications, steps and arrays: the data that all other packages exchange."""
