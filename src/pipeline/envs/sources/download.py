"""Download a file that may be large, over a connection that may break.

Until it is complete, the file is called `.part`. Beside it lies `.etag` with the server's name of
this version (ETag or Last-Modified). A later attempt asks for the rest of that version only; the
server sends everything when it has another.
"""

# Not pooch (looked at in 1.9.0): a player may have gigabytes, and pooch starts again after a broken
# connection, has no limit of size, and takes no file:// URL.

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from pipeline import files
from pipeline.errors import FetchError
from pipeline.settings.environments import URL_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import requests

_log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Connections that may fail one after the other without a byte gained."""
PAUSE_S = 0.5
"""Before the second attempt; doubled before each further one."""
_TIMEOUT_S = (10.0, 30.0)
_CHUNK_BYTES = 1 << 16
"""Of a broken connection the last chunk that is not whole is lost."""
_LINE_EVERY_S = 15.0
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class _BrokenError(Exception):
    """The connection failed; another attempt may go on."""


def download(url: str, file: Path, *, max_bytes: int) -> None:
    """Make `file` the whole content of `url`, going on from its `.part` when that is possible.

    After an error only what a later attempt can continue is left.

    Raises:
        FetchError: It cannot be reached, is not there, or is too large.
    """
    parts = _parts(url)
    if parts.scheme not in URL_SCHEMES or not (parts.hostname or parts.scheme == "file"):
        raise FetchError(
            f"{public(url)}: is no URL that can be fetched; it must start with "
            f"{', '.join(f'{scheme}://' for scheme in URL_SCHEMES)}"
        )
    part = file.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.naming(part):
            (_copy if parts.scheme == "file" else _download)(url, part, max_bytes)
            with part.open("rb") as content:
                os.fsync(content.fileno())
        part.replace(file)
        _etag(part).unlink(missing_ok=True)
    except BaseException as error:
        # Only a broken connection can be continued, and only where the server names its version.
        broken = isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, _BrokenError)
        if not (broken and _known_version(part)):
            _discard(part)
        raise


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _etag(part).unlink(missing_ok=True)


def public(url: str) -> str:
    """Return a URL without what may be secret in it: user, password and query."""
    parts = _parts(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "..." if parts.query else "", ""))


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise FetchError(f"{url!r}: is no URL ({error})") from error


def _etag(part: Path) -> Path:
    return part.with_suffix(".etag")


def _known_version(part: Path) -> str:
    """Return the server's name of the version of `part`; empty when it cannot be continued."""
    etag = _etag(part)
    return etag.read_text(encoding="utf-8", errors="ignore") if etag.exists() else ""


def _copy(url: str, part: Path, max_bytes: int) -> None:
    parts = _parts(url)
    if parts.netloc not in ("", "localhost"):
        raise FetchError(f"{public(url)}: a file URL has three slashes, file:///folder/archive.zip")
    source = Path(url2pathname(unquote(parts.path) if os.name == "posix" else parts.path))
    if not source.is_file():
        raise FetchError(f"{public(url)}: there is no such file")
    _check_size(source.stat().st_size, max_bytes, url)
    shutil.copyfile(source, part)


def _download(url: str, part: Path, max_bytes: int) -> None:
    import requests

    failures, most = 0, _size(part)
    with requests.Session() as session:
        while True:
            try:
                _attempt(session, url, part, max_bytes)
            except _BrokenError as error:
                # Only connections without a new byte are counted.
                failures = 0 if _size(part) > most else failures + 1
                most = max(most, _size(part))
                if failures >= ATTEMPTS:
                    raise FetchError(
                        f"{public(url)}: {error}, {failures} times in a row. Check the "
                        "connection and try again."
                    ) from error
                pause_s = PAUSE_S * 2 ** max(0, failures - 1)
                _log.info("%s: %s; next attempt in %.1f s", public(url), error, pause_s)
                time.sleep(pause_s)
            except requests.RequestException as error:
                raise FetchError(f"{public(url)}: cannot be fetched: {_reason(error)}") from error
            else:
                return


