"""Curricula that stood in files of their own, as `environment_parameters`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.settings.legacy.family import CURRICULUM_KEYS, is_curriculum
from pipeline.settings.legacy.section import truth
from pipeline.settings.nodes import Node, fail, from_plain, join
from pipeline.settings.reader import choice, entries_of, read, shown, suggestion

if TYPE_CHECKING:
    from pipeline.settings.legacy.changes import Changes

_NEEDED = ("measure", "thresholds", "parameters")
_OLD_DEFAULTS = {"min_lesson_length": 1, "signal_smoothing": False}


def convert_curricula(curricula: dict[str, Node], place: str, changes: Changes) -> dict[str, Node]:
    """`environment_parameters` with the lessons of every curriculum.

    Args:
        curricula: the old maps, by the behavior that they measure.
        place: key path of a curriculum in its file, with `{}` for the behavior.
        changes: where changes are recorded.

    Raises:
        SettingsError: A field is missing, or a value is not allowed.
    """
    made: dict[str, Node] = {}
    for behavior, node in curricula.items():
        at = place.format(behavior)
        for name, parameter in _convert(behavior, node, at, changes).items():
            if name in made:
                changes.note(
                    parameter,
                    f"{at}.parameters.{name}",
                    "is in another curriculum as well; this one is used",
                )
            made[name] = parameter
    return made


def by_behavior(document: Node, behaviors: list[str], stem: str) -> dict[str, Node]:
    """The curricula of a file by behavior; a single one needs to be told whose it is.

    Args:
        document: the file's map.
        behaviors: the names that the trainer configuration lists.
        stem: the file's name without its ending.

    Raises:
        SettingsError: It is not a map, holds nothing, or it cannot be told whose curriculum it is.
    """
    entries = entries_of(document, "")
    if not entries:
        raise fail(document, "", "holds no curriculum; remove the file or fill it in")
    if not (is_curriculum(document) or entries.keys() & set(CURRICULUM_KEYS)):
        return entries
    if stem in behaviors or not behaviors:
        return {stem: document}
    if len(behaviors) > 1:
        raise fail(
            document,
            "",
            "it cannot be told which behavior this curriculum measures; name the file after it: "
            + " or ".join(f"{name}.json" for name in behaviors[:3]),
        )
    return {behaviors[0]: document}


def _convert(behavior: str, node: Node, at: str, changes: Changes) -> dict[str, Node]:
    entries = entries_of(node, at)
    for key, item in entries.items():
        if key not in CURRICULUM_KEYS:
            text = f"unknown key {key!r} is ignored, as it was{suggestion(key, CURRICULUM_KEYS)}"
            changes.gone(item, join(at, key), text)
    for key in _NEEDED:
        if key not in entries:
            hint = [name for name in entries if name not in CURRICULUM_KEYS]
            near = f" (there is {hint[0]!r})" if hint else ""
            raise fail(node, at, f"the curriculum needs the key {key!r}{near}")
    thresholds = _numbers(entries["thresholds"], join(at, "thresholds"))
    choice(entries["measure"], join(at, "measure"), ("reward", "progress"))
    shared = {
        "measure": entries["measure"],
        "behavior": from_plain(behavior, node.source, node.line),
    }
    for key, value in _OLD_DEFAULTS.items():
        shared[key] = (
            truth(entries[key]) if key in entries else _missing(node, at, key, value, changes)
        )
    shared["require_reset"] = from_plain(True, node.source, node.line)
    made = {}
    for name, values in entries_of(entries["parameters"], join(at, "parameters")).items():
        path = join(at, f"parameters.{name}")
        made[name] = _parameter(values, path, thresholds, shared)
        changes.moved(values, path, f"environment_parameters.{name}.curriculum")
    return made


def _missing(node: Node, at: str, key: str, value: object, changes: Changes) -> Node:
    said = str(value).lower()
    changes.note(node, at, f"{key} is missing; {said} is used, as it was", warns=False)
    return from_plain(value, node.source, node.line)


def _parameter(values: Node, at: str, thresholds: list[Node], shared: dict[str, Node]) -> Node:
    numbers = _numbers(values, at)
    if len(numbers) != len(thresholds) + 1:
        raise fail(
            values,
            at,
            f"needs {len(thresholds) + 1} values, one more than there are thresholds, got "
            f"{len(numbers)}: {shown(values)}",
        )
    lessons = []
    for index, value in enumerate(numbers):
        name = f"Lesson{index}"
        lesson = {"name": from_plain(name, value.source, value.line)}
        if index < len(thresholds):
            criteria = {**shared, "threshold": thresholds[index]}
            lesson["completion_criteria"] = replace(thresholds[index], value=criteria, text=None)
        lesson["value"] = value
        lessons.append(Node(lesson, value.source, value.line))
    return replace(values, value={"curriculum": replace(values, value=lessons)})


def _numbers(node: Node, at: str) -> list[Node]:
    if not isinstance(node.value, list):
        raise fail(node, at, f"needs a list of numbers, got {shown(node)}")
    for index, item in enumerate(node.value):
        read(float, item, join(at, index))
    return list(node.value)
