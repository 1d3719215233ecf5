"""A behavior that is complete in itself, as what it adds to `default_settings`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.settings.inheritance import behavior_over, expanded
from pipeline.settings.nodes import Node, from_plain
from pipeline.settings.reader import read, to_map
from pipeline.settings.schema import TrainerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING = object()


def over_default(full: Node, default: Node, path: str, *, is_own: Callable[[Node], bool]) -> Node:
    """The behavior that gives the settings of `full` once it is laid over `default`.

    In a flat file a section replaces whole values of the default section; in the present format it
    is laid over them at every depth. What would come in between is therefore written out, and a
    reward signal that only the default has becomes null.

    Args:
        full: a behavior with everything that it takes from the default section.
        default: `default_settings`.
        path: key path of the behavior, for errors.
        is_own: whether a value stands in the behavior's own section.

    Raises:
        SettingsError: A value is not allowed.
    """
    wanted = to_map(read(TrainerSettings, full, path))
    kind = {"trainer_type": full.value["trainer_type"]}
    inherited = behavior_over(
        replace(full, value=kind), path, expanded(default, "default_settings")
    )
    given = to_map(read(TrainerSettings, inherited, path))
    entries = _difference(full, wanted, given, is_own)
    return replace(full, value=entries)


def inherits_alone(behavior: Node, default: Node) -> bool:
    """Whether ML-Agents itself would read the behavior over the default as we do."""
    signals = behavior.value.get("reward_signals")
    kind = behavior.value.get("trainer_type")
    return (signals is None or all(item.value is not None for item in signals.value.values())) and (
        kind is None or kind.value == default.value["trainer_type"].value
    )


def _difference(
    full: Node, wanted: dict[str, Any], given: dict[str, Any], is_own: Callable[[Node], bool]
) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    written = full.value if isinstance(full.value, dict) else {}
    for key in [*written, *(key for key in wanted if key not in written)]:
        node = written.get(key)
        want, have = wanted.get(key), given.get(key, _MISSING)
        if isinstance(want, dict) and isinstance(have, dict):
            inner = _difference(node or Node({}, full.source, full.line), want, have, is_own)
            if inner:
                first = next(iter(inner.values()))
                entries[key] = Node(inner, first.source, first.line)
        elif want != have or (node is not None and is_own(node)):
            entries[key] = node or from_plain(want, full.source, full.line)
    for key in given:
        if key not in wanted:
            entries[key] = Node(None, full.source, full.line)
    return entries
