"""What a person sees of a long transfer: a bar with the time left, or a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

_LINE_EVERY_S = 15.0


@contextmanager
def shown(what: str, total: int | None, done: int) -> Iterator[Callable[[int], None]]:
    """Give a function to call with every number of bytes that has arrived.

    Args:
        what: what is transferred.
        total: bytes in all; None when unknown.
        done: bytes that were there before.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda size: bar.advance(task, size)
        return
    _log.info("%s: %s%s", what, _size(total), f", {_size(done)} here already" if done else "")
    yield _Lines(what, total, done).advance


class _Lines:
    def __init__(self, what: str, total: int | None, done: int) -> None:
        self._what, self._total, self._start, self._done = what, total, done, done
        self._began = self._last = time.monotonic()

    def advance(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        rate = (self._done - self._start) / (now - self._began)
        left = f", {(self._total - self._done) / rate:.0f} s left" if self._total else ""
        _log.info("%s: %s of %s%s", self._what, _size(self._done), _size(self._total), left)


def _size(n_bytes: int | None) -> str:
    return "unknown size" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"
