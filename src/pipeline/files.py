"""Files that are written whole or not at all, and the digests that name their content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Give a temporary path beside `path`, and move it there when the block succeeds.

    The temporary file is flushed to disk before the move, so that after a crash `path` holds either
    its old content or all of the new. If the block raises, nothing remains.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod((target.stat().st_mode if target.exists() else 0o666 & ~_umask()) & 0o777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write `content` to `path` atomically; text is encoded as UTF-8.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    with whole(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, so that equal values give equal bytes."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def sha256_of(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes, or of a folder's sorted relative names and file digests."""
    path = Path(path)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-like value, the same for equal values in any key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
