"""Configuration files: conversion of a file and overrides to `RunSettings`, and back to a map.

The steps are: read, convert to the present format, merge the overrides, remove deprecated keys,
merge each behavior over `default_settings`, and last convert to types.
"""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeline.errors import Mistakes, SettingsError, shell_command
from pipeline.files import similar
from pipeline.settings.nodes import Node, fail, fail_at, find, join, merge, undotted, walk
from pipeline.settings.reader import entries_of, read_dataclass, setting_hints, suggestion, to_map
from pipeline.settings.trainer.inheritance import behavior_over, expanded, without_deprecated
from pipeline.settings.trainer.legacy.convert import (
    Family,
    Present,
    kind_of,
    read_document,
    to_present,
)
from pipeline.settings.trainer.legacy.flat import Changes
from pipeline.settings.trainer.schema import (
    WORDS,
    DemoPath,
    RunSettings,
    TrainerSettings,
    places_in_behavior,
)

_log = logging.getLogger(__name__)

# The dotted key of a value that names a file has one of these ends.
_FILE_KEYS = (".demo_path", ".init_path")
_PLACED_KEYS = (*_FILE_KEYS, ".hyperparameters.steps_per_update")
_BEHAVIORS = ("default_settings", "behaviors")
_IN_A_BEHAVIOR = frozenset(setting_hints(TrainerSettings))
# `behaviors` and `debug` are left out, so they remain possible names of behaviors.
_BESIDE_BEHAVIORS = frozenset(setting_hints(RunSettings)) - {"behaviors", "debug"}


def load_run_settings(
    path: Path | str | None,
    *,
    overrides: Mapping[str, object] | Node | None = None,
    overrides_from: str = "overrides",
    curriculum: Path | str | None = None,
    sampler: Path | str | None = None,
    demonstrations_in: Path | None = None,
) -> RunSettings:
    """Return the settings of a configuration file, with overrides on top.

    A file of an older ML-Agents is converted to the present format first; the log has a line about
    this, and a line about each feature that was removed.

    Args:
        path: an ML-Agents trainer configuration of any age; None for the defaults.
        overrides: a nested map, or one with dotted keys (`behaviors.Walker.max_steps`), that is
            merged over the file before anything is checked; or a node with files and lines.
        overrides_from: how errors name the place of the overrides.
        curriculum: a curriculum of ML-Agents before 0.18, as YAML, JSON or a folder of
            `<Behavior>.json`; its parameters replace parameters of the same name in the file.
        sampler: a sampler file of ML-Agents before 0.18; its parameters replace all others of the
            same name.
        demonstrations_in: the folder whose missing demonstrations are reported together with
            mistakes of the file; None to report only the mistakes.

    Raises:
        SettingsError: The file cannot be read, or has a mistake. The message has one line for each
            mistake, with file, line, key and remedy.
    """
    # Overrides always use the present names, so they are merged after the conversion.
    present = read_present(path, curriculum=curriculum, sampler=sampler)
    document = present.document
    if overrides:
        over = undotted(overrides, overrides_from)
        if path is not None:
            # After merging, a misspelt behavior would look like a new one.
            _refuse_unlisted_behaviors(document, over)
        document = merge(document, over)
    mistakes = Mistakes()
    with mistakes:
        # Types are checked after merging, so that an override can correct a mistake of the file.
        # All independent mistakes of the file are reported together, not one at each try.
        settings = structure(document)
    if mistakes.found and demonstrations_in is not None:
        mistakes.found += _missing_demonstrations(document, demonstrations_in)
    mistakes.refuse()
    _tell(present, path)  # this is last, so that a file with a mistake gives only the error
    return replace(
        settings,
        from_file=path is not None,
        refused=present.refused,
        places=dict(_places(document)),
    )


def read_present(
    path: Path | str | None,
    *,
    curriculum: Path | str | None = None,
    sampler: Path | str | None = None,
) -> Present:
    """Return a configuration file in the present format; its values are not checked yet."""
    changes = Changes()
    document = Node({}, "the defaults")
    if path is not None:
        document = read_document(Path(path), changes=changes)
        # A file with only comments crashes ML-Agents; here it is one clear error.
        _refuse_unusable(document)
    return to_present(document, curriculum=curriculum, sampler=sampler, changes=changes)


