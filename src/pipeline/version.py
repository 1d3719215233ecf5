"""The version of this package, for modules that must not import the public API above them."""

__version__ = "0.1.0"