def _attempt(session: requests.Session, url: str, part: Path, max_bytes: int) -> None:
    """Try one connection; what has arrived stays in `part`."""
    import requests

    version = _known_version(part)
    have = _size(part) if version else 0
    # Compressed on its way, a part's length would say nothing of the file's.
    headers = {"Accept-Encoding": "identity"}
    if have:
        # If-Range: the rest only of the same version, otherwise the whole of the new one.
        headers |= {"Range": f"bytes={have}-", "If-Range": version}
    try:
        with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
            _receive(response, url, part, have=have, max_bytes=max_bytes)
    except requests.exceptions.SSLError:  # a ConnectionError that no further attempt mends
        raise
    except (
        requests.exceptions.ConnectionError,
        requests.exceptions.ChunkedEncodingError,
        requests.exceptions.Timeout,
    ) as error:
        raise _BrokenError(
            f"the connection failed after {_size(part)} bytes ({_reason(error)})"
        ) from error


def _receive(
    response: requests.Response, url: str, part: Path, *, have: int, max_bytes: int
) -> None:
    status = response.status_code
    if status == 416:  # the part is not the beginning of the server's file
        _discard(part)
        raise _BrokenError("the server has no more of this file")
    if status in _TRANSIENT:
        raise _BrokenError(f"the server answered {status} {response.reason}")
    if status not in (200, 206):
        raise FetchError(f"{public(url)}: the server answered {status} {response.reason}")
    # Appended to the wrong place, it would give a file of the right length and wrong content.
    if status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        _discard(part)
        raise _BrokenError("the server sent another part than asked for")
    have = have if status == 206 else 0
    total = _total(response, have)
    # Refused by what is announced, before it is downloaded.
    if total is not None:
        _check_size(total, max_bytes, url)
    if status == 200:  # the whole of it, of this version or another
        part.unlink(missing_ok=True)
        files.write_whole(_etag(part), _validator(response) or "")
    with (
        part.open("ab") as file,
        progress(f"Downloading {public(url)}", total, have) as advance,
    ):
        for chunk in response.iter_content(_CHUNK_BYTES):
            file.write(chunk)
            advance(len(chunk))
            have += len(chunk)
            # Again while it arrives: the announced length may be missing or wrong.
            _check_size(have, max_bytes, url)
    if total is not None and have != total:
        raise _BrokenError(f"{have} of {total} bytes arrived")


def _total(response: requests.Response, have: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    if response.headers.get("Content-Encoding", "identity") != "identity" or not length.isdigit():
        return None
    return have + int(length)


def _validator(response: requests.Response) -> str | None:
    """Return a strong ETag or the date for `If-Range`; None when ranges are not served."""
    headers = response.headers
    if headers.get("Content-Encoding", "identity") != "identity":
        return None
    if response.status_code == 200 and headers.get("Accept-Ranges", "").lower() == "none":
        return None
    etag = headers.get("ETag", "")
    # A weak ETag (W/"...") does not promise equal bytes, so ranges must not be joined by it.
    return etag if etag.startswith('"') else headers.get("Last-Modified")


def _check_size(size: int, max_bytes: int, url: str) -> None:
    if size > max_bytes:
        raise FetchError(
            f"{public(url)}: has more than {max_bytes / 1e6:g} MB, the limit (max_unpacked_gb)"
        )


def _reason(error: Exception) -> str:
    """Return the text of the innermost cause, which is the part that says something."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    return str(cause) or type(cause).__name__


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


@contextmanager
def progress(what: str, total: int | None, done: int) -> Iterator[Callable[[int], None]]:
    """Show a long transfer: a bar with the time left, or a line now and then without a terminal.

    Gives a function to call with every number of bytes that has arrived. Of `total` bytes (None:
    unknown) `done` were there before.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda size: bar.advance(task, size)
        return
    before = f", {_megabytes(done)} here already" if done else ""
    _log.info("%s: %s%s", what, _megabytes(total), before)
    have = done
    began = logged = time.monotonic()

    def advance(size: int) -> None:
        nonlocal have, logged
        have += size
        now = time.monotonic()
        if now - logged < _LINE_EVERY_S:
            return
        logged = now
        rate = (have - done) / (now - began)
        left = f", {(total - have) / rate:.0f} s left" if total else ""
        _log.info("%s: %s of %s%s", what, _megabytes(have), _megabytes(total), left)

    yield advance


def _megabytes(n_bytes: int | None) -> str:
    return "unknown size" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"
