"""Builds of environments: the folders that the stage `env` makes for the other stages."""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import StageError

_log = logging.getLogger(__name__)

SCRATCH = "PIPELINE_SCRATCH"
"""Environment variable with the path of a folder on the cluster node's disk; variables in the path,
such as `$USER`, are expanded.
"""
DESCRIPTION = "environment.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """An environment's executable, and the arguments to start it with."""

    file: Path
    args: tuple[str, ...]
    simulator: str | None
    """Name of the built-in simulator in `file`, for its expert; None for other executables."""


def folder_of(environment: str) -> Path:
    """Return the folder of an environment's build, relative to the project."""
    return Path("build/env") / environment


def load(folder: Path) -> Build:
    """Return the build in `folder`, or its copy on the cluster node's disk (PIPELINE_SCRATCH).

    The executable gets its permission to run again, because DVC does not store permissions.

    Raises:
        StageError: The stage `env` has not made the folder.
        OSError: The build cannot be copied.
    """
    if (folder / DESCRIPTION).is_file():
        folder = _local_copy(folder)
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
    # DVC does not store permissions of files in a folder, so a restored build may have lost them.
    if build.file.is_file() and not os.access(build.file, os.X_OK):
        build.file.chmod(build.file.stat().st_mode | 0o111)
    return build


def _local_copy(folder: Path) -> Path:
    """Return a build's copy below PIPELINE_SCRATCH, or `folder` if this variable is not set."""
    scratch = os.path.expandvars(os.environ.get(SCRATCH, ""))
    if not scratch:
        return folder
    from filelock import FileLock

    # The description contains the build's digest, so a changed build is copied again.
    digest = files.sha256_of(folder / DESCRIPTION)[:16]
    copy = Path(scratch).expanduser().resolve() / "rl-pipeline" / f"{folder.name}-{digest}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{copy}.lock"):
        if not copy.exists():
            # The build is copied under another name and then renamed: a kill during the copy must
            # not leave an incomplete build under the final name.
            new = copy.with_name(f"{copy.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(folder, new, symlinks=True)
            new.rename(copy)
            _log.info("%s is run from its copy in %s", folder.name, copy)
    return copy
