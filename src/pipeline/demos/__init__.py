"""Demonstrations: the `.demo` format, tables, Minari datasets, and rows for imitation learning."""
