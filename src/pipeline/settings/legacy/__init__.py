"""Configuration files of every age of ML-Agents, brought to the present format."""

from pipeline.settings.legacy.convert import Present, to_present
from pipeline.settings.legacy.formats import (
    Changes,
    Family,
    FormatChange,
    Kind,
    kind_of,
    read_document,
)

__all__ = [
    "Changes",
    "Family",
    "FormatChange",
    "Kind",
    "Present",
    "kind_of",
    "read_document",
    "to_present",
]
