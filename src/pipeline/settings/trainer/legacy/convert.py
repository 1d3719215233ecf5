"""Files of old ML-Agents releases: recognition of their formats, and conversion of each."""

import itertools
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import SettingsError
from pipeline.settings.nodes import Node, fail, from_plain, join
from pipeline.settings.reader import (
    Count,
    choice,
    display,
    entries_of,
    read,
    setting_hints,
    suggestion,
    unknown_key,
)
from pipeline.settings.trainer.legacy.flat import FLAT_KEYS, Changes, FlatFile
from pipeline.settings.trainer.schema import SAMPLERS, RunSettings
from pipeline.settings.yaml_file import Repeat, parse_yaml, read_text, read_yaml

Kind = Literal["trainer", "curriculum", "sampler"]

_PARAMETERS = "environment_parameters"
CURRICULUM_KEYS = ["measure", "thresholds", "min_lesson_length", "signal_smoothing", "parameters"]
"""Keys of a curriculum."""
INTERVAL = "resampling-interval"
SAMPLER_TYPES = ("sampler-type", "sampler_type")
"""Both spellings of the key that names a sampler."""
_SECTIONS = ("curriculum", "parameter_randomization")
_NEW_IN_A_BEHAVIOR = {"trainer_type", "hyperparameters", "network_settings"}


# The texts give versions of ML-Agents' Python package; ML-Agents' releases have other numbers.
class Family(Enum):
    """The formats that a trainer configuration may have, each with its name in messages."""

    FLAT = "ML-Agents 0.3 to 0.16 (a section with all keys for each behavior)"
    FLAT_BEHAVIORS = "ML-Agents 0.16 to 0.17 ('behaviors' with the keys of a flat file)"
    SECTIONS = "ML-Agents 0.17 (with a section 'curriculum' or 'parameter_randomization')"
    PRESENT = "ML-Agents 0.18 and later"


def kind_of(document: Node) -> Kind:
    """Return the kind of a document, found by its keys; `trainer` if the keys fit no kind."""
    entries = _map(document)
    # A trainer file is recognised first, because it may have curricula and samplers.
    if entries.keys() & {*setting_hints(RunSettings), *_SECTIONS, "default"}:
        return "trainer"
    if is_curriculum(document) or any(is_curriculum(item) for item in entries.values()):
        return "curriculum"
    # A trainer file with `environment_parameters` has samplers too, but was recognised above.
    named = any(_map(item).keys() & {*SAMPLER_TYPES} for item in entries.values())
    return "sampler" if INTERVAL in entries or named else "trainer"


def is_curriculum(node: Node) -> bool:
    """Return whether a node is a map with at least two keys of a curriculum."""
    # Two keys are needed, because one key alone may be the name of a parameter or a behavior.
    return len(_map(node).keys() & set(CURRICULUM_KEYS)) >= 2


def family_of(document: Node) -> Family:
    """Return the format of a trainer configuration."""
    entries = _map(document)
    # Formats are tested from the most specific one to the most general one.
    if "behaviors" in entries and any(map(is_flat, _map(entries["behaviors"]).values())):
        return Family.FLAT_BEHAVIORS
    if entries.keys() & set(_SECTIONS):
        return Family.SECTIONS
    if entries.keys() & set(setting_hints(RunSettings)):
        return Family.PRESENT
    # The remaining top-level keys are names of behaviors, or typing errors.
    is_section = "default" in entries and isinstance(entries["default"].value, dict)
    # A section without `trainer` is flat if it has two keys of flat files, so that the error is
    # about the missing trainer, and not about unknown keys.
    for item in entries.values():
        keys = _map(item).keys()
        is_section |= not has_present_keys(item) and (
            "trainer" in keys or len(keys & FLAT_KEYS) > 1
        )
    return Family.FLAT if is_section else Family.PRESENT


def is_flat(node: Node) -> bool:
    """Return whether a node is a section of a flat file, with the key `trainer`."""
    return "trainer" in _map(node) and not has_present_keys(node)


