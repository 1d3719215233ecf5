"""A built environment: the folder that the `env` stage makes, as the other stages use it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StageError

DESCRIPTION = "environment.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """An environment executable and how to start it."""

    file: Path
    """The executable."""
    args: tuple[str, ...]
    """Its arguments."""
    simulator: str | None
    """Name of the built-in simulator inside, which has an expert; None for other programs."""


def folder_of(environment: str) -> Path:
    """Where the build of an environment lies, relative to the repository."""
    return Path("build/env") / environment


def load(folder: Path) -> Build:
    """The build in `folder`; makes its file executable when a checkout has forgotten that.

    Raises:
        StageError: The folder is not one that the `env` stage made.
    """
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        build = Build(
            file=folder / content["file"],
            args=tuple(content["args"]),
            simulator=content["simulator"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise StageError(
            f"{path}: not the description of an environment ({error}); delete {folder} and run "
            "the env stage again"
        ) from error
    if build.file.is_file() and not os.access(build.file, os.X_OK):
        build.file.chmod(build.file.stat().st_mode | 0o111)
    return build
