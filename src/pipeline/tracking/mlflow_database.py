"""The file of a SQLite MLflow store: one process creates it, and it may be copied and moved."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger(__name__)

_WAIT_S = 300.0
_BUSY_S = 5.0
"""How long another program may keep the file before it counts as locked for good."""
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Columns in which MLflow keeps where artifacts lie; it makes every location absolute."""


def file_of(uri: str) -> Path | None:
    """Return the file of a SQLite store, or None for a store of another kind."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def check(uri: str) -> None:
    """Check within seconds that a SQLite store can be opened and written.

    MLflow itself tries for 100 s before it fails.

    Raises:
        PipelineError: The store cannot be used; the message gives the reason.
    """
    path = file_of(uri)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The folder too: SQLite writes its journal beside the file.
        for needed in (path.parent, path, path.with_name(f"{path.name}.lock")):
            if needed.exists() and not os.access(needed, os.W_OK):
                raise PermissionError(errno.EACCES, "no right to write", str(needed))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_S)) as database:
                database.isolation_level = None  # else sqlite3 begins transactions of its own
                # Takes the right to write, unlike a plain BEGIN, and gives it back unused.
                database.execute("BEGIN IMMEDIATE")
                database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                database.execute("ROLLBACK")
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PipelineError(
            f"the MLflow store {path} cannot be opened: {reason}; mend it or move it away, or name "
            "another with MLFLOW_TRACKING_URI"
        ) from error


@contextlib.contextmanager
def locked(uri: str) -> Any:
    """Lock a SQLite store for the block, so that one process at a time changes it."""
    path = file_of(uri)
    if path is None:
        yield
        return
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=_WAIT_S):
        yield


def make_whole(uri: str) -> None:
    """Create a SQLite store under a temporary name, and rename it when it is complete.

    MLflow creates its tables in dozens of steps when a client is made. A process that is killed in
    between would leave a file that no client can open any more.
    """
    path = file_of(uri)
    if path is None or path.exists():
        return
    # Imported late, because MLflow takes a second and `check` may refuse the store before.
    from mlflow import MlflowClient

    new = path.with_name(f"{path.name}.new")
    # Left by a process that was killed; the caller holds the lock, so nobody works on it now.
    for left in (new, new.with_name(f"{new.name}-journal")):
        left.unlink(missing_ok=True)
    MlflowClient(tracking_uri=f"sqlite:///{new}")
    # A rename, so that the store has all of its tables or is not there.
    new.replace(path)


def follow(uri: str, recorded: Iterable[str], folder: Path) -> None:
    """Update the artifact locations in a SQLite store that was copied or moved.

    Each of the `recorded` locations that is named like `folder` shows an earlier checkout.
    Locations below such a checkout are changed to the checkout of `folder`.
    """
    root = folder.parent
    # Artifacts on a server do not move with the file.
    parts = [urlsplit(location) for location in recorded]
    places = {Path(unquote(part.path)) for part in parts if part.scheme in ("", "file")}
    earlier = {place.parent for place in places if place.name == folder.name} - {root}
    if not earlier:
        return
    # MLflow writes some locations as file:// addresses, with signs escaped, and some as paths.
    forms = [
        form
        for old in (*earlier, root)
        for form in ((old.as_uri(), root.as_uri()), (f"{old}", f"{root}"))
    ]
    # The longest first: a copy may lie in the original, or the other way round.
    forms.sort(key=lambda form: len(form[0]), reverse=True)

    def followed(location: str | None) -> str | None:
        for start, new in forms:
            if location is not None and location.startswith(f"{start}/"):
                return new + location.removeprefix(start)
        return location

    with contextlib.closing(sqlite3.connect(str(file_of(uri)), timeout=_BUSY_S)) as database:
        database.create_function("followed", 1, followed, deterministic=True)
        for table, column in _LOCATIONS:
            database.execute(f"UPDATE {table} SET {column} = followed({column})")
        database.commit()
    _log.info("The MLflow store was copied or moved; its artifacts are looked for in %s", folder)
