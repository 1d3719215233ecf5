"""Demonstrations: the `.demo` format, tables, Minari datasets, and rows to imitate."""
