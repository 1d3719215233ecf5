"""Configuration files of every age of ML-Agents, brought to the present format."""

from pipeline.settings.legacy.changes import Change, Changes
from pipeline.settings.legacy.convert import Present, to_present
from pipeline.settings.legacy.family import Family, Kind, kind_of
from pipeline.settings.legacy.files import read_curricula, read_document, read_samplers

__all__ = [
    "Change",
    "Changes",
    "Family",
    "Kind",
    "Present",
    "kind_of",
    "read_curricula",
    "read_document",
    "read_samplers",
    "to_present",
]
