"""Archives of environments by URL, in a content-addressed cache that all runs share.

    <cache>/environments/
        <sha256 of the archive>/     content of an archive
        <sha256>.unpacking/          content that is not complete yet
        downloads/                   archives that are not unpacked yet
        locks/                       one lock for each archive, so that two runs fetch it once

A folder gets its final name when it is complete and flushed to disk. `pooch` downloads and checks
the digest. `tarfile` and `zipfile` unpack, and the data filter of `tarfile` (PEP 706) checks the
entries of both. Links are made after all files, so that no file is written through a link.
"""

import contextlib
import gzip
import hashlib
import logging
import lzma
import os
import platform
import shutil
import stat
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from pipeline import files
from pipeline.errors import FetchError, brief, one_line
from pipeline.settings.project.environments import URL_SCHEMES

if TYPE_CHECKING:
    import requests

_log = logging.getLogger(__name__)

MAX_BYTES = 16 * 10**9  # default limit of the number of bytes of an archive, and of its content
ATTEMPTS = 5
PAUSE_S = 0.5  # seconds of pause before the second attempt; doubled before each further attempt
# Longest waits for the connection, and for the next bytes, in seconds.
_TIMEOUT_S = (10.0, 30.0)
_CHUNK_BYTES = 1 << 16
# HTTP statuses after which another attempt may succeed (RFC 9110; 425: RFC 8470, 429: RFC 6585).
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
# Longest wait for another process's lock, and age after which an unfinished download is removed.
_WAIT_S = 3600.0
_ABANDONED_S = 7 * 24 * 3600.0


def cache_folder() -> Path:
    """Return the cache of environments, in `PIPELINE_CACHE` or the user's cache folder."""
    chosen = os.environ.get("PIPELINE_CACHE")
    if chosen:
        return Path(chosen).absolute() / "environments"
    import platformdirs

    return Path(platformdirs.user_cache_dir("rl-pipeline", appauthor=False)) / "environments"


def fetch(url: str, *, sha256: str, max_bytes: int = MAX_BYTES) -> Path:
    """Return the folder with an archive's content; download and unpack it if it is not cached.

    Raises:
        FetchError: The archive cannot be downloaded or unpacked, has another digest, or it or its
            content has more than `max_bytes`.
    """
    sha256 = sha256.lower()
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise FetchError(f"sha256 needs 64 hex digits, got {sha256!r}")
    cache = cache_folder()
    folder = cache / sha256
    # No lock is needed: a folder gets this name by a rename when it is complete.
    if folder.is_dir():
        return folder
    with locked(sha256, f"the archive {public(url)}"):
        if folder.is_dir():  # another process made the folder while this one waited
            return folder
        with _archive_lock(url):
            archive = download(url, _downloads(), sha256=sha256, max_bytes=max_bytes)
            temporary = cache / f"{sha256}.unpacking"
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            _log.info("Unpacking %s", public(url))
            try:
                unpack(archive, temporary, max_bytes=max_bytes, label=public(url))
                temporary.replace(folder)
                files.sync_folder(cache)
            finally:
                archive.unlink()
    return folder


def digest_of(url: str, *, max_bytes: int = MAX_BYTES) -> str:
    """Download an archive and return its sha256; `fetch` does not download the archive again."""
    with _archive_lock(url):
        # The server may have another archive now than at an earlier download.
        (_downloads() / _name(url)).unlink(missing_ok=True)
        return files.sha256_of(download(url, _downloads(), max_bytes=max_bytes))


