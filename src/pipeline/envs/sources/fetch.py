"""Environments by URL, in a content-addressed cache that all runs share.

    <cache>/environments/
        <sha256 of the archive>/     its content
        <sha256>.unpacking/          on its way there
        downloads/                   archives on their way; of a broken download, what arrived
        locks/                       one for each archive, so that two runs fetch it once

A folder appears under its digest when it is whole and on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.envs.sources import archives, download
from pipeline.envs.sources.archives import ArchiveLimits
from pipeline.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_WAIT_S = 3600.0
_ABANDONED_S = 7 * 24 * 3600.0
_LIMITS = ArchiveLimits()


def cache_folder() -> Path:
    """Return the cache of environments, in `PIPELINE_CACHE` or the user's cache folder."""
    chosen = os.environ.get("PIPELINE_CACHE")
    if chosen:
        return Path(chosen).absolute() / "environments"
    import platformdirs

    return Path(platformdirs.user_cache_dir("rl-pipeline", appauthor=False)) / "environments"


def fetch(url: str, *, sha256: str, limits: ArchiveLimits = _LIMITS) -> Path:
    """Return the folder with an archive's content; download and unpack it when it is not cached.

    Raises:
        FetchError: It cannot be downloaded or has another digest, or an entry is not allowed.
    """
    sha256 = sha256.lower()
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise FetchError(f"sha256 needs 64 hex digits, got {sha256!r}")
    cache = cache_folder()
    folder = cache / sha256
    # Without a lock: a folder with this name is whole, since it was renamed into place.
    if folder.is_dir():
        return folder
    with locked(sha256, f"the archive {download.public(url)}"):
        if folder.is_dir():  # the process that had the lock before has made it
            return folder
        with _downloaded(url, limits, sha256) as archive:
            temporary = cache / f"{sha256}.unpacking"
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            _log.info("Unpacking %s", download.public(url))
            label = download.public(url)
            try:
                archives.unpack(archive, temporary, limits=limits, label=label)
                temporary.replace(folder)
                files.sync_folder(cache)
            finally:
                archive.unlink()
    return folder


def digest_of(url: str, *, limits: ArchiveLimits = _LIMITS) -> str:
    """Download an archive and return its sha256.

    Nothing is unpacked. The archive stays, so that `fetch` with this digest need not download it.

    Raises:
        FetchError: It cannot be downloaded.
    """
    with _downloaded(url, limits, None) as archive:
        return files.sha256_of(archive)


@contextlib.contextmanager
def locked(name: str, what: str) -> Iterator[None]:
    """Be the only process, and thread, that works on `name` in the cache.

    Raises:
        FetchError: Another one has held it for an hour.
    """
    from filelock import FileLock, Timeout

    path = cache_folder() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        # Tried without waiting first, only to be able to log that it waits.
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("Waiting for another process that works on %s", what)
        try:
            lock.acquire(timeout=_WAIT_S)
        except Timeout:
            raise FetchError(
                f"another process has worked on {what} for {_WAIT_S / 60:.0f} minutes; end it and "
                "try again"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _downloaded(url: str, limits: ArchiveLimits, sha256: str | None) -> Iterator[Path]:
    """Download an archive, and check its digest if one is given."""
    # The URL's digest, since a URL may be longer than a file name and hold secrets.
    key = hashlib.sha256(url.encode()).hexdigest()
    downloads = cache_folder() / "downloads"
    archive = downloads / f"{key}.archive"
    with locked(f"url-{key}", download.public(url)):
        _remove_abandoned(downloads)
        had_part = any(downloads.glob(f"{key}.*"))
        if sha256 is None:
            archive.unlink(missing_ok=True)  # the server may have another one by now
        if not archive.exists():
            download.download(url, archive, max_bytes=limits.max_bytes)
        if sha256 is not None:
            digest = files.sha256_of(archive)
            if digest != sha256 and had_part:  # it may have been put together from two versions
                archive.unlink()
                download.download(url, archive, max_bytes=limits.max_bytes)
                digest = files.sha256_of(archive)
            if digest != sha256:
                archive.unlink()
                raise FetchError(
                    f"{download.public(url)}: its sha256 is {digest}, but {sha256} was asked for: "
                    "it was changed, or damaged on its way. Nothing was unpacked. Correct sha256 "
                    "only if you know why."
                )
        yield archive


def _remove_abandoned(downloads: Path) -> None:
    """Remove parts of downloads that were abandoned a week ago."""
    if not downloads.is_dir():
        return
    for path in downloads.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()