def structure(document: Node) -> RunSettings:
    """Return the settings of a document in the present format."""
    mistakes = Mistakes()
    entries = _without_misplaced(entries_of(document, ""), mistakes)
    default = entries.get("default_settings")
    inherited = None
    if default is not None and default.value is not None:
        with mistakes:
            entries["default_settings"] = default = without_deprecated(default, "default_settings")
            # `expanded` also checks the defaults: here once, and not again for each behavior.
            inherited = expanded(default)
        # Each behavior would repeat mistakes in the defaults.
        if inherited is None:
            entries = {key: item for key, item in entries.items() if key not in _BEHAVIORS}
    if "behaviors" in entries:
        behaviors = entries["behaviors"]
        items: dict[str, Node] = {}
        with mistakes:
            listed = entries_of(behaviors, "behaviors")
            for name, item in listed.items():
                # A wrong indent moves all keys of a section, and one error is enough.
                _refuse_as_behavior(name, item)
            for name, item in listed.items():
                with mistakes:
                    items[name] = behavior_over(item, join("behaviors", name), inherited)
        entries["behaviors"] = replace(behaviors, value=items)
    settings: RunSettings = read_dataclass(
        RunSettings, replace(document, value=entries), "", mistakes=mistakes
    )
    _check_measures(document, settings)
    return settings


def to_mapping(settings: RunSettings) -> dict[str, Any]:
    """Return the plain map of a `configuration.yaml`: all keys of ML-Agents, in its order."""
    mapping: dict[str, Any] = to_map(settings)
    if settings.default_settings is not None:
        used = mapping["default_settings"]
        for name, behavior in settings.behaviors.items():
            written = mapping["behaviors"][name]
            for section in ("hyperparameters", "network_settings"):
                _override(written[section], used[section], getattr(behavior, section))
            # A signal that only the defaults have becomes null, so that the behavior does not
            # inherit it. The network settings of other signals are treated like the sections above.
            for signal, inherited in used["reward_signals"].items():
                if written["reward_signals"].setdefault(signal, None) is not None:
                    network = written["reward_signals"][signal]["network_settings"]
                    values = behavior.reward_signals[signal].network_settings
                    _override(network, inherited["network_settings"], values)
    return mapping


def _override(written: dict[str, Any], inherited: Mapping[str, Any], values: Any) -> None:
    """Add to `written` the values that it omits and would inherit when the file is read."""
    for key in setting_hints(type(values)):
        if key in inherited and key not in written:
            written[key] = getattr(values, key)