def download(url: str, folder: Path, *, max_bytes: int, sha256: str | None = None) -> Path:
    """Return a file in `folder` with the content of a URL, downloaded if it does not exist.

    After an error the file does not exist.

    Raises:
        FetchError: The content cannot be downloaded, is too large, or has another digest.
    """
    import pooch
    import requests

    parts = _parts(url)
    if parts.scheme not in URL_SCHEMES or not (parts.hostname or parts.scheme == "file"):
        raise FetchError(
            f"{public(url)}: is not a URL that can be fetched; it must start with "
            f"{', '.join(f'{scheme}://' for scheme in URL_SCHEMES)}"
        )
    pooch.get_logger().setLevel(logging.WARNING)  # lines of lower levels show secrets in the URL
    source = _copy if parts.scheme == "file" else _download
    try:
        with files.naming(folder / _name(url)):
            file = pooch.retrieve(
                url,
                sha256,
                fname=_name(url),
                path=folder,
                downloader=partial(source, max_bytes=max_bytes),
            )
    except requests.RequestException as error:
        again = f", {ATTEMPTS} times in a row. Check the connection and try again"
        raise FetchError(
            f"{public(url)}: {_reason(error)}{again if _is_transient(error) else ''}"
        ) from error
    except ValueError as error:  # the archive has another digest
        raise FetchError(
            f"{public(url)}: {error} Nothing was unpacked. Correct sha256 only if you know why the "
            "archive has changed."
        ) from error
    return Path(file)


def public(url: str) -> str:
    """Return a URL without its parts that may be secret: user, password and query."""
    parts = _parts(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "..." if parts.query else "", ""))


