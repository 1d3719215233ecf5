"""A trainer configuration with its curricula and samplers, as one present document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.settings.legacy.changes import Changes
from pipeline.settings.legacy.curriculum import convert_curricula
from pipeline.settings.legacy.family import Family, family_of, has_present_keys, is_flat
from pipeline.settings.legacy.files import read_curricula, read_samplers
from pipeline.settings.legacy.flat import FlatFile
from pipeline.settings.legacy.sampler import convert_samplers
from pipeline.settings.nodes import Node, fail
from pipeline.settings.reader import entries_of

if TYPE_CHECKING:
    from pathlib import Path

_PARAMETERS = "environment_parameters"


@dataclass(kw_only=True, slots=True)
class Present:
    """A document of the present format, and how it came to be."""

    family: Family
    """The format that the trainer configuration had."""
    document: Node
    """Everything, with behaviors as they are laid over `default_settings`."""
    portable: Node
    """The same in a form that `mlagents-learn` reads alike."""
    left_out: str = ""
    """Why `portable` has no `default_settings`, if it had to lose them."""
    changes: Changes = field(default_factory=Changes)
    """What was changed."""
    refused: dict[str, str] = field(default_factory=dict)
    """Behaviors that cannot be trained as they are written, and why."""


def to_present(
    document: Node,
    *,
    curriculum: Path | None = None,
    sampler: Path | None = None,
    changes: Changes | None = None,
) -> Present:
    """Bring a document of any age to the present format.

    Args:
        document: a trainer configuration.
        curriculum: a curriculum file or folder of before 0.17.
        sampler: a sampler file of before 0.17.
        changes: what was noted about the document while it was read.

    Raises:
        SettingsError: A file cannot be read, or something in it has no meaning.
    """
    family = family_of(document)
    entries = dict(entries_of(document, ""))
    made = Present(
        family=family, document=document, portable=document, changes=changes or Changes()
    )
    own: dict[str, Node] = {}
    if family in (Family.FLAT, Family.FLAT_BEHAVIORS):
        own = _convert_flat(made, entries)
        entries = dict(made.document.value)
    behaviors = entries.get("behaviors")
    names = list(behaviors.value) if behaviors and isinstance(behaviors.value, dict) else []
    curricula = [own, _section(entries, "curriculum", made.changes)]
    if curriculum is not None:
        read = read_curricula(curriculum, names, made.changes)
        curricula.append(convert_curricula(read, "{}", made.changes))
    samplers = [_section(entries, "parameter_randomization", made.changes)]
    if sampler is not None:
        samplers.append(convert_samplers(read_samplers(sampler, made.changes), "", made.changes))
    parameters = _together(document, entries, [*curricula, *samplers], made.changes)
    made.document = _with_parameters(made.document, parameters)
    made.portable = _with_parameters(made.portable, parameters)
    return made


def _convert_flat(made: Present, entries: dict[str, Node]) -> dict[str, Node]:
    """Convert the sections, and give the curricula that stood in them."""
    below = "behaviors" if made.family is Family.FLAT_BEHAVIORS else ""
    sections = entries_of(entries["behaviors"], below) if below else entries
    today = _sections_of_today(sections) if below else {}
    flat = FlatFile(
        sections={name: node for name, node in sections.items() if name not in today},
        below=below,
        changes=made.changes,
    )
    flat.convert()
    made.refused = flat.refused
    place = made.document
    rest = {key: node for key, node in entries.items() if key != "behaviors"} if below else {}
    if flat.default is not None and "default_settings" in rest:
        raise fail(
            rest["default_settings"], "default_settings", "is there beside behaviors.default"
        )

    def whole(default: Node | None, behaviors: dict[str, Node]) -> Node:
        first = {} if default is None else {"default_settings": default}
        listed = replace(place, value={**behaviors, **today}, text=None)
        return replace(place, value={**first, "behaviors": listed, **rest})

    made.document = made.portable = whole(flat.default, flat.over_default)
    stranger = flat.not_over_default()
    if stranger is not None:
        made.portable = whole(None, flat.complete)
        made.left_out = (
            f"behavior {stranger!r} has another trainer than the defaults, or not all of their "
            "reward signals, which mlagents-learn could not express beside default_settings. "
            "Behaviors that are not listed need an entry of their own"
        )
    return convert_curricula(
        flat.curricula, "behaviors.{}.curriculum" if below else "{}.curriculum", made.changes
    )


def _sections_of_today(sections: dict[str, Node]) -> dict[str, Node]:
    """Behaviors that stand in the present format among flat ones."""
    inherits = "default" in sections and is_flat(sections["default"])
    return {
        name: node
        for name, node in sections.items()
        if not is_flat(node)
        and not isinstance(node.value, str)
        and (not inherits or has_present_keys(node))
    }


def _section(entries: dict[str, Node], key: str, changes: Changes) -> dict[str, Node]:
    """The parameters of a section that only 0.17 had."""
    node = entries.get(key)
    if node is None or node.value is None:
        return {}
    if key == "curriculum":
        return convert_curricula(entries_of(node, key), "curriculum.{}", changes)
    return convert_samplers(node, key, changes)


def _together(
    document: Node, entries: dict[str, Node], parts: list[dict[str, Node]], changes: Changes
) -> Node | None:
    """All parameters, a later part over an earlier one; None where nothing is said of them."""
    own = entries.get(_PARAMETERS)
    if not any(parts):
        return own
    made = dict(entries_of(own, _PARAMETERS)) if own and own.value is not None else {}
    for part in parts:
        for name, node in part.items():
            if name in made:
                text = f"is also defined in {made[name].where}; this one is used"
                changes.note(node, f"{_PARAMETERS}.{name}", text)
            made[name] = node
    return replace(own or document, value=made, text=None)


def _with_parameters(document: Node, parameters: Node | None) -> Node:
    entries = dict(document.value)
    for key in ("curriculum", "parameter_randomization"):
        entries.pop(key, None)
    if parameters is not None:
        entries[_PARAMETERS] = parameters
    return replace(document, value=entries)
