"""What is in a zip or tar archive, one entry after another, however it is compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from pipeline.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_MOST_AT_ONCE = 8 << 20
_OVERHEAD_BYTES = 512 << 20
_TAR_MAGIC_AT = 257
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,  # zipfile's word for a password that it lacks
    struct.error,
    ValueError,  # tarfile's for a number of an extended header that is none
    OverflowError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of an archive, as the archive describes it."""

    name: str
    """As written."""
    kind: str
    """`file`, `folder`, `link`, `hard link`, or what else it is."""
    mode: int
    """Permission bits; 0 when the archive does not say."""
    target: str = ""
    """Where a link leads; empty when that is the entry's content."""
    open: Callable[[], IO[bytes]]
    """The content."""


@contextmanager
def opened(archive: Path, *, most_bytes: int, label: str) -> Iterator[Iterator[Entry]]:
    """The entries of an archive, whose kind is told by its first bytes.

    Args:
        archive: the file.
        most_bytes: what the entries together may say that they unpack to.
        label: what errors call the archive.

    Raises:
        FetchError: It is no archive that we know, is damaged, or is larger than `most_bytes`.
    """
    with archive.open("rb") as file:
        start = file.read(_TAR_MAGIC_AT + 5)
        file.seek(0)
        try:
            if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
                with zipfile.ZipFile(file) as source:
                    yield _zip_entries(source, most_bytes, label)
                return
            limit = most_bytes + _OVERHEAD_BYTES
            stream = _Limited(_decompressed(file, start), limit, label)
            if stream.peek(_TAR_MAGIC_AT + 5)[_TAR_MAGIC_AT:] != b"ustar":
                raise FetchError(
                    f"{label}: is no zip, tar, tar.gz, tar.bz2 or tar.xz archive "
                    f"(it starts with {start[:8]!r})."
                )
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as tar:
                yield _tar_entries(tar)
        except _BROKEN as error:
            raise FetchError(
                f"{label}: the archive cannot be read: {str(error) or type(error).__name__}."
            ) from error


def _zip_entries(source: zipfile.ZipFile, most_bytes: int, label: str) -> Iterator[Entry]:
    infos = source.infolist()
    said = sum(info.file_size for info in infos)
    if said > most_bytes:
        raise FetchError(
            f"{label}: unpacks to {said / 1e6:.1f} MB, more than the limit of "
            f"{most_bytes / 1e6:.1f} MB (max_unpacked_gb, max_ratio). Nothing was unpacked."
        )
    for info in infos:
        # Only Unix writes permissions and kinds; the name as stored, before zipfile mends it.
        mode = info.external_attr >> 16
        yield Entry(
            name=info.orig_filename,
            kind="folder" if info.orig_filename.endswith(("/", "\\")) else _kind(mode),
            mode=stat.S_IMODE(mode),
            open=partial(source.open, info),
        )


def _kind(mode: int) -> str:
    names = {
        stat.S_IFLNK: "link",
        stat.S_IFDIR: "folder",
        stat.S_IFREG: "file",
        0: "file",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
    }
    return names.get(stat.S_IFMT(mode), "device file")


def _tar_entries(tar: tarfile.TarFile) -> Iterator[Entry]:
    while (member := tar.next()) is not None:
        # tarfile keeps them all, with headers that compress a thousandfold
        tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
        yield Entry(
            name=member.name,
            kind=_tar_kind(member),
            mode=stat.S_IMODE(member.mode),
            target=member.linkname,
            open=partial(_content, tar, member),
        )


def _tar_kind(member: tarfile.TarInfo) -> str:
    if member.isreg():
        return "file"
    if member.isdir():
        return "folder"
    if member.issym():
        return "link"
    if member.islnk():
        return "hard link"
    return "pipe" if member.isfifo() else "device file"


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member) if member.isreg() else None  # not what a link leads to
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

    def __init__(self, stream: Any, most_bytes: int, label: str) -> None:
        self._stream, self._most, self._label = stream, most_bytes, label

    def peek(self, size: int) -> bytes:
        """The first bytes, without moving on."""
        data: bytes = self._stream.read(size)
        self._stream.seek(0)
        return data

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        if not 0 <= size <= _MOST_AT_ONCE:
            raise FetchError(f"{self._label}: a header of the archive says it has {size} bytes.")
        data: bytes = self._stream.read(size)
        self._check()
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move on; a decompressor reads all that lies between."""
        if whence == 0 and position > self._most:
            self._check(position)
        moved: int = self._stream.seek(position, whence)
        return moved

    def tell(self) -> int:
        """Position in the decompressed stream."""
        at: int = self._stream.tell()
        return at

    def _check(self, position: int | None = None) -> None:
        if (self.tell() if position is None else position) > self._most:
            raise FetchError(
                f"{self._label}: unpacks to more than {self._most / 1e6:.1f} MB, the limit "
                "(max_unpacked_gb, max_ratio). Nothing was unpacked."
            )