def has_present_keys(node: Node) -> bool:
    """Return whether a node is a behavior's map with keys that flat files never had."""
    return bool(_map(node).keys() & _NEW_IN_A_BEHAVIOR)


def _map(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


@dataclass(kw_only=True, slots=True)
class Present:
    """A document in the present format, with its old format and a record of its conversion."""

    family: Family
    document: Node
    """The complete document; behaviors have not been merged over `default_settings` yet."""
    portable: Node
    """The same settings in a form that `mlagents-learn` reads with the same meaning."""
    left_out: str = ""
    """Why `portable` lacks the document's `default_settings`; empty if it has them."""
    changes: Changes = field(default_factory=Changes)
    refused: dict[str, str] = field(default_factory=dict)
    """Behaviors that cannot be trained as written, with the reason."""


def to_present(
    document: Node,
    *,
    curriculum: Path | str | None = None,
    sampler: Path | str | None = None,
    changes: Changes | None = None,
) -> Present:
    """Convert a trainer configuration of any release; `changes` has earlier changes and notes."""
    changes = changes or Changes()
    family = family_of(document)
    entries = dict(entries_of(document, ""))
    present = Present(family=family, document=document, portable=document, changes=changes)
    # The environment parameters from each place; later items override earlier items.
    parts: list[dict[str, Node]] = []
    if family in (Family.FLAT, Family.FLAT_BEHAVIORS):
        parts.append(_convert_flat(present, entries))
        entries = dict(present.document.value)
    nothing = Node(None, "")
    at_curriculum, at_samplers = _SECTIONS
    node = entries.get(at_curriculum, nothing)
    if node.value is not None:
        curricula = entries_of(node, at_curriculum)
        parts.append(_convert_curricula(curricula, "curriculum.{}", changes))
    if curriculum is not None:
        # A file with one curriculum does not name its behavior.
        names = list(_map(entries.get("behaviors", nothing)))
        curricula = read_curricula(Path(curriculum), names, changes)
        parts.append(_convert_curricula(curricula, "{}", changes))
    node = entries.get(at_samplers, nothing)
    if node.value is not None:
        parts.append(_convert_samplers(node, at_samplers, changes))
    if sampler is not None:
        samplers = read_part(Path(sampler), "sampler", changes)
        parts.append(_convert_samplers(samplers, "", changes))
    parameters = _merged(document, entries.get(_PARAMETERS), parts, changes)
    present.document = _with_parameters(present.document, parameters)
    present.portable = _with_parameters(present.portable, parameters)
    return present


def _convert_flat(present: Present, entries: dict[str, Node]) -> dict[str, Node]:
    """Convert a flat file's sections; return the environment parameters of its curricula."""
    below = "behaviors" if present.family is Family.FLAT_BEHAVIORS else ""
    sections = entries_of(entries["behaviors"], below) if below else entries
    # A half-converted file may have behaviors of both formats.
    today = _sections_of_today(sections) if below else {}
    old = {name: node for name, node in sections.items() if name not in today}
    flat = FlatFile(old, below, present.changes)
    present.refused = flat.refused
    place = present.document
    rest = {key: node for key, node in entries.items() if key != "behaviors"} if below else {}
    if flat.default is not None and "default_settings" in rest:
        at = "default_settings"
        raise fail(rest[at], at, "is given in addition to behaviors.default; remove one")

    def whole(default: Node | None, behaviors: dict[str, Node]) -> Node:
        first = {} if default is None else {"default_settings": default}
        listed = replace(place, value={**behaviors, **today}, text=None)
        return replace(place, value={**first, "behaviors": listed, **rest})

    present.document = present.portable = whole(flat.default, flat.over_default)
    # All behaviors are written completely if mlagents-learn cannot merge one.
    stranger = flat.not_over_default()
    if stranger is not None:
        present.portable = whole(None, flat.complete)
        present.left_out = (
            f"behavior {stranger!r} has another trainer than the defaults, or not all of their "
            "reward signals, which mlagents-learn cannot express with default_settings. "
            "Behaviors that are not listed need an entry of their own"
        )
    place_of_curricula = "behaviors.{}.curriculum" if below else "{}.curriculum"
    return _convert_curricula(flat.curricula, place_of_curricula, present.changes)


def _sections_of_today(sections: dict[str, Node]) -> dict[str, Node]:
    """Return the sections of a flat file that already are behaviors in the present format."""
    # A section without `trainer` may be flat if it inherits the trainer of a flat default section.
    inherits = "default" in sections and is_flat(sections["default"])
    return {
        name: node
        for name, node in sections.items()
        if not is_flat(node)
        and not isinstance(node.value, str)
        and (not inherits or has_present_keys(node))
    }


def _merged(
    document: Node, present: Node | None, parts: list[dict[str, Node]], changes: Changes
) -> Node | None:
    """Return `present` with the parameters of all parts; later parts win, with a note."""
    if not any(parts):
        return present
    parameters: dict[str, Node] = {}
    if present and present.value is not None:
        parameters |= entries_of(present, _PARAMETERS)
    for name, node in itertools.chain.from_iterable(part.items() for part in parts):
        if name in parameters:
            text = f"is also defined in {parameters[name].where}; the definition here is used"
            changes.note(node, f"{_PARAMETERS}.{name}", text)
        parameters[name] = node
    return replace(present or document, value=parameters, text=None)


def _with_parameters(document: Node, parameters: Node | None) -> Node:
    entries = {key: node for key, node in document.value.items() if key not in _SECTIONS}
    if parameters is not None:
        entries[_PARAMETERS] = parameters
    return replace(document, value=entries)


def _convert_curricula(curricula: dict[str, Node], place: str, changes: Changes) -> dict[str, Node]:
    """Return the lessons of curricula; `place` is their key path, `{}` the behavior in it."""
    parameters: dict[str, Node] = {}
    for behavior, node in curricula.items():
        at = place.format(behavior)
        for name, parameter in _convert_curriculum(behavior, node, at, changes).items():
            if name in parameters:
                text = "is also in another curriculum; the values of this curriculum are used"
                changes.note(parameter, f"{at}.parameters.{name}", text)
            parameters[name] = parameter
    return parameters


def _convert_curriculum(behavior: str, node: Node, at: str, changes: Changes) -> dict[str, Node]:
    entries = entries_of(node, at)
    unknown = [key for key in entries if key not in CURRICULUM_KEYS]
    for key in unknown:
        text = f"unknown key {key!r} is ignored, as in ML-Agents{suggestion(key, CURRICULUM_KEYS)}"
        changes.gone(entries[key], join(at, key), text)
    for key in ("measure", "thresholds", "parameters"):
        if key not in entries:
            near = f", but has {unknown[0]!r}" if unknown else ""
            raise fail(node, at, f"the curriculum needs the key {key!r}{near}")
    thresholds = _numbers(entries["thresholds"], join(at, "thresholds"))
    # The measure is checked here, because the present format also accepts the measure elo.
    choice(entries["measure"], join(at, "measure"), ("reward", "progress"))
    named = from_plain(behavior, node.source, node.line)
    shared = {"measure": entries["measure"], "behavior": named}
    # In old releases these keys had other defaults than in the present format.
    for key, value in (("min_lesson_length", 1), ("signal_smoothing", False)):
        shared[key] = entries.get(key) or from_plain(value, node.source, node.line)
        if key not in entries:
            text = f"{key} is missing; {str(value).lower()} is used, the old default"
            changes.note(node, at, text, warns=False)
    # In old releases every lesson began with a reset.
    shared["require_reset"] = from_plain(True, node.source, node.line)
    parameters = {}
    for name, values in entries_of(entries["parameters"], join(at, "parameters")).items():
        path = join(at, f"parameters.{name}")
        parameters[name] = _lessons(values, path, thresholds, shared)
        changes.moved(values, path, f"{_PARAMETERS}.{name}.curriculum")
    return parameters


def _lessons(values: Node, at: str, thresholds: list[Node], shared: dict[str, Node]) -> Node:
    numbers = _numbers(values, at)
    # Each threshold ends one lesson, and the last lesson never ends.
    if len(numbers) != len(thresholds) + 1:
        expected = f"{len(thresholds) + 1} values, one more than there are thresholds"
        raise fail(values, at, f"needs {expected}, got {len(numbers)}: {display(values)}")
    lessons = []
    for index, value in enumerate(numbers):
        # Lessons of old releases have numbers in place of names.
        lesson = {"name": from_plain(f"Lesson{index}", value.source, value.line)}
        if index < len(thresholds):
            criteria = {**shared, "threshold": thresholds[index]}
            lesson["completion_criteria"] = replace(thresholds[index], value=criteria, text=None)
        lesson["value"] = value
        lessons.append(Node(lesson, value.source, value.line))
    return replace(values, value={"curriculum": replace(values, value=lessons)})


def _numbers(node: Node, at: str) -> list[Node]:
    if not isinstance(node.value, list):
        raise fail(node, at, f"needs a list of numbers, got {display(node)}")
    for index, item in enumerate(node.value):
        # The number is only checked: the node keeps its line and its spelling.
        read(float, item, join(at, index))
    return list(node.value)


def _convert_samplers(document: Node, below: str, changes: Changes) -> dict[str, Node]:
    """Return `environment_parameters` with the samplers of a map; `below` is the map's key path."""
    entries = dict(entries_of(document, below))
    # The key `resampling-interval` is in the same map as the samplers, but is not a sampler.
    interval = entries.pop(INTERVAL, None)
    if interval is not None:
        read(Count, interval, join(below, INTERVAL))
        # Old releases drew values in Python, every `resampling-interval` steps.
        text = "has no equivalent: the environment draws a value whenever it reads the parameter"
        changes.gone(interval, join(below, INTERVAL), text, warns=False)
    if not entries:
        raise fail(document, below, "has no sampler; add one, or leave this file or section out")
    items = entries.items()
    return {name: _convert_sampler(node, name, join(below, name), changes) for name, node in items}


def _convert_sampler(node: Node, name: str, at: str, changes: Changes) -> Node:
    entries = entries_of(node, at)
    spelling = next((key for key in SAMPLER_TYPES if key in entries), None)
    if spelling is None:
        raise fail(node, at, f"does not contain sampler-type, got {display(node)}; add the key")
    written = entries[spelling]
    # ML-Agents used both spellings.
    kind = str(written.value).replace("multirange_uniform", "multirangeuniform")
    named = replace(written, value=kind, text=kind)
    choice(named, join(at, spelling), SAMPLERS)
    new = f"{_PARAMETERS}.{name}"
    changes.moved(written, join(at, spelling), join(new, "sampler_type"))
    parameters = entries.get("sampler_parameters")
    if parameters is None:  # the sampler's parameters are next to `sampler_type`
        known = setting_hints(SAMPLERS[kind])
        siblings = {key: item for key, item in entries.items() if key not in SAMPLER_TYPES}
        for key, item in siblings.items():
            if key not in known:
                raise unknown_key(item, at, key, known)
        for key in known:
            # Samplers of old releases had no defaults, either.
            if key != "seed" and key not in siblings:
                raise fail(node, at, f"the sampler {kind} needs the key {key!r}")
        for key, item in siblings.items():
            changes.moved(item, join(at, key), join(new, f"sampler_parameters.{key}"))
        parameters = replace(node, value=siblings)
    return replace(node, value={"sampler_type": named, "sampler_parameters": parameters})


def read_document(path: Path, *, what: str = "Config file", changes: Changes | None = None) -> Node:
    """Return the content of a file: JSON if its name ends in `.json`, else YAML.

    In files of old formats a repeated key takes its last value, as in ML-Agents.
    """
    repeats: list[Repeat] = []
    read = _read_json if path.suffix == ".json" else read_yaml
    # Repeated keys are an error only in the present format, which is known only after reading.
    document = read(path, what=what, repeats=repeats)
    if repeats and kind_of(document) == "trainer" and family_of(document) is Family.PRESENT:
        read(path, what=what)  # this raises an error for the first repeated key
    if changes is not None:
        text = "written twice, first in line {}; the last value is used, as in ML-Agents"
        for repeat in repeats:
            changes.note(repeat.node, str(repeat.node.value), text.format(repeat.first))
    return document


def _read_json(path: Path, *, what: str, repeats: list[Repeat] | None = None) -> Node:
    """Return the content of a JSON file with line numbers; arguments as for `read_yaml`."""
    text = read_text(path, what=what)
    try:
        # The text is checked as JSON, and then read as YAML, which gives line numbers. `json`
        # accepts NaN and Infinity, which are not in JSON (RFC 8259, section 6).
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        text = f"cannot be read as JSON: {error.msg} (column {error.colno})."
        raise SettingsError(f"{path}:{error.lineno}: {text}") from error
    except ValueError as error:
        raise SettingsError(f"{path}: cannot be read as JSON: {error}.") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: the values are nested too deeply.") from error
    # JSON is YAML except for tabs, which occur only between values, so each tab becomes a space.
    return parse_yaml(text.replace("\t", " "), source=str(path), repeats=repeats)


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}; write a finite number")