@contextlib.contextmanager
def locked(name: str, what: str) -> Iterator[None]:
    """Hold the lock `name` of the cache, so that no other process or thread works on `what`.

    Raises:
        FetchError: Another process has held the lock for an hour.
    """
    from filelock import FileLock, Timeout

    path = cache_folder() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        # The first attempt does not wait, so that a wait can be logged.
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("Waiting for another process that works on %s", what)
        try:
            lock.acquire(timeout=_WAIT_S)
        except Timeout:
            raise FetchError(
                f"another process has worked on {what} for {_WAIT_S / 60:.0f} minutes; end that "
                "process and try again"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _archive_lock(url: str) -> Iterator[None]:
    """Hold the lock of a URL's download, and remove downloads that are more than a week old."""
    with locked(f"url-{_name(url)}", public(url)):
        for path in _downloads().glob("*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()
        yield


def _downloads() -> Path:
    return cache_folder() / "downloads"


def _name(url: str) -> str:
    """Return the name of a URL's file: a digest, which is short and shows no secrets."""
    return f"{hashlib.sha256(url.encode(errors='surrogateescape')).hexdigest()[:32]}.archive"


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise FetchError(f"{url!r}: is not a URL ({error})") from error


def _copy(url: str, file: str, _pooch: object, *, max_bytes: int) -> None:
    parts = _parts(url)
    if parts.netloc not in ("", "localhost"):
        raise FetchError(f"{public(url)}: a file URL has three slashes, file:///folder/archive.zip")
    source = Path(url2pathname(unquote(parts.path) if os.name == "posix" else parts.path))
    if not source.is_file():
        raise FetchError(f"{public(url)}: there is no such file")
    _check_size(source.stat().st_size, max_bytes, url)
    shutil.copyfile(source, file)


def _download(url: str, file: str, _pooch: object, *, max_bytes: int) -> None:
    import requests

    _log.info("Downloading %s", public(url))
    for attempt in range(ATTEMPTS):
        try:
            _write_content(url, file, max_bytes)
        except requests.RequestException as error:
            if not _is_transient(error) or attempt == ATTEMPTS - 1:
                raise
            pause_s = PAUSE_S * 2**attempt
            _log.info("%s: %s; next attempt in %.1f s", public(url), _reason(error), pause_s)
            time.sleep(pause_s)
        else:
            return


def _is_transient(error: "requests.RequestException") -> bool:
    from requests import exceptions

    if error.response is not None:
        return error.response.status_code in _TRANSIENT
    # A certificate error is not transient: it would stay the same at each attempt.
    broken = (exceptions.ConnectionError, exceptions.ChunkedEncodingError, exceptions.Timeout)
    return isinstance(error, broken) and not isinstance(error, exceptions.SSLError)


def _reason(error: "requests.RequestException") -> str:
    if error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    # The innermost cause is the error of the system, such as "Connection refused".
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    return f"the connection failed ({str(cause) or type(cause).__name__})"


def _check_size(size: int, max_bytes: int, url: str) -> None:
    if size > max_bytes:
        raise FetchError(
            f"{public(url)}: has more than {max_bytes / 1e6:g} MB, the limit (max_unpacked_gb); "
            "raise the limit if the file is right"
        )


def _write_content(url: str, file: str, max_bytes: int) -> None:
    import requests
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    bar = Progress(
        *("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    # Another encoding would change the bytes and their digest.
    headers = {"Accept-Encoding": "identity"}
    with (
        requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response,
        Path(file).open("wb") as output,
        bar,
    ):
        response.raise_for_status()
        # The size is checked twice, because a server may give no size or a wrong one.
        size = int(response.headers.get("content-length", 0))
        _check_size(size, max_bytes, url)
        task = bar.add_task(public(url), total=size or None)
        for chunk in response.iter_content(_CHUNK_BYTES):
            output.write(chunk)
            _check_size(output.tell(), max_bytes, url)
            bar.update(task, completed=output.tell())


# Longest path on Linux (PATH_MAX), so no link can have a longer target.
_MAX_LINK_BYTES = 4096
# First bytes of ELF files, scripts and Mach-O files. Such files get the permission to be executed,
# because many zip archives store no permissions.
_MAGIC = (b"\x7fELF", b"#!", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_UNITY_SUFFIXES = (".x86_64", ".x86")
# The tar type for each file type of zip entries; all other file types, such as devices, become
# CHRTYPE, which the data filter refuses. Archives from other systems than Unix have file type 0.
_ZIP_TYPES = {
    0: tarfile.REGTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
}
# Errors of the decompressors and of the archive formats for a damaged file.
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # raised by zipfile for an unknown compression or version
    RuntimeError,  # raised by zipfile for an archive with a password
    ValueError,  # raised for a name with a null byte, or a damaged number in a tar header
    OverflowError,
)


def unpack(archive: Path, folder: Path, *, max_bytes: int, label: str) -> None:
    """Write the content of a zip, tar, tar.gz, tar.bz2 or tar.xz archive into a new `folder`.

    Permissions are 755 for executables and 644 for other files. All files are flushed to disk.
    After an error the folder does not exist.

    Raises:
        FetchError: The file is not an archive or is damaged, an entry is not allowed, or the
            content has more than `max_bytes`.
    """
    unpacking = _Unpacking(folder, max_bytes, label)
    if not hasattr(tarfile, "data_filter"):  # as in Python 3.11.2 of Debian 12
        raise unpacking.error(
            f"Python {platform.python_version()} cannot check archives; use 3.11.4 or newer, or "
            "unpack the archive by hand and give the executable with `source: path`"
        )
    folder.mkdir(parents=True)
    try:
        with archive.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            # The first bytes decide, because the name in a URL may have any suffix.
            (unpacking.zip if start.startswith(b"PK") else unpacking.tar)(file, start)
        unpacking.finish()
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        # An OSError of the system has a number; an OSError of a decompressor has none.
        if isinstance(error, OSError) and error.errno is not None:
            raise unpacking.error(
                f"the entry {brief(unpacking.entry)!r} cannot be unpacked: {error.strerror}"
            ) from error
        if isinstance(error, (*_BROKEN, OSError)):
            reason = one_line(error) or type(error).__name__
            raise unpacking.error(f"the archive cannot be read: {reason}") from error
        raise


class _Unpacking:
    """Unpacks one archive; `entry` is the name of the current entry, for error messages."""

    def __init__(self, folder: Path, max_bytes: int, label: str) -> None:
        self.entry = ""
        self._folder, self._max_bytes, self._label = folder, max_bytes, label
        self._n_bytes = 0

    def tar(self, file: IO[bytes], start: bytes) -> None:
        try:
            # With `errorlevel=2`, every entry that cannot be written is an error.
            archive = tarfile.open(fileobj=file, errorlevel=2)  # noqa: SIM115  # closed below
        except tarfile.ReadError as error:
            raise self.error(
                "is not a zip, tar, tar.gz, tar.bz2 or tar.xz archive, or is damaged (it starts "
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
            # Hard links are made before symbolic links: `_checked` tests that a hard link leads to
            # a file, and must not find a symbolic link in place of this file.
            for entry in sorted(links, key=tarfile.TarInfo.issym):
                self.entry = entry.name
                archive.extract(entry, self._folder, filter=self._checked)
            # The end of the archive is read, too, so that the stream's checksum is checked.
            while archive.fileobj.read(1 << 16):
                pass

    def zip(self, file: IO[bytes], _start: bytes) -> None:
        links = []
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                # Some archivers on Windows write backslashes.
                entry = tarfile.TarInfo(info.filename.replace("\\", "/"))
                mode = info.external_attr >> 16  # Unix permissions; 0 in archives of other systems
                entry.size, entry.mode = info.file_size, stat.S_IMODE(mode)
                is_folder = entry.name.endswith("/")
                kind = _ZIP_TYPES.get(stat.S_IFMT(mode), tarfile.CHRTYPE)
                entry.type = tarfile.DIRTYPE if is_folder else kind
                self._count(entry)
                with archive.open(info) as content:
                    # In a zip archive, the content of a link is the path of its target.
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
        """Check the targets of links, set permissions, and flush all files to disk."""
        inside = os.path.realpath(self._folder)
        for parent, folders, names in os.walk(self._folder):
            for path in (Path(parent, name) for name in (*folders, *names)):
                self.entry = path.relative_to(self._folder).as_posix()
                if path.is_symlink():
                    # Each link is checked again, because a link that was made later may have
                    # changed where it leads.
                    real = os.path.realpath(path)
                    if os.path.commonpath([inside, real]) != inside:
                        raise self.error(
                            f"the link {self.entry!r} leads out of the archive's folder"
                        )
                elif path.is_file():
                    with path.open("r+b") as file:
                        start = file.read(4)
                        # The file is flushed to the disk, because the folder's name is the digest
                        # of this content, and must be right even after a power failure.
                        os.fsync(file.fileno())
                    is_executable = start.startswith(_MAGIC) or path.suffix in _UNITY_SUFFIXES
                    path.chmod(0o755 if is_executable or path.stat().st_mode & 0o100 else 0o644)
            files.sync_folder(Path(parent))

    def error(self, text: str) -> FetchError:
        return FetchError(f"{self._label}: {text}. Nothing was unpacked.")

    def _count(self, entry: tarfile.TarInfo) -> None:
        """Add the declared size of an entry to the total; raise FetchError above the limit."""
        # Neither `tarfile` nor `zipfile` writes more bytes than an entry declares.
        self.entry = entry.name
        self._n_bytes += max(0, entry.size)  # a damaged header may have a negative size
        if self._n_bytes > self._max_bytes:
            raise self.error(
                f"unpacks to more than {self._max_bytes / 1e6:g} MB (max_unpacked_gb), noticed in "
                f"{entry.name!r}; raise the limit if the archive is right"
            )

    def _checked(self, entry: tarfile.TarInfo, _folder: object = None) -> tarfile.TarInfo:
        """Return an entry with a safe name and mode; raise FetchError or FilterError for others."""
        checked = tarfile.data_filter(entry, str(self._folder))
        if checked.name != entry.name:  # the filter makes an absolute name relative
            raise self.error(f"the entry {entry.name!r} has an absolute name")
        if entry.islnk() and not (self._folder / entry.linkname).is_file():
            raise self.error(
                f"the hard link {entry.name!r} leads to {entry.linkname!r}, which is not a file of "
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
