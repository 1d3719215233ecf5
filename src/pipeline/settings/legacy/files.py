"""Reading the files that a run was described with: YAML, JSON, and folders of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.settings.legacy.curriculum import by_behavior
from pipeline.settings.legacy.family import Family, family_of, kind_of
from pipeline.settings.yaml_file import parse_yaml, read_text, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.settings.legacy.changes import Changes
    from pipeline.settings.legacy.family import Kind
    from pipeline.settings.nodes import Node
    from pipeline.settings.yaml_file import Repeat

_ASIDE = (".meta",)
"""Files that Unity lays beside every other."""
_OPTIONS = {"trainer": "the trainer configuration", "curriculum": "--curriculum"}


def read_document(path: Path, *, what: str = "Config file", changes: Changes | None = None) -> Node:
    """A file as YAML, or as JSON when its name ends so.

    A key that is written twice in a file of an older format counts as it did then: the last value.

    Args:
        path: the file.
        what: how errors call the file.
        changes: where such keys are noted; None for nowhere.

    Raises:
        SettingsError: It cannot be read, or has a key twice and is of today's format.
    """
    repeats: list[Repeat] = []
    read = read_json if path.suffix == ".json" else read_yaml
    document = read(path, what=what, repeats=repeats)
    if repeats and kind_of(document) == "trainer" and family_of(document) is Family.PRESENT:
        read(path, what=what)  # which refuses the first of them
    if changes is not None:
        _note_repeats(repeats, changes)
    return document


def _note_repeats(repeats: list[Repeat], changes: Changes) -> None:
    for repeat in repeats:
        text = f"written twice, first in line {repeat.first}; the last value counts, as it did then"
        changes.note(repeat.node, str(repeat.node.value), text)


def read_json(path: Path, *, what: str, repeats: list[Repeat] | None = None) -> Node:
    """A JSON file, with lines.

    Args:
        path: the file.
        what: how errors call the file.
        repeats: as for `parse_yaml`.

    Raises:
        SettingsError: It is missing, unreadable or not JSON, or has a key twice.
    """
    text = read_text(path, what=what)
    try:
        json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path}:{error.lineno}: cannot be read as JSON: {error.msg} (column {error.colno})."
        ) from error
    except ValueError as error:
        raise SettingsError(f"{path}: cannot be read as JSON: {error}.") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: the values are nested too deeply.") from error
    # JSON is YAML but for tabs, which can only stand between its values.
    return parse_yaml(text.replace("\t", " "), source=str(path), repeats=repeats)


def read_curricula(path: Path, behaviors: list[str], changes: Changes) -> dict[str, Node]:
    """The curricula of a file, or of a folder with a JSON file for each behavior.

    Args:
        path: the file or folder.
        behaviors: the names that the trainer configuration lists.
        changes: where is noted what a user should know.

    Raises:
        SettingsError: It cannot be read, or it is something else.
    """
    what = "Curriculum file"
    if not path.is_dir():
        document = read_document(path, what=what, changes=changes)
        _refuse_other(document, path, "curriculum")
        return by_behavior(document, behaviors, path.stem)
    made = {}
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or file.suffix in _ASIDE:
            continue
        if file.suffix != ".json":
            raise SettingsError(
                f"{file}: a folder of curricula holds only <Behavior>.json files. Move this one."
            )
        repeats: list[Repeat] = []
        made[file.stem] = read_json(file, what=what, repeats=repeats)
        _note_repeats(repeats, changes)
    if not made:
        raise SettingsError(f"{path}: the folder holds no <Behavior>.json file.")
    return made


def read_samplers(path: Path, changes: Changes) -> Node:
    """A sampler file.

    Args:
        path: the file.
        changes: where is noted what a user should know.

    Raises:
        SettingsError: It cannot be read, or it is something else.
    """
    document = read_document(path, what="Sampler file", changes=changes)
    _refuse_other(document, path, "sampler")
    return document


def _refuse_other(document: Node, path: Path, wanted: Kind) -> None:
    found = kind_of(document)
    sure = isinstance(document.value, dict) and (
        found != "trainer" or "behaviors" in document.value
    )
    if found != wanted and sure:
        article = {"trainer": "a trainer configuration", "curriculum": "a curriculum"}
        raise SettingsError(
            f"{path}: this is {article.get(found, 'a sampler file')}, and not a {wanted} file. "
            f"Give it as {_OPTIONS.get(found, '--sampler')}."
        )


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
