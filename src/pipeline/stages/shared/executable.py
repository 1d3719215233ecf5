"""A built environment: the folder that the `env` stage makes, as the other stages use it."""

from __future__ import annotations

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
"""Environment variable that names a folder on a disk of the node; `$NAME` in it is expanded."""
DESCRIPTION = "environment.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """An environment executable and how to start it."""

    file: Path
    args: tuple[str, ...]
    simulator: str | None
    """Name of the built-in simulator inside, which has an expert; None for other programs."""


def folder_of(environment: str) -> Path:
    """Return the folder of an environment's build, relative to the repository."""
    return Path("build/env") / environment


def load(folder: Path) -> Build:
    """Return the build in `folder`, or its copy on the cluster node's disk (PIPELINE_SCRATCH).

    Makes its file executable if a checkout has lost that permission.

    Raises:
        StageError: The folder is not one that the `env` stage made.
        OSError: The copy cannot be made.
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
    # DVC keeps no permissions of files inside a folder, so a restored build may have lost them.
    if build.file.is_file() and not os.access(build.file, os.X_OK):
        build.file.chmod(build.file.stat().st_mode | 0o111)
    return build


def _local_copy(folder: Path) -> Path:
    """Return a build's copy below PIPELINE_SCRATCH, made once for each content.

    Every process of a build reads it, and some builds have gigabytes. The files that a stage
    resumes from stay where other nodes find them.
    """
    scratch = os.path.expandvars(os.environ.get(SCRATCH, ""))
    if not scratch:
        return folder
    from filelock import FileLock

    digest = files.sha256_of(folder / DESCRIPTION)[:16]  # it contains the digest of the build
    copy = Path(scratch).expanduser().resolve() / "rl-pipeline" / f"{folder.name}-{digest}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{copy}.lock"):
        if not copy.exists():
            # Copied aside and renamed: a kill while copying must not leave half a build under
            # the final name.
            new = copy.with_name(f"{copy.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(folder, new, symlinks=True)
            new.rename(copy)
            _log.info("%s is run from its copy in %s", folder.name, copy)
    return copy
