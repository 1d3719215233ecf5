"""Configuration files: from a file and overrides to `RunSettings`, and back to a map.

The order of work is read, bring to the present format, lay overrides on top, take out what is
deprecated, lay each behavior over `default_settings`, and only then give types to everything.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.settings.inheritance import behavior_over, expanded, without_deprecated
from pipeline.settings.legacy import Changes, Family, kind_of, read_document, to_present
from pipeline.settings.nodes import Node, fail, join, merge, undotted
from pipeline.settings.reader import (
    entries_of,
    read_dataclass,
    setting_hints,
    shown,
    suggestion,
    to_map,
)
from pipeline.settings.schema import RunSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.settings.legacy import Present

_log = logging.getLogger(__name__)


def load_run_settings(
    path: Path | str | None,
    *,
    overrides: Mapping[str, object] | None = None,
    overrides_from: str = "overrides",
    env_path_follows: bool = False,
    curriculum: Path | str | None = None,
    sampler: Path | str | None = None,
) -> RunSettings:
    """The settings that a configuration file describes, with overrides on top.

    A file of an older ML-Agents is brought to the present format first; one line of the log says
    so, and one each tells what is no longer possible.

    Args:
        path: an ML-Agents trainer configuration of any age; None for the defaults.
        overrides: a nested map, or one with dotted keys (`behaviors.Walker.max_steps`), that is
            merged over the file before anything is checked.
        overrides_from: how errors name the place of the overrides.
        env_path_follows: whether the caller adds the environment later, so that several of them
            may be asked for without `env_settings.env_path`.
        curriculum: a curriculum of before 0.18, as YAML, JSON or a folder of `<Behavior>.json`;
            its parameters are used instead of those of the file.
        sampler: a sampler file of before 0.18; its parameters are used instead of all others.

    Raises:
        SettingsError: The file cannot be read, or something in it is not as it must be. The message
            is one line with file, line, key and remedy.
    """
    present = read_present(path, curriculum=curriculum, sampler=sampler)
    document = present.document
    if overrides:
        over = undotted(overrides, overrides_from)
        if path is not None:
            _refuse_unlisted_behaviors(document, over)
        document = merge(document, over)
    settings = structure(document)
    if not env_path_follows:
        _check_number_of_environments(document, settings)
    _tell(present, path)
    return replace(settings, from_file=path is not None, refused=present.refused)


def read_present(
    path: Path | str | None,
    *,
    curriculum: Path | str | None = None,
    sampler: Path | str | None = None,
) -> Present:
    """The document that describes a run, brought to the present format; nothing is typed yet.

    Args:
        path: as for `load_run_settings`.
        curriculum: as for `load_run_settings`.
        sampler: as for `load_run_settings`.

    Raises:
        SettingsError: A file cannot be read, holds nothing, or cannot be brought to the present
            format.
    """
    changes = Changes()
    document = Node({}, "the defaults")
    if path is not None:
        document = read_document(Path(path), changes=changes)
        _refuse_nothing(document)
        _refuse_other_kinds(document)
    return to_present(
        document,
        curriculum=None if curriculum is None else Path(curriculum),
        sampler=None if sampler is None else Path(sampler),
        changes=changes,
    )


def structure(document: Node) -> RunSettings:
    """Typed settings from a document of the present format.

    Raises:
        SettingsError: Something in it is not as it must be.
    """
    entries = dict(entries_of(document, ""))
    default = entries.get("default_settings")
    if default is not None and default.value is not None:
        entries["default_settings"] = default = without_deprecated(default, "default_settings")
        default = expanded(default, "default_settings")
    if "behaviors" in entries:
        behaviors = entries["behaviors"]
        items = {
            name: behavior_over(item, join("behaviors", name), default)
            for name, item in entries_of(behaviors, "behaviors").items()
        }
        entries["behaviors"] = replace(behaviors, value=items)
    settings: RunSettings = read_dataclass(RunSettings, replace(document, value=entries), "")
    _warn_about_unknown_measures(document, settings)
    return settings


def to_mapping(settings: RunSettings) -> dict[str, Any]:
    """The plain map of a written `configuration.yaml`: everything expanded, in its order."""
    mapping: dict[str, Any] = to_map(settings)
    if settings.default_settings is not None:
        used = mapping["default_settings"]["hyperparameters"]
        for name, behavior in settings.behaviors.items():
            # An addition that only the defaults use would be inherited if it were left out here.
            written = mapping["behaviors"][name]["hyperparameters"]
            for key in setting_hints(type(behavior.hyperparameters)):
                if key in used and key not in written:
                    written[key] = getattr(behavior.hyperparameters, key)
            # So would a reward signal that only they have.
            signals = mapping["behaviors"][name]["reward_signals"]
            for signal in settings.default_settings.reward_signals:
                signals.setdefault(signal, None)
    return mapping


def _refuse_nothing(document: Node) -> None:
    """An empty file is a slip: its behaviors would be trained with other settings than meant."""
    entries = entries_of(document, "")
    if not entries:
        raise fail(document, "", "holds no settings; leave the file out to train with the defaults")
    behaviors = entries.get("behaviors")
    if behaviors is not None and behaviors.value == {} and "default_settings" not in entries:
        text = "lists no behavior, and there are no default_settings; nothing could be trained"
        raise fail(behaviors, "behaviors", text)


def _refuse_other_kinds(document: Node) -> None:
    kind = kind_of(document)
    if kind != "trainer":
        text = f"this is a {kind} file, and not a trainer configuration; give it as --{kind}"
        raise fail(document, "", text)


def _tell(present: Present, path: Path | str | None) -> None:
    """Log what a user of an old file should know, once it is clear that it can be used."""
    if present.family is not Family.PRESENT:
        _log.info(
            "%s: the format is that of %s; `pipeline config upgrade` writes it as today's.",
            path,
            present.family.value,
        )
    for change in present.changes.made:
        if change.warns:
            _log.warning("%s", change)


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
