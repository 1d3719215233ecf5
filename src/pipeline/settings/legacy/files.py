"""Reading the files that a run was described with: YAML, JSON, and folders of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.settings.legacy.curriculum import by_behavior
from pipeline.settings.legacy.family import kind_of
from pipeline.settings.yaml_file import parse_yaml, read_text, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.settings.legacy.family import Kind
    from pipeline.settings.nodes import Node

_ASIDE = (".meta",)
"""Files that Unity lays beside every other."""
_OPTIONS = {"trainer": "the trainer configuration", "curriculum": "--curriculum"}


def read_document(path: Path, *, what: str = "Config file") -> Node:
    """A file as YAML, or as JSON when its name ends so.

    Raises:
        SettingsError: It cannot be read.
    """
    return read_json(path, what=what) if path.suffix == ".json" else read_yaml(path, what=what)


def read_json(path: Path, *, what: str) -> Node:
    """A JSON file, with lines.

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
    return parse_yaml(text.replace("\t", " "), source=str(path))


def read_curricula(path: Path, behaviors: list[str]) -> dict[str, Node]:
    """The curricula of a file, or of a folder with a JSON file for each behavior.

    Args:
        path: the file or folder.
        behaviors: the names that the trainer configuration lists.

    Raises:
        SettingsError: It cannot be read, or it is something else.
    """
    what = "Curriculum file"
    if not path.is_dir():
        document = read_document(path, what=what)
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
        made[file.stem] = read_json(file, what=what)
    if not made:
        raise SettingsError(f"{path}: the folder holds no <Behavior>.json file.")
    return made


def read_samplers(path: Path) -> Node:
    """A sampler file.

    Raises:
        SettingsError: It cannot be read, or it is something else.
    """
    document = read_document(path, what="Sampler file")
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
