"""Configuration files: from a file and overrides to `RunSettings`, and back to a map.

The order of work is read, bring to the present format, lay overrides on top, take out what is
deprecated, lay each behavior over `default_settings`, and only then give types to everything.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.settings.nodes import Node, fail, from_plain, join, merge, undotted
from pipeline.settings.reader import (
    entries_of,
    read,
    read_dataclass,
    setting_hints,
    shown,
    suggestion,
    to_map,
)
from pipeline.settings.schema import HYPERPARAMETERS, RunSettings, TrainerSettings
from pipeline.settings.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)


def load_run_settings(
    path: Path | str | None,
    *,
    overrides: Mapping[str, object] | None = None,
    overrides_from: str = "overrides",
    env_path_follows: bool = False,
) -> RunSettings:
    """The settings that a configuration file describes, with overrides on top.

    Args:
        path: an ML-Agents trainer configuration; None for the defaults.
        overrides: a nested map, or one with dotted keys (`behaviors.Walker.max_steps`), that is
            merged over the file before anything is checked.
        overrides_from: how errors name the place of the overrides.
        env_path_follows: whether the caller adds the environment later, so that several of them
            may be asked for without `env_settings.env_path`.

    Raises:
        SettingsError: The file cannot be read, or something in it is not as it must be. The message
            is one line with file, line, key and remedy.
    """
    document = Node({}, "the defaults") if path is None else read_yaml(path)
    entries_of(document, "")
    if overrides:
        over = undotted(overrides, overrides_from)
        if path is not None:
            _refuse_unlisted_behaviors(document, over)
        document = merge(document, over)
    settings = structure(document)
    if not env_path_follows:
        _check_number_of_environments(document, settings)
    return replace(settings, from_file=path is not None)


def structure(document: Node) -> RunSettings:
    """Typed settings from a document of the present format.

    Raises:
        SettingsError: Something in it is not as it must be.
    """
    entries = dict(entries_of(document, ""))
    default = entries.get("default_settings")
    if default is not None and default.value is not None:
        entries["default_settings"] = default = _without_deprecated(default, "default_settings")
        default = _expanded(default, "default_settings")
    if "behaviors" in entries:
        behaviors = entries["behaviors"]
        items = {
            name: _behavior(item, join("behaviors", name), default)
            for name, item in entries_of(behaviors, "behaviors").items()
        }
        entries["behaviors"] = replace(behaviors, value=items)
    settings: RunSettings = read_dataclass(RunSettings, replace(document, value=entries), "")
    _warn_about_unknown_measures(document, settings)
    return settings


def to_mapping(settings: RunSettings) -> dict[str, Any]:
    """The plain map of a written `configuration.yaml`: everything expanded, in its order."""
    mapping: dict[str, Any] = to_map(settings)
    return mapping


def _expanded(default: Node, path: str) -> Node:
    """`default_settings` with every default filled in, and lines where something was written."""
    settings = read(TrainerSettings, default, path)
    full = merge(from_plain(to_map(settings), default.source, default.line), default)
    return replace(full, value={**full.value, _WRITTEN: default})


_WRITTEN = "(as written)"
"""Where `_expanded` keeps what the user wrote; taken out before anything is checked."""


def _behavior(node: Node, path: str, default: Node | None) -> Node:
    """A behavior's map over the default's.

    When the trainer types differ, only those hyperparameters are inherited which were written in
    `default_settings` and which the behavior's trainer has: the filled-in numbers of another
    algorithm are nobody's choice.
    """
    node = _without_deprecated(node, path)
    if default is None or default.value is None:
        return node
    base = dict(default.value)
    written = base.pop(_WRITTEN)
    kind = node.value.get("trainer_type", base["trainer_type"])
    if kind.value != base["trainer_type"].value and kind.text in HYPERPARAMETERS:
        given = written.value.get("hyperparameters", Node({}, default.source))
        known = setting_hints(HYPERPARAMETERS[kind.text])
        kept = {key: item for key, item in given.value.items() if key in known}
        base["hyperparameters"] = replace(given, value=kept)
    return merge(replace(default, value=base), node)


def _without_deprecated(node: Node, path: str) -> Node:
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


def _refuse_unlisted_behaviors(document: Node, over: Node) -> None:
    """An override for a behavior that the file does not list is a slip, not a new behavior."""
    listed = document.value.get("behaviors", Node({}, document.source)).value
    asked = over.value.get("behaviors")
    if asked is None or not isinstance(listed, dict):
        return
    for name, item in entries_of(asked, "behaviors").items():
        if name not in listed:
            raise fail(
                item,
                join("behaviors", name),
                f"{document.source} has no behavior {name!r}{suggestion(name, listed)} "
                f"It has: {', '.join(listed) or 'none'}",
            )


def _check_number_of_environments(document: Node, settings: RunSettings) -> None:
    env = settings.env_settings
    if env.num_envs > 1 and env.env_path is None:
        node = document.value["env_settings"].value["num_envs"]
        raise fail(
            node,
            "env_settings.num_envs",
            f"num_envs must be 1 if env_path is not set, got {shown(node)}. Name the environment's "
            "executable in env_settings.env_path",
        )


def _warn_about_unknown_measures(document: Node, settings: RunSettings) -> None:
    """A lesson that waits for a behavior which does not exist never ends."""
    if settings.default_settings is not None or not settings.behaviors:
        return
    for name, parameter in (settings.environment_parameters or {}).items():
        for index, lesson in enumerate(parameter.curriculum):
            criteria = lesson.completion_criteria
            if criteria is not None and criteria.behavior not in settings.behaviors:
                _warn(
                    document.value["environment_parameters"].value[name],
                    f"environment_parameters.{name}.curriculum[{index}].completion_criteria.behavior",
                    f"no behavior is called {criteria.behavior!r}"
                    f"{suggestion(criteria.behavior, settings.behaviors)} The lesson will not end",
                )


def _warn(node: Node, path: str, message: str) -> None:
    _log.warning("%s: %s: %s", node.where, path, message)
