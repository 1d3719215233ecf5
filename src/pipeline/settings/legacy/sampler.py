"""Sampler files and `parameter_randomization`, as `environment_parameters`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.settings.legacy.family import INTERVAL, SAMPLER_TYPES
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import choice, entries_of, read, setting_hints, shown, unknown_key
from pipeline.settings.schema import SAMPLERS
from pipeline.settings.schema.kinds import Count

if TYPE_CHECKING:
    from pipeline.settings.legacy.changes import Changes

_NEEDED = {
    "uniform": ("min_value", "max_value"),
    "gaussian": ("mean", "st_dev"),
    "multirangeuniform": ("intervals",),
    "constant": ("value",),
}


def convert_samplers(document: Node, below: str, changes: Changes) -> dict[str, Node]:
    """`environment_parameters` with every sampler of a file or section.

    Args:
        document: the map of samplers, with `resampling-interval`.
        below: key path of the samplers in their file.
        changes: where changes are recorded.

    Raises:
        SettingsError: The interval or a sampler is not as it must be.
    """
    entries = dict(entries_of(document, below))
    interval = entries.pop(INTERVAL, None)
    if interval is not None:
        read(Count, interval, join(below, INTERVAL))
        changes.gone(
            interval,
            join(below, INTERVAL),
            "no equal any more: the environment draws a value whenever it reads the parameter",
            warns=False,
        )
    if not entries:
        raise fail(document, below, "holds no sampler; remove it or fill it in")
    return {
        name: _convert(node, name, join(below, name), changes) for name, node in entries.items()
    }


def _convert(node: Node, name: str, at: str, changes: Changes) -> Node:
    entries = entries_of(node, at)
    spelling = next((key for key in SAMPLER_TYPES if key in entries), None)
    if spelling is None:
        raise fail(node, at, f"does not contain sampler-type, got {shown(node)}")
    written = entries[spelling]
    kind = str(written.value).replace("multirange_uniform", "multirangeuniform")
    named = replace(written, value=kind, text=kind)
    choice(named, join(at, spelling), SAMPLERS)
    new = f"environment_parameters.{name}"
    changes.moved(written, join(at, spelling), join(new, "sampler_type"))
    parameters = entries.get("sampler_parameters")
    if parameters is None:
        given = {key: item for key, item in entries.items() if key not in SAMPLER_TYPES}
        _check(node, given, kind, at)
        for key, item in given.items():
            changes.moved(item, join(at, key), join(new, f"sampler_parameters.{key}"))
        parameters = replace(node, value=given)
    return replace(node, value={"sampler_type": named, "sampler_parameters": parameters})


def _check(node: Node, given: dict[str, Node], kind: str, at: str) -> None:
    known = setting_hints(SAMPLERS[kind])
    for key, item in given.items():
        if key not in known:
            raise unknown_key(item, at, key, known)
    for key in _NEEDED[kind]:
        if key not in given:
            raise fail(node, at, f"the sampler {kind} needs the key {key!r}")
