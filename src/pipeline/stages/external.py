"""Environments from outside, as the `env` stage takes them in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import StageError
from pipeline.settings.external_sources import FetchSource, PathSource, UnitySource

if TYPE_CHECKING:
    from pipeline.settings.external_sources import ExternalSource
    from pipeline.settings.source import EnvironmentParams

_PLAYER = "player"


def inputs(source: EnvironmentParams, root: Path) -> list[Path]:
    """Files and folders that the environment is made from; an archive is known by its digest.

    Raises:
        StageError: One of them does not exist.
    """
    found, wrong = [], ""
    if isinstance(source, PathSource):
        found, wrong = [source.found(root)], "there is no build here; correct `path`"
    elif isinstance(source, UnitySource):
        found, wrong = list(source.watched), "a Unity project has it; correct `project`"
    for path in found:
        if not (root / path).exists():
            raise StageError(f"{path}: does not exist; {wrong} in params.yaml")
    return [Path(path) for path in found]


def put(
    name: str, source: ExternalSource, folder: Path, root: Path, work: Path
) -> tuple[Path, str | None]:
    """Put an environment into a new `folder`.

    Args:
        name: what it is called in params.yaml.
        source: where it comes from.
        folder: made here.
        root: what paths in params.yaml are relative to.
        work: for logs.

    Returns:
        The program in `folder`, and the sha256 of the archive that it came in, if any.

    Raises:
        PipelineError: It is not there, is for another platform, is not what it should be, or
            cannot be built.
    """
    match source:
        case PathSource():
            return _copied(root / source.found(root), folder), None
        case FetchSource():
            return _fetched(name, source, folder)
        case UnitySource():
            from pipeline.envs.unity_build import build

            made = build(
                source, root=root, name=name, folder=work / _PLAYER, log=work / "editor.log"
            )
            inside = made.relative_to(work)
            folder.mkdir(parents=True)
            shutil.move(work / _PLAYER, folder / _PLAYER)
            return folder / inside, None


def _fetched(name: str, source: FetchSource, folder: Path) -> tuple[Path, str]:
    from pipeline.envs.archives import Limits
    from pipeline.envs.download import public
    from pipeline.envs.fetch import fetch
    from pipeline.envs.programs import find_program, this_platform

    platform = this_platform()
    archive = source.archive(platform)
    if archive is None:
        raise StageError(
            f"params.yaml: environments.{name}: is for {' and '.join(source.platforms())}, and "
            f"this machine runs {platform}; give the 'url' and 'sha256' of a build for {platform}"
        )
    url, sha256 = archive
    limits = Limits(max_bytes=int(source.max_unpacked_gb * 1e9), max_ratio=source.max_ratio)
    cached = fetch(url, sha256=sha256, limits=limits)
    program = find_program(cached, label=public(url), wanted=source.executable)
    shutil.copytree(cached, folder / _PLAYER, symlinks=True)
    return folder / _PLAYER / program.relative_to(cached), sha256


def _copied(source: Path, folder: Path) -> Path:
    """Copy a build, and find the program in it."""
    from pipeline.envs.programs import find_program

    folder.mkdir(parents=True)
    if source.is_file():
        if source.with_name(f"{source.stem}_Data").exists():
            raise StageError(
                f"{source}: this program needs the files beside it; let `path` name their folder, "
                f"{source.parent}"
            )
        copy = Path(shutil.copy(source, folder / source.name))
        if not os.access(copy, os.X_OK):
            copy.chmod(0o755)
        return find_program(folder, label=str(source))
    app = source.suffix == ".app"  # its links are part of it
    inside = folder / source.name if app else folder
    shutil.copytree(source, inside, symlinks=app, dirs_exist_ok=True)
    return find_program(folder, label=str(source))
