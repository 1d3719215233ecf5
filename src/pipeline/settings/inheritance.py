"""Each behavior over `default_settings`, and keys that are accepted but no longer used."""

from __future__ import annotations

import logging
from dataclasses import replace

from pipeline.settings.nodes import Node, from_plain, join, merge
from pipeline.settings.reader import entries_of, read, setting_hints, to_map
from pipeline.settings.schema import HYPERPARAMETERS, TrainerSettings

_log = logging.getLogger(__name__)


def expanded(default: Node, path: str) -> Node:
    """`default_settings` with every default filled in, and lines where something was written."""
    settings = read(TrainerSettings, default, path)
    full = merge(from_plain(to_map(settings), default.source, default.line), default)
    return replace(full, value={**full.value, _WRITTEN: default})


_WRITTEN = "(as written)"
"""Where `expanded` keeps what the user wrote; taken out before anything is checked."""


def behavior_over(node: Node, path: str, default: Node | None) -> Node:
    """A behavior's map over the default's.

    When the trainer types differ, only those hyperparameters are inherited which were written in
    `default_settings` and which the behavior's trainer has: the filled-in numbers of another
    algorithm are nobody's choice.
    """
    node = without_deprecated(node, path)
    if default is None or default.value is None:
        return _without_null_signals(node)
    base = dict(default.value)
    written = base.pop(_WRITTEN)
    kind = node.value.get("trainer_type", base["trainer_type"])
    if kind.value != base["trainer_type"].value and kind.text in HYPERPARAMETERS:
        given = written.value.get("hyperparameters", Node({}, default.source))
        known = setting_hints(HYPERPARAMETERS[kind.text])
        kept = {key: item for key, item in given.value.items() if key in known}
        base["hyperparameters"] = replace(given, value=kept)
    return _without_null_signals(merge(replace(default, value=base), node))


def _without_null_signals(node: Node) -> Node:
    """`extrinsic: null` takes away a signal that would be inherited."""
    signals = node.value.get("reward_signals")
    if signals is None or not isinstance(signals.value, dict):
        return node
    kept = {name: item for name, item in signals.value.items() if item.value is not None}
    return replace(node, value=node.value | {"reward_signals": replace(signals, value=kept)})


def without_deprecated(node: Node, path: str) -> Node:
    """A behavior's map without the keys that are accepted but no longer used, with a warning."""
    entries = dict(entries_of(node, path))
    if "framework" in entries:
        _warn(entries.pop("framework"), path, "Framework option was deprecated but was specified")
    for key in ("network_settings", "reward_signals"):
        if key in entries and isinstance(entries[key].value, dict):
            entries[key] = (_signals if key == "reward_signals" else _network)(
                entries[key], join(path, key)
            )
    return replace(node, value=entries)


def _network(node: Node, path: str) -> Node:
    entries = dict(node.value)
    if "conditioning_type" in entries:
        _warn(
            entries.pop("conditioning_type"),
            join(path, "conditioning_type"),
            "is ignored; the key is called 'goal_conditioning_type'",
        )
    return replace(node, value=entries)


def _signals(node: Node, path: str) -> Node:
    return replace(
        node,
        value={
            name: _signal(item, join(path, name), has_encoding=name != "extrinsic")
            for name, item in node.value.items()
        },
    )


def _signal(node: Node, path: str, *, has_encoding: bool) -> Node:
    if not isinstance(node.value, dict):
        return node
    entries = dict(node.value)
    network = entries.get("network_settings")
    if network is not None and isinstance(network.value, dict):
        entries["network_settings"] = _network(network, join(path, "network_settings"))
    if has_encoding and "encoding_size" in entries:
        size = entries.pop("encoding_size")
        _warn(
            size,
            join(path, "encoding_size"),
            "'encoding_size' was deprecated for RewardSignals. Please use network_settings."
            + (" It is ignored beside network_settings" if network is not None else ""),
        )
        if network is None:
            entries["network_settings"] = replace(size, value={"hidden_units": size})
    return replace(node, value=entries)


def _warn(node: Node, path: str, message: str) -> None:
    _log.warning("%s: %s: %s", node.where, path, message)