def as_written(document: Node, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a document of the present format has, with their values in `resolved`.

    This is the configuration as a person would write it, with the present names.
    """
    written: dict[str, Any] = {}
    # With `default_settings`, null in a behavior means that a value is not inherited; elsewhere it
    # means that a value is not set.
    optional = {"environment_parameters", "default_settings"}
    optional |= set() if "default_settings" in document.value else {"behaviors"}
    for key, node in document.value.items():
        if node.value is None:
            continue
        current = without_deprecated(node, key) if key == "default_settings" else node
        if key == "behaviors":
            items = node.value.items()
            kept = {name: without_deprecated(item, join(key, name)) for name, item in items}
            current = replace(node, value=kept)
        values = as_resolved(current, resolved[key])
        written[key] = _without_nulls(values) if key in optional else values
    return written


def as_resolved(node: Node, resolved: Any) -> Any:
    """Return the keys of a document or of overrides, with their values in a `to_mapping`."""
    entries = node.value if isinstance(node.value, dict) else {}
    defaults = resolved if isinstance(resolved, dict) else {}
    # In a file a value may stand for a curriculum of one lesson, and a number for a constant
    # sampler; the resolved form always has the curriculum and the sampler.
    if "curriculum" in defaults and "curriculum" not in entries:
        return as_resolved(node, defaults["curriculum"][0]["value"])
    if "sampler_parameters" in defaults and not entries:
        return defaults["sampler_parameters"]["value"]
    if isinstance(node.value, dict):
        return {key: as_resolved(item, defaults.get(key)) for key, item in entries.items()}
    if isinstance(node.value, list) and isinstance(resolved, list):
        return [as_resolved(*pair) for pair in zip(node.value, resolved, strict=True)]
    return node.value if resolved is None else resolved


def _places(document: Node) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the place (`file:line`) of values that later checks may refuse."""
    # The error about an unlisted behavior needs the place of each behavior's name.
    for name, item in document.value.get("behaviors", Node({}, "")).value.items():
        yield join("behaviors", name), item.where
    for path, node in walk(document):
        if path.endswith(_PLACED_KEYS):
            yield path, node.where
            for index, item in enumerate(node.value if isinstance(node.value, list) else ()):
                yield join(path, index), item.where


def _missing_demonstrations(document: Node, folder: Path) -> Iterator[SettingsError]:
    """Yield an error for each path in a `demo_path` that has no demonstrations in `folder`."""
    # The document is searched, because there are no settings if it has mistakes.
    for path, node in walk(document):
        if path.endswith(".demo_path"):
            with contextlib.suppress(SettingsError):  # not a path, which is reported elsewhere
                for text in DemoPath.from_node(node, path).paths:
                    if wrong := why_no_demonstrations(text, folder):
                        yield fail(node, path, wrong)


def _refuse_unusable(document: Node) -> None:
    """Refuse a file of another kind, without settings, or with no or too many behaviors."""
    entries = entries_of(document, "")
    # An empty file is more likely a wrong path than a wish for the defaults.
    if not entries:
        raise fail(document, "", "has no settings; leave the file out to train with the defaults")
    behaviors = entries.get("behaviors")
    listed = None if behaviors is None else behaviors.value
    if listed == {} and "default_settings" not in entries:
        text = "lists no behavior; add a behavior, or add default_settings for all behaviors"
        raise fail_at(document, "behaviors", text)
    # An environment has at most 1,024 behaviors, and reading each takes time.
    if isinstance(listed, dict) and len(listed) > 1024:
        text = f"has {len(listed):,} behaviors; an environment has at most 1,024"
        raise fail_at(document, "behaviors", f"{text}: remove the others")
    # The file may be a curriculum or a sampler file of an old release.
    kind = kind_of(document)
    if kind != "trainer":
        text = f"this is a {kind} file, and not a trainer configuration; give it as --{kind}"
        raise fail(document, "", text)


def _without_misplaced(entries: Mapping[str, Node], mistakes: Mistakes) -> dict[str, Node]:
    """Return the top-level entries that do not belong in a section; refuse the others."""
    above, known, places = None, setting_hints(RunSettings), places_in_behavior()
    remaining, told = dict(entries), set[str]()
    for key, item in entries.items():
        if key in known:
            # The keys after an empty section probably have the wrong indent.
            above = key if item.value is None else None
            continue
        is_behavior = isinstance(item.value, dict) and item.value.keys() & _IN_A_BEHAVIOR
        place, remark = WORDS.get(key, (places.get(key), ""))
        section = "behaviors" if is_behavior else above
        if key == "default" and is_behavior:
            text = "is called 'default_settings' in a file with 'behaviors'"
        elif place and not is_behavior and above in (None, "behaviors"):
            what = "a setting" if place == key else f"{place}{remark}"
            text = f"is {what} of a behavior; it belongs below 'behaviors:' and the behavior's name"
        # A key that is similar to a known key is probably misspelt, and not misplaced.
        elif section and not get_close_matches(key, known):
            # All entries of a section give one error.
            text = "" if section in told else "is at the top level of the file; indent it below"
            text = text and f"{text} '{section}:'"
            told.add(section)
        else:
            continue
        del remaining[key]
        if text:
            mistakes.found.append(fail(item, key, text))
    # A section that the wrong indent has left empty is removed as well.
    return {
        key: item for key, item in remaining.items() if not (key in told and item.value is None)
    }


def _refuse_as_behavior(name: str, item: Node) -> None:
    """Refuse a key below `behaviors` that cannot be the name of a behavior."""
    # The name on the wire is `<behavior>?team=<n>`, but all teams share the behavior's settings.
    plain, team, _ = name.partition("?")
    if team:
        text = f"the teams of a behavior share its settings; write {plain!r}"
    elif name in _IN_A_BEHAVIOR:
        text = "is a setting of a behavior; indent it below the behavior's name"
    elif name in _BESIDE_BEHAVIORS:
        text = "belongs to the top level of the file; indent it as 'behaviors:' is"
    else:
        return
    raise fail(item, join("behaviors", name), text)


def _tell(present: Present, path: Path | str | None) -> None:
    """Log the notes about the conversion of an old file."""
    if present.family is not Family.PRESENT:
        text = "%s: has the format of %s; `%s` converts it to the present format."
        _log.info(text, path, present.family.value, upgrade_command(Path(str(path))))
    behaviors = present.document.value.get("behaviors")
    if behaviors is not None and behaviors.value and "default" in behaviors.value:
        text = "%s: behaviors.default: only a behavior called 'default' has these settings; the "
        text += "settings of other behaviors are 'default_settings', at the top level of the file"
        _log.warning(text, behaviors.value["default"].where)
    for change in present.changes.entries:
        if change.warns:
            _log.warning("%s", change)


def upgrade_command(*olds: Path) -> str:
    """Return the command that converts old files to the present format."""
    new = olds[0].with_suffix(".new.yaml")
    return shell_command("pipeline", "config", "upgrade", *olds, "-o", new)


def _refuse_unlisted_behaviors(document: Node, over: Node) -> None:
    """Raise an error for an override of a behavior that the file does not list."""
    # An override that adds a behavior would otherwise train nothing, without a message.
    listed = document.value.get("behaviors", Node({}, document.source)).value
    behaviors = over.value.get("behaviors")
    if behaviors is None or not isinstance(listed, dict):
        return
    for name, item in entries_of(behaviors, "behaviors").items():
        if name not in listed:
            text = f"{document.source} has no behavior {name!r}{suggestion(name, listed)}"
            text += f" It has: {', '.join(listed) or 'none'}"
            raise fail(item, join("behaviors", name), text)


def _check_measures(document: Node, settings: RunSettings) -> None:
    """Warn of lessons that measure an unknown behavior, and refuse Elo without self-play."""
    # Such lessons would never end.
    # With default_settings, a lesson may measure a behavior that the file does not list.
    all_listed = settings.default_settings is None and bool(settings.behaviors)
    for name, parameter in (settings.environment_parameters or {}).items():
        for index, lesson in enumerate(parameter.curriculum):
            criteria = lesson.completion_criteria
            if criteria is None:
                continue
            # The lesson is taken from the document, because nodes have lines and settings do not.
            item = document.value["environment_parameters"].value[name]
            at = f"environment_parameters.{name}.curriculum[{index}].completion_criteria"
            behavior = criteria.behavior
            # The last lesson's criteria are ignored, so a wrong measure in it does no harm.
            is_rated = criteria.measure == "elo" and lesson is not parameter.curriculum[-1]
            if all_listed and behavior not in settings.behaviors:
                near = suggestion(behavior, settings.behaviors)
                text = "%s: %s.behavior: no behavior is called %r%s The lesson will not end"
                _log.warning(text, item.where, at, behavior, near)
            elif is_rated and settings.for_behavior(behavior).self_play is None:
                text = f"only self-play rates a policy, and {behavior!r} has none; give "
                text += f"behaviors.{behavior} the section self_play, or measure reward"
                node = item.value["curriculum"].value[index]
                node = find(node, "completion_criteria.measure")
                raise fail(node, f"{at}.measure", text)


def _without_nulls(value: Any) -> Any:
    """Return a map without null values, and without maps of only null values."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    # Inner maps are treated first, because a map with only null values disappears as well.
    remaining = {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in remaining.items() if item != {} or value[key] == {}}


def missing_demonstrations(
    settings: RunSettings, *, folder: Path = Path(), made: Collection[str] = ()
) -> dict[str, str]:
    """Return a text for each behavior that lacks demonstrations in `folder`, by its section's key.

    The text is about the first path that has no demonstrations. If no behavior is listed,
    `default_settings` are checked. Paths in `made` are not checked, because a stage writes them.
    """
    missing: dict[str, str] = {}
    # The default settings are the last section.
    for section, trainer in list(settings.sections.items())[: len(settings.behaviors) or 1]:
        for key, path in demonstrations(trainer):
            # Only the first missing demonstration of a behavior is reported.
            wrong = None if section in missing else why_no_demonstrations(path, folder)
            if wrong and path not in made:
                at = f"{section}.{key}"
                at = at if settings.place_of(at) else at.partition("[")[0]
                missing[section] = f"{_beginning(settings, at)}: {wrong}"
    return missing


def _beginning(settings: RunSettings, key: str) -> str:
    """Return the beginning of an error about a behavior's dotted key: place, if known, and key."""
    place = settings.place_of(key)
    return f"{place}: {key}" if place else key


def refuse_missing_demonstrations(
    settings: RunSettings, *, folder: Path = Path(), made: Collection[str] = ()
) -> None:
    """Refuse a run if no behavior has its demonstrations; else warn of behaviors without them."""
    # One behavior with demonstrations is enough: the environment may have only this one, as with
    # files of old releases, which list the behaviors of many environments.
    missing = list(missing_demonstrations(settings, folder=folder, made=made).values())
    if missing and len(missing) == (len(settings.behaviors) or 1):
        raise SettingsError(missing[0])
    for text in missing:
        _log.warning("%s", text)


def refuse_missing_weights(settings: RunSettings, *, folder: Path) -> None:
    """Refuse an `init_path` that does not exist and is not in `results/`."""
    if settings.checkpoint_settings.initialize_from is not None:
        return  # init_path may then name a file in the run of `initialize_from`
    for name, trainer in settings.behaviors.items():
        path = trainer.init_path
        # Checkpoints in `results/` may be outputs of a stage that has not run yet.
        if path and Path(path).parts[:1] != ("results",) and not (folder / path).exists():
            at = _beginning(settings, f"behaviors.{name}.init_path")
            hint = similar(folder / path) or "; name a checkpoint, or leave it out"
            raise SettingsError(f"{at}: {path} does not exist{hint}")


def refuse_undecided(settings: RunSettings) -> None:
    """Refuse `steps_per_update: auto`, which would give different results for equal inputs."""
    # A number that depends on measured times differs between machines, and so do the results.
    for section in settings.undecided():
        at = _beginning(settings, f"{section}.hyperparameters.steps_per_update")
        raise SettingsError(
            f"{at}: needs a number in an experiment of params.yaml, got 'auto', which depends on "
            "measured times; `pipeline timers RUN` proposes one from a run of `pipeline learn`"
        )


def demonstrations(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each path to demonstrations, and the path."""
    # GAIL and behavioral cloning read demonstrations; other signals have no demo_path.
    users = {f"reward_signals.{name}": signal for name, signal in trainer.reward_signals.items()}
    for key, user in {**users, "behavioral_cloning": trainer.behavioral_cloning}.items():
        demo_path = getattr(user, "demo_path", None)
        for index, path in enumerate(demo_path.paths if demo_path else ()):
            yield f"{key}.demo_path[{index}]", path


def why_no_demonstrations(path: str, folder: Path) -> str | None:
    """Return why a path has no demonstrations in `folder`; None if it has some."""
    full_path = folder / path
    if full_path.is_dir():
        # Only the folder itself is searched, as in ML-Agents, and no subfolder.
        return None if any(full_path.glob("*.demo")) else f"{path} has no '.demo' files"
    if full_path.exists():
        return None
    record = shell_command("pipeline", "demo", "record", "ENV", "-o", path)
    remedy = f"; record one with `{record}`, or with Unity's Demonstration Recorder"
    return f"{path} does not exist{similar(full_path) or remedy}"
