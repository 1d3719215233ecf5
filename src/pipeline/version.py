"""The version of this package, for modules that may not import the public API."""

__version__ = "0.1.0"
