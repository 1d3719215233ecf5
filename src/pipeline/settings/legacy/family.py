"""Which age of ML-Agents a document was written for, and what kind of file it is."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Literal

from pipeline.settings.legacy.keys import FLAT_KEYS
from pipeline.settings.reader import setting_hints
from pipeline.settings.schema import RunSettings

if TYPE_CHECKING:
    from pipeline.settings.nodes import Node

Kind = Literal["trainer", "curriculum", "sampler"]

CURRICULUM_KEYS = ("measure", "thresholds", "min_lesson_length", "signal_smoothing", "parameters")
"""The fields of one curriculum."""
INTERVAL = "resampling-interval"
SAMPLER_TYPES = ("sampler-type", "sampler_type")
"""Both spellings of the key that names a sampler."""
_SECTIONS = ("curriculum", "parameter_randomization")
_NEW_IN_A_BEHAVIOR = {"trainer_type", "hyperparameters", "network_settings"}


class Family(Enum):
    """The formats that a trainer configuration may have; the value is how messages call it."""

    FLAT = "ML-Agents 0.3 to 0.16 (a section with all keys for each behavior)"
    FLAT_BEHAVIORS = "ML-Agents 0.16 to 0.17 ('behaviors' with the keys of a flat file)"
    SECTIONS = "ML-Agents 0.17 ('curriculum' or 'parameter_randomization' of their own)"
    PRESENT = "ML-Agents 0.18 and later"


def kind_of(document: Node) -> Kind:
    """What a document is, judged by its keys; one that says nothing is a trainer configuration."""
    entries = _map(document)
    if entries.keys() & {*setting_hints(RunSettings), *_SECTIONS, "default"}:
        return "trainer"
    if is_curriculum(document) or any(is_curriculum(item) for item in entries.values()):
        return "curriculum"
    if INTERVAL in entries or any(
        _map(item).keys() & {*SAMPLER_TYPES} for item in entries.values()
    ):
        return "sampler"
    return "trainer"


def is_curriculum(node: Node) -> bool:
    """Whether this is the map of a single curriculum, perhaps with a field missing."""
    return len(_map(node).keys() & set(CURRICULUM_KEYS)) >= 2


def family_of(document: Node) -> Family:
    """The format of a trainer configuration."""
    entries = _map(document)
    if "behaviors" in entries and any(
        is_flat(item) for item in _map(entries["behaviors"]).values()
    ):
        return Family.FLAT_BEHAVIORS
    if any(key in entries for key in _SECTIONS):
        return Family.SECTIONS
    if entries.keys() & set(setting_hints(RunSettings)):
        return Family.PRESENT
    has_default = "default" in entries and isinstance(entries["default"].value, dict)
    flat = has_default or any(is_flat(item) for item in entries.values())
    # A section without its trainer is a mistake in a flat file, and not an unknown key.
    flat = flat or any(_looks_flat(item) for item in entries.values())
    return Family.FLAT if flat else Family.PRESENT


def is_flat(node: Node) -> bool:
    """Whether this is a section of a flat file that names its trainer."""
    return "trainer" in _map(node) and not has_present_keys(node)


def has_present_keys(node: Node) -> bool:
    """Whether this is a behavior with keys that flat sections never had."""
    return bool(_map(node).keys() & _NEW_IN_A_BEHAVIOR)


def _looks_flat(node: Node) -> bool:
    return len(_map(node).keys() & FLAT_KEYS) >= 2 and not has_present_keys(node)


def _map(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}