def read_curricula(path: Path, behaviors: list[str], changes: Changes) -> dict[str, Node]:
    """Return curricula by behavior, from one file or from a folder with a JSON file for each."""
    if not path.is_dir():
        return _by_behavior(read_part(path, "curriculum", changes), behaviors, path.stem)
    curricula = {}
    for file in sorted(path.iterdir()):
        # Unity writes a .meta file for every file, and systems and editors write hidden files.
        if file.name.startswith(".") or file.suffix == ".meta":
            continue
        if file.suffix != ".json":
            text = "a folder of curricula may only have <Behavior>.json files"
            raise SettingsError(f"{file}: {text}. Move this file elsewhere.")
        curricula[file.stem] = read_document(file, what="Curriculum file", changes=changes)
    if not curricula:
        raise SettingsError(f"{path}: the folder has no <Behavior>.json file.")
    return curricula


def read_part(path: Path, expected: Kind, changes: Changes) -> Node:
    """Return the content of a curriculum or sampler file; refuse a file of clearly another kind."""
    document = read_document(path, what=f"{expected.capitalize()} file", changes=changes)
    kind = kind_of(document)
    # `kind_of` also returns "trainer" for unclear documents.
    if kind not in (expected, "trainer") or "behaviors" in _map(document):
        called, option = {
            "trainer": ("a trainer configuration", "the trainer configuration"),
            "curriculum": ("a curriculum", "--curriculum"),
            "sampler": ("a sampler file", "--sampler"),
        }[kind]
        raise SettingsError(
            f"{path}: this is {called}, and not a {expected} file. Give it as {option}."
        )
    return document


def _by_behavior(document: Node, behaviors: list[str], stem: str) -> dict[str, Node]:
    """Return the curricula of a file by behavior, also if the file does not name the behavior."""
    entries = entries_of(document, "")
    if not entries:
        raise fail(document, "", "has no curriculum; add a curriculum, or leave the file out")
    # From 0.14 on a file has a curriculum under each behavior's name.
    if not (is_curriculum(document) or entries.keys() & set(CURRICULUM_KEYS)):
        return entries
    # Until 0.13 the file's name was the behavior's name.
    if stem in behaviors or not behaviors:
        return {stem: document}
    if len(behaviors) > 1:
        names = " or ".join(f"{name}.json" for name in behaviors[:3])
        text = "the behavior that this curriculum measures is unclear; name the file after it"
        raise fail(document, "", f"{text}: {names}")
    return {behaviors[0]: document}
