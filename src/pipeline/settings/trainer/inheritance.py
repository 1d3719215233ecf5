"""Inheritance of behaviors from `default_settings`; removal of deprecated keys."""

import logging
from dataclasses import replace
from typing import NamedTuple

from pipeline.settings.nodes import Node, from_plain, join, merge
from pipeline.settings.reader import entries_of, read, setting_hints, to_map
from pipeline.settings.trainer.schema import HYPERPARAMETERS, TrainerSettings

_log = logging.getLogger(__name__)


class Defaults(NamedTuple):
    """The settings that behaviors inherit: as written, and completed with the schema's defaults."""

    written: Node
    full: Node


def expanded(default: Node) -> Defaults:
    """Return `default_settings` in both forms: as written, and completed with all defaults."""
    settings = read(TrainerSettings, default, "default_settings")
    # The written nodes come last, so that errors give their lines.
    filled = from_plain(to_map(settings), default.source, default.line)
    return Defaults(written=default, full=merge(filled, default))


def behavior_over(node: Node, path: str, default: Defaults | None) -> Node:
    """Return a behavior's map of settings, merged over the map of `default_settings`.

    If the behavior has another trainer type than `default_settings`, it inherits only the
    hyperparameters that the file lists in `default_settings` and that its trainer has. It does not
    inherit default values of the trainer type in `default_settings`, which the user did not choose.
    """
    # Deprecated keys are removed first, because the settings classes do not accept them.
    node = without_deprecated(node, path)
    if default is not None:
        # The map is copied, because all behaviors use the same defaults.
        base = dict(default.full.value)
        # A behavior with another trainer type inherits only hyperparameters that its trainer has.
        # In ML-Agents it inherits all, so that PPO's are refused in a SAC behavior.
        kind = node.value.get("trainer_type", base["trainer_type"])
        if kind.value != base["trainer_type"].value and str(kind.value) in HYPERPARAMETERS:
            written = default.written
            hyperparameters = written.value.get("hyperparameters", Node({}, written.source))
            known = setting_hints(HYPERPARAMETERS[str(kind.value)])
            inherited = {key: item for key, item in hyperparameters.value.items() if key in known}
            base["hyperparameters"] = replace(hyperparameters, value=inherited)
        # Nested maps are merged at every depth, as in ML-Agents since 0.20.
        node = merge(replace(default.full, value=base), node)
    signals = node.value.get("reward_signals")
    if signals is None or not isinstance(signals.value, dict):
        return node
    # `extrinsic: null` removes an inherited signal.
    remaining = {name: item for name, item in signals.value.items() if item.value is not None}
    return replace(node, value=node.value | {"reward_signals": replace(signals, value=remaining)})


def without_deprecated(node: Node, path: str) -> Node:
    """Return a behavior's map without deprecated keys, with a warning about each."""
    entries = dict(entries_of(node, path))
    # Releases of ML-Agents with two backends chose TensorFlow or PyTorch by this key.
    if "framework" in entries:
        _warn(entries.pop("framework"), path, "Framework option was deprecated but was specified")
    _drop_conditioning(entries, path)
    signals, at = entries.get("reward_signals"), join(path, "reward_signals")
    if signals is not None and isinstance(signals.value, dict):
        items = signals.value.items()
        converted = {name: _signal(item, name, join(at, name)) for name, item in items}
        entries["reward_signals"] = replace(signals, value=converted)
    return replace(node, value=entries)


def _drop_conditioning(entries: dict[str, Node], path: str) -> None:
    network, key = entries.get("network_settings"), "conditioning_type"
    if network is not None and isinstance(network.value, dict) and key in network.value:
        rest = dict(network.value)
        at = join(path, f"network_settings.{key}")
        _warn(rest.pop(key), at, "is ignored; its new name is 'goal_conditioning_type'")
        entries["network_settings"] = replace(network, value=rest)


def _signal(node: Node, name: str, path: str) -> Node:
    if not isinstance(node.value, dict):
        return node
    entries = dict(node.value)
    _drop_conditioning(entries, path)
    # The extrinsic signal has no network, so its `encoding_size` is refused as an unknown key.
    if name != "extrinsic" and "encoding_size" in entries:
        # In old releases this one number was the width of the networks.
        size = entries.pop("encoding_size")
        text = "'encoding_size' was deprecated for RewardSignals. Please use network_settings."
        if "network_settings" in entries:
            text += " It is ignored, because network_settings is given"
        else:
            entries["network_settings"] = replace(size, value={"hidden_units": size})
        _warn(size, join(path, "encoding_size"), text)
    return replace(node, value=entries)


def _warn(node: Node, path: str, message: str) -> None:
    _log.warning("%s: %s: %s", node.where, path, message)
