"""A configuration as a person would write it: only what was said, under the names of today."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.settings.inheritance import without_deprecated
from pipeline.settings.nodes import join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.settings.nodes import Node

_PARAMETERS = "environment_parameters"


def as_written(document: Node, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a present document with their values as they were understood.

    Args:
        document: a document of the present format.
        resolved: what `to_mapping` gives for it.
    """
    made: dict[str, Any] = {}
    has_defaults = "default_settings" in document.value
    for key, node in document.value.items():
        if node.value is None:
            continue
        if key == _PARAMETERS:
            made[key] = {
                name: _parameter(item, resolved[key][name]) for name, item in node.value.items()
            }
        elif key == "behaviors":
            behaviors = {
                name: _values(without_deprecated(item, join(key, name)), resolved[key][name])
                for name, item in node.value.items()
            }
            made[key] = behaviors if has_defaults else _without_nulls(behaviors)
        elif key == "default_settings":
            made[key] = _without_nulls(_values(without_deprecated(node, key), resolved[key]))
        else:
            made[key] = _values(node, resolved[key])
    return made


def _values(node: Node, resolved: Any) -> Any:
    if isinstance(node.value, dict):
        known = resolved if isinstance(resolved, dict) else {}
        return {key: _values(item, known.get(key)) for key, item in node.value.items()}
    if isinstance(node.value, list) and isinstance(resolved, list):
        return [_values(*pair) for pair in zip(node.value, resolved, strict=True)]
    return node.value if resolved is None else resolved


def _parameter(node: Node, resolved: dict[str, Any]) -> Any:
    lessons = resolved["curriculum"]
    if not (isinstance(node.value, dict) and "curriculum" in node.value):
        return _value(node, lessons[0]["value"])
    pairs = zip(node.value["curriculum"].value, lessons, strict=True)
    return {"curriculum": [_lesson(item, lesson) for item, lesson in pairs]}


def _lesson(node: Node, resolved: dict[str, Any]) -> dict[str, Any]:
    rest = {key: item for key, item in node.value.items() if key != "value"}
    made = _values(replace(node, value=rest), resolved)
    return {**_without_nulls(made), "value": _value(node.value["value"], resolved["value"])}


def _value(node: Node, resolved: dict[str, Any]) -> Any:
    if isinstance(node.value, dict):
        return _values(node, resolved)
    return resolved["sampler_parameters"]["value"]


def _without_nulls(value: Any) -> Any:
    """Without keys that say no more than their absence, and without maps that held only such."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {} or value[key] == {}}
