"""`pipeline config`: check a trainer configuration, and convert an old one to today's format."""

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import files
from pipeline.algos.schedules import BETA_FLOOR, EPSILON_FLOOR, LEARNING_RATE_FLOOR
from pipeline.cli.parser import Parser, option
from pipeline.errors import SettingsError, brief
from pipeline.settings import (
    RunSettings,
    TrainerSettings,
    dump_yaml,
    load_run_settings,
    parse_yaml,
    to_mapping,
)
from pipeline.settings.reader import entries_of
from pipeline.settings.trainer.legacy.convert import Family, Kind, Present, kind_of, read_document
from pipeline.settings.trainer.run_file import (
    as_written,
    missing_demonstrations,
    read_present,
    structure,
    upgrade_command,
)

_log = logging.getLogger(__name__)


def add_options(parser: Parser) -> None:
    """Add the subcommands `check` and `upgrade`."""
    text = "check a configuration of any ML-Agents release, and show its settings"
    command = parser.add_command("check", text, check)
    text = "a trainer configuration, curriculum or sampler file"
    command.add_argument("file", type=Path, help=text)
    option(command, "--curriculum FILE", "a curriculum: YAML, JSON, or a folder of <Behavior>.json")
    option(command, "--sampler FILE", "a sampler file")
    option(command, "--full", "print every setting as YAML, with the defaults")
    text = "convert an old configuration to today's format"
    command = parser.add_command("upgrade", text, upgrade)
    text = "old files: trainer configuration, curriculum and sampler; at most one of each"
    command.add_argument("old", nargs="+", type=Path, help=text)
    option(command, "-o --output FILE", "the file to write", required=True)
    option(command, "--force", "overwrite FILE if it exists")
    option(command, "--verbose", "list every moved or removed key with its line")


def check(arguments: argparse.Namespace) -> str:
    """Return a short verdict on a file, or with `--full` all settings as YAML.

    The file is a trainer configuration of any release, or a single curriculum or sampler file.
    """
    file = arguments.file
    parts = _by_kind([file])
    # A curriculum or sampler file may be given as `file` or by its option, but not by both.
    kinds: tuple[Kind, ...] = ("curriculum", "sampler")
    for kind in kinds:
        if (path := getattr(arguments, kind)) is not None:
            if kind in parts:
                raise SettingsError(
                    f"{path}: {file} is also a {kind} file. Give only one file of each kind."
                )
            parts[kind] = path
    # `trainer` is None for a lone curriculum or sampler file, which is checked with the defaults.
    trainer = parts.get("trainer")
    curriculum, sampler = parts.get("curriculum"), parts.get("sampler")
    settings = load_run_settings(
        trainer, curriculum=curriculum, sampler=sampler, demonstrations_in=Path()
    )
    if not arguments.full:
        missing = list(missing_demonstrations(settings).values())
        # This is also the rule of `learn`: a run is refused if no behavior has its demonstrations.
        if missing and len(missing) == max(len(settings.behaviors), 1):
            raise SettingsError(f"the configuration is valid, but cannot be used yet: {missing[0]}")
        present = read_present(trainer, curriculum=curriculum, sampler=sampler)
        olds = [path for path in (file, arguments.curriculum, arguments.sampler) if path]
        return _verdict(olds, settings, present)
    mapping = to_mapping(settings)
    if trainer is None:
        # All other keys would be defaults that are not in the user's file.
        mapping = {"environment_parameters": mapping["environment_parameters"]}
    return dump_yaml(mapping).rstrip("\n")


def _verdict(olds: Sequence[Path], settings: RunSettings, present: Present) -> str:
    lines = [f"{olds[0]}: can be used."]
    if settings.from_file:
        lines.append(f"  format: {present.family.value}")
        trained = [
            f"{brief(name)} ({_trained(behavior)})" for name, behavior in settings.behaviors.items()
        ]
        if settings.default_settings is not None:
            trained.append(f"any other ({_trained(settings.default_settings)})")
        lines.append(f"  behaviors: {', '.join(trained) or 'any, with the built-in settings'}")
    parameters = settings.environment_parameters or {}
    if parameters:
        lessons = [
            f"{brief(name)} ({len(parameter.curriculum)})" for name, parameter in parameters.items()
        ]
        lines.append(f"  environment parameters (number of lessons): {', '.join(lessons)}")
    # Moved keys are only counted here: an old file may have a hundred of them.
    moved = sum(change.kind == "moved" for change in present.changes.entries)
    warned = sum(change.warns for change in present.changes.entries)
    if moved or warned:
        lines.append(
            f"  converted to today's format: {moved} keys have moved; {warned} warnings name "
            f"settings with another meaning (`{upgrade_command(*olds)} --verbose` lists each)"
        )
    lines += [f"  rises:    {text}" for text in _rising(settings)]
    for section, trainer in settings.sections.items():
        lines += [f"  sizes:    {brief(section)}: {text}" for text in trainer.contrary_sizes()]
    lines += [f"  not here: {text}" for text in missing_demonstrations(settings).values()]
    lines.append("`--full` prints every setting.")
    return "\n".join(lines)


