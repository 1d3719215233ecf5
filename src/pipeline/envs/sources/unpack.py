"""Unpack an archive into a folder of its own: tar by `tarfile`, zip by `zipfile`.

The data filter of `tarfile` checks the entries of both. Links are made after all files, so that no
file is written through a link.
"""

from __future__ import annotations

import gzip
import lzma
import os
import platform
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from pipeline import files
from pipeline.errors import FetchError, brief, one_line

MAX_BYTES = 16 * 10**9
"""Bytes that an archive, and its content, may have unless a caller says otherwise."""
_MAX_LINK_BYTES = 4096
_PROGRAM_STARTS = (b"\x7fELF", b"#!", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""ELF, scripts, and Mach-O: files that need executable bits, which many zip archives lack."""
_UNITY_PROGRAMS = (".x86_64", ".x86")
_ZIP_TYPES = {
    0: tarfile.REGTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
}
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # zipfile's for a compression or version that it does not know
    RuntimeError,  # zipfile's for a password that it lacks
    ValueError,  # for a name with a null byte, or a number in a tar header that is not a number
    OverflowError,
)


def unpack(archive: Path, folder: Path, *, max_bytes: int, label: str) -> None:
    """Write the content of a zip, tar, tar.gz, tar.bz2 or tar.xz archive into a new `folder`.

    Permissions are 755 for programs and 644 for other files. Everything is flushed to disk. After
    an error there is no folder.

    Raises:
        FetchError: It is no archive or a damaged one, an entry is not allowed, or the content has
            more than `max_bytes`.
    """
    unpacking = _Unpacking(folder, max_bytes, label)
    if not hasattr(tarfile, "data_filter"):  # Debian 12 has 3.11.2
        raise unpacking.error(
            f"Python {platform.python_version()} cannot check archives; use 3.11.4 or newer, or "
            "unpack it by hand and name the program: `source: path`"
        )
    folder.mkdir(parents=True)
    try:
        with archive.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            # By the first bytes: the name at the end of a URL says nothing.
            (unpacking.zip if start.startswith(b"PK") else unpacking.tar)(file, start)
        unpacking.finish()
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        # A decompressor's OSError has no number, unlike the system's.
        if isinstance(error, OSError) and error.errno is not None:
            raise unpacking.error(
                f"the entry {brief(unpacking.entry)!r} cannot be unpacked: {error.strerror}"
            ) from error
        if isinstance(error, (*_BROKEN, OSError)):
            reason = one_line(error) or type(error).__name__
            raise unpacking.error(f"the archive cannot be read: {reason}") from error
        raise


class _Unpacking:
    """One archive that is unpacked; `entry` is the name of the present entry."""

    def __init__(self, folder: Path, max_bytes: int, label: str) -> None:
        self.entry = ""
        self._folder, self._max_bytes, self._label = folder, max_bytes, label
        self._n_bytes = 0

    def tar(self, file: IO[bytes], start: bytes) -> None:
        """Write the entries of a tar archive, compressed or not."""
        try:
            # `errorlevel`: an entry that cannot be written is an error, whatever its kind.
            archive = tarfile.open(fileobj=file, errorlevel=2)  # noqa: SIM115  # closed below
        except tarfile.ReadError as error:
            raise self.error(
                "is no zip, tar, tar.gz, tar.bz2 or tar.xz archive, or a damaged one (it starts "
                f"with {start!r})"
            ) from error
        with archive:
            links = []
            for entry in archive:
                self._count(entry)
                if entry.issym() or entry.islnk():
                    links.append(entry)
                else:
                    archive.extract(entry, self._folder, filter=self._checked)
            # Hard links first: `_checked` sees whether each leads to a file of the archive.
            for entry in sorted(links, key=tarfile.TarInfo.issym):
                self.entry = entry.name
                archive.extract(entry, self._folder, filter=self._checked)
            # To the checksum of the compressed stream, which comes after the last entry.
            while archive.fileobj.read(1 << 16):
                pass

    def zip(self, file: IO[bytes], _start: bytes) -> None:
        """Write the entries of a zip archive."""
        links = []
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                # Some programs on Windows write backslashes.
                entry = tarfile.TarInfo(info.filename.replace("\\", "/"))
                mode = info.external_attr >> 16  # 0 unless written on Unix
                entry.size, entry.mode = info.file_size, stat.S_IMODE(mode)
                is_folder = entry.name.endswith("/")
                kind = _ZIP_TYPES.get(stat.S_IFMT(mode), tarfile.CHRTYPE)
                entry.type = tarfile.DIRTYPE if is_folder else kind
                self._count(entry)
                with archive.open(info) as content:
                    if entry.issym():
                        entry.linkname = content.read(_MAX_LINK_BYTES).decode(errors="replace")
                        links.append(entry)
                    else:
                        self._write(self._checked(entry), content)
            for entry in links:
                self.entry = entry.name
                path = self._folder / self._checked(entry).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(entry.linkname)

    def finish(self) -> None:
        """Check where links lead, set permissions, and flush everything to disk."""
        inside = os.path.realpath(self._folder)
        for parent, folders, names in os.walk(self._folder):
            for path in (Path(parent, name) for name in (*folders, *names)):
                self.entry = path.relative_to(self._folder).as_posix()
                if path.is_symlink():
                    # Again, since a later link may have changed where this one leads.
                    real = os.path.realpath(path)
                    if os.path.commonpath([inside, real]) != inside:
                        raise self.error(f"the link {self.entry!r} leads out of its folder")
                elif path.is_file():
                    with path.open("r+b") as file:
                        start = file.read(4)
                        # The folder's name is its digest, which counts after a power failure, too.
                        os.fsync(file.fileno())
                    is_program = start.startswith(_PROGRAM_STARTS) or path.suffix in _UNITY_PROGRAMS
                    path.chmod(0o755 if is_program or path.stat().st_mode & 0o100 else 0o644)
            files.sync_folder(Path(parent))

    def error(self, text: str) -> FetchError:
        """Return an error about the archive."""
        return FetchError(f"{self._label}: {text}. Nothing was unpacked.")

    def _count(self, entry: tarfile.TarInfo) -> None:
        """Add the size of an entry; both libraries write no more than it declares."""
        self.entry = entry.name
        self._n_bytes += max(0, entry.size)  # a damaged header may have a negative size
        if self._n_bytes > self._max_bytes:
            raise self.error(
                f"unpacks to more than {self._max_bytes / 1e6:g} MB (max_unpacked_gb), noticed in "
                f"{entry.name!r}; raise it if right"
            )

    def _checked(self, entry: tarfile.TarInfo, _folder: object = None) -> tarfile.TarInfo:
        """Return an entry as it may be written; raise if it may not."""
        checked = tarfile.data_filter(entry, str(self._folder))
        if checked.name != entry.name:  # the filter makes it relative
            raise self.error(f"the entry {entry.name!r} has an absolute name")
        if entry.islnk() and not (self._folder / entry.linkname).is_file():
            raise self.error(
                f"the hard link {entry.name!r} leads to {entry.linkname!r}, which is no file of "
                "the archive"
            )
        return checked

    def _write(self, entry: tarfile.TarInfo, content: IO[bytes]) -> None:
        path = self._folder / entry.name
        if entry.isdir():
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(entry.mode or 0o644)
