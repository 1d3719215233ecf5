"""The folder of a run of `pipeline learn`, which a run that never starts leaves as it was."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_log = logging.getLogger(__name__)


def folder_of(results: Path, run_id: str) -> Path:
    """The folder of the run of this name.

    Raises:
        SettingsError: It would not lie in `results`.
    """
    folder = results / run_id
    if not run_id or results.resolve() not in folder.resolve().parents:
        raise SettingsError(
            f"--run-id: {run_id!r} does not name a folder in {results}; use a plain name"
        )
    return folder


@dataclass(slots=True)
class RunFolder:
    """A folder that belongs to a run from when it has started."""

    path: Path
    replaced: Path | None = None
    """Where an earlier run of the same name lies now."""
    started: bool = False

    def start(self) -> None:
        """Keep what is written from now on."""
        self.started = True
        if self.replaced is not None:
            _log.info("The earlier run of this id is kept in %s.", self.replaced)

    def now(self, path: Path) -> Path:
        """Where a file lies that lay at `path` before the earlier run was moved."""
        if self.replaced is None or not path.is_relative_to(self.path):
            return path
        return self.replaced / path.relative_to(self.path)


@contextlib.contextmanager
def run_folder(
    folder: Path, *, resume: bool, force: bool, watched: bool = False
) -> Iterator[RunFolder]:
    """Make the folder for the block, which calls `start` as soon as the run has started.

    No other run writes into it meanwhile, unless it is only `watched` and nothing is written.

    An earlier run that `force` replaces is moved to the first free one of `<folder>.1`,
    `<folder>.2`, ... and never deleted. When the block ends before the run has started, it is put
    back, or what was made is deleted.

    Raises:
        SettingsError: There is an earlier run and neither `resume` nor `force`, or none to resume,
            or one that is still under way.
    """
    with (
        contextlib.nullcontext() if watched else files.sole_writer(folder),
        _run_folder(folder, resume=resume, force=force) as run,
    ):
        yield run


@contextlib.contextmanager
def _run_folder(folder: Path, *, resume: bool, force: bool) -> Iterator[RunFolder]:
    used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    _check(folder, used=used, resume=resume, force=force)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    aside = _free_name(folder) if used and force and not resume else None
    if aside is not None:
        folder.rename(aside)
    run = RunFolder(folder, replaced=aside)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield run
    finally:
        if not run.started and not resume:
            _undo(folder, made, aside)


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _check(folder: Path, *, used: bool, resume: bool, force: bool) -> None:
    if used and not folder.is_dir():
        raise SettingsError(f"{folder}: this is a file; use another --run-id or --results-dir")
    if used and not (resume or force):
        raise SettingsError(
            "Previous data from this run ID was found. Either specify a new run ID, use "
            "--resume to resume this run, or use the --force parameter to overwrite existing data. "
            f"({folder})"
        )
    if resume and not used:
        raise SettingsError(
            "Previous data from this run ID was not found. Train a new run by removing the "
            f"--resume flag. ({folder})"
        )


def _undo(folder: Path, made: list[Path], aside: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if aside is not None:
        aside.rename(folder)
    elif folder not in made:
        folder.mkdir()
    for path in made:
        with contextlib.suppress(OSError):  # gone already, or others use it by now
            path.rmdir()