def _rising(settings: RunSettings) -> Iterator[str]:
    """Yield a line for each setting with an initial value below the last value of its schedule."""
    # As in ML-Agents, linear schedules end at these values and not at 0.
    floors = {"learning_rate": LEARNING_RATE_FLOOR, "epsilon": EPSILON_FLOOR, "beta": BETA_FLOOR}
    for section, trainer in settings.sections.items():
        for key, floor in floors.items():
            value = getattr(trainer.hyperparameters, key, floor)
            kind = getattr(trainer.hyperparameters, f"{key}_schedule", "constant")
            if kind == "linear" and value < floor:
                yield (
                    f"{brief(section)}.hyperparameters.{key} goes from {value:g} up to {floor:g}, "
                    f"where a linear schedule ends; {key}_schedule: constant keeps {value:g}"
                )


def _trained(settings: TrainerSettings) -> str:
    return f"{settings.trainer_type}, {settings.max_steps:,} steps"


def upgrade(arguments: argparse.Namespace) -> str:
    """Write a configuration in the present format, and return a summary of the changes."""
    olds, new = arguments.old, arguments.output
    # An existing file at this path may be the only copy of settings that have worked.
    if new.exists() and not arguments.force:
        raise SettingsError(f"{new} exists already. Choose another name, or use --force.")
    parts = _by_kind(olds)
    present = read_present(parts.pop("trainer", None), **parts)
    text = _header(olds, present) + _body(present, new)
    files.write_whole(new, text)
    return _summary(olds, new, present, every=arguments.verbose)


def _by_kind(paths: Sequence[Path]) -> dict[Kind, Path]:
    parts: dict[Kind, Path] = {}
    for path in paths:
        kind: Kind = "curriculum"
        # Only a curriculum can be a folder: old releases had a JSON file for each behavior.
        if not path.is_dir():
            document = read_document(path)
            entries_of(document, "")
            kind = kind_of(document)
        if kind in parts:
            what = f"{path}: this is a {kind} file, like {parts[kind]}"
            raise SettingsError(f"{what}. Give only one file of each kind.")
        parts[kind] = path
    return parts


def _body(present: Present, new: Path) -> str:
    """Return the new file's YAML text, after a check that it gives the settings of the old file."""
    original = structure(present.document)
    # Warnings are turned off here, because they were logged when the file was first read.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        portable = structure(present.portable)
        body = dump_yaml(as_written(present.portable, to_mapping(portable)))
        # The written text is read back: a setting that the converter lost would otherwise be
        # noticed only after a long training.
        reread = structure(parse_yaml(body, source=str(new)))
    finally:
        logging.disable(before)
    # `default_settings` that today's format cannot express are left out, with a warning.
    expected = replace(original, default_settings=None) if present.left_out else original
    if reread != expected:
        raise SettingsError(
            f"{new} would not give the same settings as the old file, so it is not written. "
            "Please report this with the old file."
        )
    return body


def _header(olds: Sequence[Path], present: Present) -> str:
    names = ", ".join(path.name for path in olds)
    lines = [f"Written by `pipeline config upgrade` from {names}."]
    if present.family is not Family.PRESENT:
        lines.append(f"The format was that of {present.family.value}.")
    changes = [change for change in present.changes.entries if change.warns]
    # Only the names of files are written, because their folders exist only on this machine.
    warnings = [str(replace(change, where=Path(change.where).name)) for change in changes]
    if present.left_out:
        warnings.append(f"default_settings: left out, since {present.left_out}.")
    if warnings:
        lines += ["Please read:", *(f"  {line}" for line in warnings)]
    return "".join(f"# {line}\n" for line in lines)


def _summary(olds: Sequence[Path], new: Path, present: Present, *, every: bool) -> str:
    entries = present.changes.entries
    if not entries and not present.left_out:
        return f"Wrote {new}. {olds[0]} has today's format already; nothing was changed."
    groups = {
        "Moved:": [change for change in entries if change.kind == "moved"],
        "Removed:": [change for change in entries if change.kind == "gone"],
        "Notes:": [change for change in entries if change.kind == "note"],
    }
    lines = []
    for title, changes in groups.items():
        if changes and every:
            lines += [title, *(f"  {change}" for change in changes)]
    if entries and not every:
        counts = [f"{len(found)} {title[:-1].lower()}" for title, found in groups.items() if found]
        lines.append(f"Keys: {', '.join(counts)} (`--verbose` lists each).")
    if present.left_out:
        lines.append(f"default_settings are left out, since {present.left_out}.")
    names = ", ".join(str(path) for path in olds)
    lines.append(f"Wrote {new}; read again, it gives the same settings as {names}.")
    return "\n".join(lines)
