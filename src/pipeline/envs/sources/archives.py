"""Unpack an untrusted archive: never outside of its folder, and never beyond size limits.

Files are written first and links last, so no write ever goes through a link. Every file is opened
as a new one, so no entry replaces another. Bytes are counted as they are written, whatever sizes
the archive declares.
"""

# tarfile's own `data` filter does less: it knows no zip, makes an absolute name relative instead of
# refusing it, lets an entry replace another, and has no limits. Until June 2025 it also let a chain
# of links lead out of the folder (CVE-2025-4517), and we run on Pythons from before that.

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from pipeline import files
from pipeline.errors import FetchError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Entries = Iterator[tuple[tarfile.TarInfo, Callable[[], IO[bytes]]]]
    """What a tar or zip archive says of each entry, as tar does, and how to open its content."""

_CHUNK_BYTES = 1 << 20
_HARMLESS_BYTES = 64 << 20
"""Below this much, no ratio is suspicious."""
_MAX_READ_BYTES, _REST_BYTES = 8 << 20, 1 << 16
_OVERHEAD_BYTES = 512 << 20
"""What the headers of a tar may take beside the files."""
_TAR_MAGIC_AT = 257
_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_LINK_BYTES = 4096
_PROGRAM_STARTS = (b"\x7fELF", b"#!", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""ELF, scripts, and Mach-O: files that need executable bits, which many zip archives lack."""
_ZIP_TYPES = {
    0: tarfile.REGTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # zipfile's for a compression or version that it does not know
    RuntimeError,  # zipfile's word for a password that it lacks
    struct.error,
    ValueError,  # tarfile's for a number of an extended header that is none
    OverflowError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveLimits:
    """How large an archive may become."""

    max_bytes: int = 16 * 10**9
    """Of the archive, and of all its files together."""
    max_ratio: float = 100.0
    """Size of all files over the size of the archive; not looked at below 64 MB."""
    max_entries: int = 200_000
    """Files, folders and links."""

    def allowed(self, archive_bytes: int) -> int:
        """Return how many bytes an archive of this size may unpack to."""
        return int(min(self.max_bytes, max(_HARMLESS_BYTES, self.max_ratio * archive_bytes)))


def unpack(archive: Path, folder: Path, *, limits: ArchiveLimits, label: str) -> None:
    """Write the content of a zip, tar, tar.gz, tar.bz2 or tar.xz archive into a new `folder`.

    Permissions are 755 for folders and programs and 644 for other files. Everything is flushed to
    disk. After an error there is no folder.

    Raises:
        FetchError: It is no archive or a broken one, an entry is not allowed, or a limit is
            passed; the message names the entry.
    """
    # Two checks: of the declared sizes, in entries_of, and of the bytes written, in _Writer.
    allowed = limits.allowed(archive.stat().st_size)
    folder.mkdir(parents=True)
    writer = _Writer(folder, limits, allowed, label)
    try:
        with entries_of(archive, max_bytes=allowed, label=label) as entries:
            for entry, content in entries:
                writer.write(entry, content)
        writer.finish()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def entries_of(archive: Path, *, max_bytes: int, label: str) -> Iterator[Entries]:
    """Open an archive of a kind that its first bytes tell, and give its entries.

    Their declared sizes may add up to `max_bytes`.

    Raises:
        FetchError: It is no archive that we know, is damaged, or is larger than `max_bytes`.
    """
    with archive.open("rb") as file:
        # Known by its bytes: a URL's ending says nothing.
        start = file.read(_TAR_MAGIC_AT + 5)
        file.seek(0)
        try:
            if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
                with zipfile.ZipFile(file) as source:
                    yield _zip_entries(source, max_bytes, label)
                return
            # Of the decompressed stream: a bomb may be in the headers as well as in the files.
            limit = max_bytes + _OVERHEAD_BYTES
            stream = _Limited(_decompressed(file, start), limit, label)
            if stream.peek(_TAR_MAGIC_AT + 5)[_TAR_MAGIC_AT:] != b"ustar":
                stream.read_rest()  # a damaged archive is told from another file
                raise FetchError(
                    f"{label}: is no zip, tar, tar.gz, tar.bz2 or tar.xz archive "
                    f"(it starts with {start[:8]!r})."
                )
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as tar:
                yield _tar_entries(tar)
            stream.read_rest()
        except (*_BROKEN, OSError) as error:
            # A decompressor's OSError has no number, unlike the system's.
            if getattr(error, "errno", None) is not None:
                raise
            raise FetchError(
                f"{label}: the archive cannot be read: {str(error) or type(error).__name__}."
            ) from error


def _zip_entries(source: zipfile.ZipFile, max_bytes: int, label: str) -> Entries:
    infos = source.infolist()
    declared_bytes = sum(info.file_size for info in infos)
    if declared_bytes > max_bytes:
        raise FetchError(
            f"{label}: unpacks to {declared_bytes / 1e6:.1f} MB, more than the limit of "
            f"{max_bytes / 1e6:.1f} MB (max_unpacked_gb, max_ratio). Nothing was unpacked."
        )
    for info in infos:
        entry = tarfile.TarInfo(info.orig_filename)  # as stored, before zipfile mends it
        mode = info.external_attr >> 16  # only Unix writes permissions and kinds
        entry.mode = stat.S_IMODE(mode)
        is_folder = entry.name.endswith(("/", "\\"))
        kind = _ZIP_TYPES.get(stat.S_IFMT(mode), tarfile.CHRTYPE)
        entry.type = tarfile.DIRTYPE if is_folder else kind
        yield entry, partial(source.open, info)


def _tar_entries(tar: tarfile.TarFile) -> Entries:
    while (entry := tar.next()) is not None:
        # tarfile keeps them all, with headers that compress a thousandfold
        tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
        yield entry, partial(_content, tar, entry)


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(entry) if entry.isreg() else None  # not what a link leads to
    return file or io.BytesIO()


def _decompressed(file: Any, start: bytes) -> Any:
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file, mode="rb")
    if start.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    return file


class _Limited:
    """A stream for `tarfile` that gives no more than a limit, and little at once.

    A header may say that it is gigabytes long, and `tarfile` reads headers whole.
    """

    def __init__(self, stream: Any, max_bytes: int, label: str) -> None:
        self._stream, self._most, self._label = stream, max_bytes, label

    def peek(self, size: int) -> bytes:
        """Return the first bytes, without moving on."""
        data: bytes = self._stream.read(size)
        self._stream.seek(0)
        return data

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        # tarfile asks for -1 or for as much as a header claims.
        if not 0 <= size <= _MAX_READ_BYTES:
            raise FetchError(f"{self._label}: a header of the archive says it has {size} bytes.")
        data: bytes = self._stream.read(size)
        self._check(self.tell())
        return data

    def read_rest(self) -> None:
        """Read to the checksum, which comes last."""
        while self.read(_REST_BYTES):
            pass

    def seek(self, position: int, whence: int = 0) -> int:
        """Move on; a decompressor reads all that lies between."""
        if whence == 0:
            self._check(position)
        moved: int = self._stream.seek(position, whence)
        return moved

    def tell(self) -> int:
        """Return the position in the decompressed stream."""
        at: int = self._stream.tell()
        return at

    def _check(self, position: int) -> None:
        if position > self._most:
            raise FetchError(
                f"{self._label}: unpacks to more than {self._most / 1e6:.1f} MB, the limit "
                "(max_unpacked_gb, max_ratio). Nothing was unpacked."
            )


@dataclass(slots=True)
class _Writer:
    folder: Path
    limits: ArchiveLimits
    allowed: int
    label: str
    n_bytes: int = 0
    n_entries: int = 0
    kinds: dict[PurePosixPath, Literal["file", "folder", "link"]] = field(default_factory=dict)
    links: list[tuple[PurePosixPath, str]] = field(default_factory=list)

    def write(self, entry: tarfile.TarInfo, content: Callable[[], IO[bytes]]) -> None:
        """Do as `add` does; an error of the system, as of a full disk, names archive and entry."""
        try:
            self.add(entry, content)
        except OSError as error:
            if error.errno is None:
                raise
            name = brief(entry.name)
            raise self._error(f"the entry {name!r} cannot be unpacked: {error.strerror}") from error

    def add(self, entry: tarfile.TarInfo, content: Callable[[], IO[bytes]]) -> None:
        """Write one entry, or remember it when it is a link."""
        # Counted one by one: the number that the archive declares may be wrong.
        self.n_entries += 1
        if self.n_entries > self.limits.max_entries:
            raise self._error(f"has more than {self.limits.max_entries} entries")
        path = self._checked(entry.name)
        if path is None:
            return
        if entry.isdir():
            self._folder(path)
            return
        self._folder(path.parent)
        if path in self.kinds:
            raise self._error(f"has the entry {entry.name!r} twice")
        if entry.isreg():
            self._file(path, entry, content)
        elif entry.issym():
            self._remember(path, entry, content)
        elif entry.islnk():
            self._copy(path, entry)
        else:
            kind = "pipe" if entry.isfifo() else "device file"
            raise self._error(f"the entry {entry.name!r} is a {kind}, which is not allowed")

    def finish(self) -> None:
        """Make the links, see that each stays inside, and flush folders to disk."""
        for path, target in self.links:
            (self.folder / path).symlink_to(target)
        # Only now: a link that stays inside by its text may lead out through another link.
        inside = os.path.realpath(self.folder)
        for path, target in self.links:
            real = os.path.realpath(self.folder / path)
            if os.path.commonpath([inside, real]) != inside:
                raise self._error(f"the link '{path}' leads out of its folder, to {target!r}")
        for parent, _, _ in os.walk(self.folder):
            files.sync_folder(Path(parent))

    def _checked(self, name: str) -> PurePosixPath | None:
        """Return the relative path that an entry's name means; None for the folder itself."""
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
            if part.parts and self.kinds.setdefault(part, "folder") != "folder":
                raise self._error(f"the entry '{part}' is a {self.kinds[part]} and a folder")
        (self.folder / path).mkdir(parents=True, exist_ok=True)

    def _file(
        self, path: PurePosixPath, entry: tarfile.TarInfo, content: Callable[[], IO[bytes]]
    ) -> None:
        self.kinds[path] = "file"
        with content() as source, self._new(path) as target:
            first = b""
            while chunk := source.read(_CHUNK_BYTES):
                first = first or chunk[:4]
                # Counted as it is written, whatever size the entry claims.
                self.n_bytes += len(chunk)
                if self.n_bytes > self.allowed:
                    raise self._too_large(entry.name)
                target.write(chunk)
            program = entry.mode & 0o111 or _is_program(path, first)
            target.flush()
            # The folder's name is its digest, and is believed after a power failure, too.
            os.fsync(target.fileno())
        # Not the archive's own mode, which may be setuid or writable by all.
        (self.folder / path).chmod(0o755 if program else 0o644)

    def _remember(
        self, path: PurePosixPath, entry: tarfile.TarInfo, content: Callable[[], IO[bytes]]
    ) -> None:
        self.kinds[path] = "link"
        target = entry.linkname
        if not target:  # zip keeps it in the content
            with content() as source:
                target = source.read(_MAX_LINK_BYTES).decode("utf-8", errors="replace")
        if not target or "\0" in target:
            raise self._error(f"the link {entry.name!r} has no target")
        if PurePosixPath(target).is_absolute() or _DRIVE.match(target) or "\\" in target:
            raise self._error(f"the link {entry.name!r} leads out of its folder, to {target!r}")
        self.links.append((path, target))

    def _copy(self, path: PurePosixPath, entry: tarfile.TarInfo) -> None:
        """Make a hard link a copy of its file, which must be one of this archive's."""
        source = PurePosixPath(entry.linkname)
        if self.kinds.get(source) != "file":
            raise self._error(
                f"the hard link {entry.name!r} leads to {entry.linkname!r}, which is no file "
                "before it in the archive"
            )
        entry.mode = stat.S_IMODE((self.folder / source).stat().st_mode)
        self._file(path, entry, lambda: (self.folder / source).open("rb"))

    def _new(self, path: PurePosixPath) -> IO[bytes]:
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
    """Return whether first bytes, or a name that Unity gives to players, make a file a program."""
    return first.startswith(_PROGRAM_STARTS) or path.suffix in {".x86_64", ".x86"}
