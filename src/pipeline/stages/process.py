"""How a stage's process starts and ends: signals, orphans, exit codes, and its log."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from pipeline.errors import Interrupted, PipelineError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM; like KeyboardInterrupt, no `except Exception` swallows it."""

    exit_code = 130
    """Of a process that ends for this reason."""


def run(work: Callable[[], None]) -> int:
    """Do a stage's work and give the exit code of its process.

    0 means that every declared output is in place. A mistake that the user can act on is one line
    on standard error; SIGINT gives 130 and SIGTERM 143, whatever the work made of the signal.
    """
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    die_with_parent()
    with signals():
        try:
            work()
            stop_if_signalled()
        except (KeyboardInterrupt, Interrupted) as error:
            sys.stderr.write(f"interrupted: {one_line(error) or 'stopped by a signal'}\n")
            if _received:
                return 128 + _received[0]
            return error.exit_code if isinstance(error, Interrupted) else 130
        except (PipelineError, OSError) as error:
            sys.stderr.write(f"error: {one_line(error)}\n")
            return int(getattr(error, "exit_code", PipelineError.exit_code))
    return 0


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Stopped`; a second one of them kills at once."""
    _received.clear()
    before = {number: signal.signal(number, _on_signal) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_if_signalled() -> None:
    """Raise `Stopped` when a signal came, even if the work in between went on to its end."""
    if _received:
        raise Stopped(f"stopped by {signal.Signals(_received[0]).name}")


def die_with_parent() -> None:
    """End as after SIGTERM when the parent ends, so that no killed engine leaves orphans.

    Linux sends the signal also when only the parent's starting thread ends, so the handler looks
    whether the parent itself is gone.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()

    def leave_with_parent(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getppid() != parent:
            _log.warning("the process that started this stage is gone; the stage stops")
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, leave_with_parent)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0) != 0:
        _log.warning("this process will outlive its parent: prctl failed (%s)", ctypes.get_errno())


def _on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # a handler's form
    _received.append(number)
    for handled in _HANDLED:
        signal.signal(handled, signal.SIG_DFL)
    stopped = Stopped(f"stopped by {signal.Signals(number).name}")
    stopped.exit_code = 128 + number
    raise stopped
