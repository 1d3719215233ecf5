"""Unpack an archive from a stranger: nothing lands outside of the folder, and nothing explodes.

Files are written first and links last, so no write ever goes through a link. Every file is opened
as a new one, so no entry replaces another. What is written is counted, whatever the archive says of
itself.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from pipeline.envs import archive_entries
from pipeline.errors import FetchError

if TYPE_CHECKING:
    from io import BufferedWriter

    from pipeline.envs.archive_entries import Entry

_CHUNK_BYTES = 1 << 20
_HARMLESS_BYTES = 64 << 20
"""Below this much, no ratio is suspicious."""
_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_LINK = 4096
_PROGRAM_STARTS = (b"\x7fELF", b"#!", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""ELF, scripts, and Mach-O: files that need executable bits, which many zip archives lack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How large an archive may become."""

    max_bytes: int = 16 * 10**9
    """Of the archive, and of all its files together."""
    max_ratio: float = 100.0
    """Size of all files over the size of the archive; not looked at below 64 MB."""
    max_entries: int = 200_000
    """Files, folders and links."""

    def allowed(self, archive_bytes: int) -> int:
        """Bytes that an archive of this size may unpack to."""
        return int(min(self.max_bytes, max(_HARMLESS_BYTES, self.max_ratio * archive_bytes)))


def unpack(archive: Path, folder: Path, *, limits: Limits, label: str) -> None:
    """Write the content of a zip, tar, tar.gz, tar.bz2 or tar.xz archive into a new `folder`.

    Permissions are 755 for folders and programs and 644 for other files. Everything is flushed to
    disk. After an error there is no folder.

    Args:
        archive: the file.
        folder: made here; nothing may be there.
        limits: how large it may become.
        label: what errors call the archive.

    Raises:
        FetchError: It is no archive or a broken one, an entry is not allowed, or a limit is
            passed; the message names the entry.
    """
    allowed = limits.allowed(archive.stat().st_size)
    folder.mkdir(parents=True)
    writer = _Writer(folder, limits, allowed, label)
    try:
        with archive_entries.opened(archive, most_bytes=allowed, label=label) as entries:
            for entry in entries:
                writer.add(entry)
        writer.finish()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(slots=True)
class _Writer:
    folder: Path
    limits: Limits
    allowed: int
    label: str
    n_bytes: int = 0
    n_entries: int = 0
    made: dict[PurePosixPath, Literal["file", "folder", "link"]] = field(default_factory=dict)
    links: list[tuple[PurePosixPath, str]] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Write one entry, or remember it when it is a link."""
        self.n_entries += 1
        if self.n_entries > self.limits.max_entries:
            raise self._error(f"has more than {self.limits.max_entries} entries")
        path = self._checked(entry.name)
        if path is None:
            return
        if entry.kind == "folder":
            self._folder(path)
            return
        self._folder(path.parent)
        if path in self.made:
            raise self._error(f"has the entry {entry.name!r} twice")
        if entry.kind == "file":
            self._file(path, entry)
        elif entry.kind == "link":
            self._remember(path, entry)
        elif entry.kind == "hard link":
            self._copy(path, entry)
        else:
            raise self._error(f"the entry {entry.name!r} is a {entry.kind}, which is not allowed")

    def finish(self) -> None:
        """Make the links, see that each stays inside, and flush folders to disk."""
        for path, target in self.links:
            (self.folder / path).symlink_to(target)
        inside = os.path.realpath(self.folder)
        for path, target in self.links:
            real = os.path.realpath(self.folder / path)
            if os.path.commonpath([inside, real]) != inside:
                raise self._error(f"the link '{path}' leads out of its folder, to {target!r}")
        for parent, _, _ in os.walk(self.folder):
            sync_folder(Path(parent))

    def _checked(self, name: str) -> PurePosixPath | None:
        """The relative path that an entry's name means; None for the folder itself."""
        plain = name.replace("\\", "/")  # some programs on Windows write it
        path = PurePosixPath(plain)
        if path.is_absolute() or _DRIVE.match(plain):
            raise self._error(f"the entry {name!r} has an absolute name")
        if ".." in path.parts:
            raise self._error(f"the entry {name!r} leads out of its folder")
        if not name or any(ord(character) < 32 for character in name):
            raise self._error(f"the entry {name!r} has no usable name")
        return path if path.parts else None

    def _folder(self, path: PurePosixPath) -> None:
        for part in [*reversed(path.parents), path]:
            if part.parts and self.made.setdefault(part, "folder") != "folder":
                raise self._error(f"the entry '{part}' is a {self.made[part]} and a folder")
        (self.folder / path).mkdir(parents=True, exist_ok=True)

    def _file(self, path: PurePosixPath, entry: Entry) -> None:
        self.made[path] = "file"
        with entry.open() as source, self._new(path) as target:
            first = b""
            while chunk := source.read(_CHUNK_BYTES):
                first = first or chunk[:4]
                self.n_bytes += len(chunk)
                if self.n_bytes > self.allowed:
                    raise self._too_large(entry.name)
                target.write(chunk)
            program = entry.mode & 0o111 or _is_program(path, first)
            target.flush()
            os.fsync(target.fileno())
        (self.folder / path).chmod(0o755 if program else 0o644)

    def _remember(self, path: PurePosixPath, entry: Entry) -> None:
        self.made[path] = "link"
        target = entry.target
        if not target:
            with entry.open() as source:
                target = source.read(_LONGEST_LINK).decode("utf-8", errors="replace")
        if not target or "\0" in target:
            raise self._error(f"the link {entry.name!r} has no target")
        if PurePosixPath(target).is_absolute() or _DRIVE.match(target) or "\\" in target:
            raise self._error(f"the link {entry.name!r} leads out of its folder, to {target!r}")
        self.links.append((path, target))

    def _copy(self, path: PurePosixPath, entry: Entry) -> None:
        """A hard link becomes a copy of the file, which must be one of this archive's."""
        source = PurePosixPath(entry.target)
        if self.made.get(source) != "file":
            raise self._error(
                f"the hard link {entry.name!r} leads to {entry.target!r}, which is no file before "
                "it in the archive"
            )
        self.made[path] = "file"
        self.n_bytes += (self.folder / source).stat().st_size
        if self.n_bytes > self.allowed:
            raise self._too_large(entry.name)
        with (self.folder / source).open("rb") as content, self._new(path) as target:
            shutil.copyfileobj(content, target, _CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(self.folder / source, self.folder / path)

    def _new(self, path: PurePosixPath) -> BufferedWriter:
        try:
            return (self.folder / path).open("xb")
        except FileExistsError as error:  # names that differ only in case, where that is the same
            raise self._error(f"has the entry '{path}' twice") from error

    def _too_large(self, name: str) -> FetchError:
        by_ratio = self.allowed < self.limits.max_bytes
        limit = (
            f"{self.limits.max_ratio:g} times the archive's size (max_ratio)"
            if by_ratio
            else f"{self.allowed / 1e6:g} MB (max_unpacked_gb)"
        )
        return self._error(f"unpacks to more than {limit}, noticed in {name!r}; raise it if right")

    def _error(self, text: str) -> FetchError:
        return FetchError(f"{self.label}: {text}. Nothing was unpacked.")


def _is_program(path: PurePosixPath, first: bytes) -> bool:
    """Whether a file is a program by its first bytes, or by a name that Unity gives to players."""
    return first.startswith(_PROGRAM_STARTS) or path.suffix in {".x86_64", ".x86"}


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where that can be done."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
