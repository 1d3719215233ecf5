"""Stopping on request: the first signal ends training after the current step, a second at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # the last two are unknown on Windows
_HANDLED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@dataclass(slots=True)
class StopRequest:
    """Whether a signal has asked to stop, and which."""

    signal_number: int | None = None

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that ends for this reason."""
        return 128 + (self.signal_number or signal.SIGINT)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Take SIGINT, SIGTERM, SIGUSR1 and SIGHUP as requests while the block runs.

    Outside the main thread signals are not taken.

    After the first signal the default handlers are back, so that a second one ends the process.
    """
    request = StopRequest()
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # a handler's form
        request.signal_number = number
        for handled in before:
            signal.signal(handled, signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in _HANDLED}
    if before.get(getattr(signal, "SIGHUP", None)) is signal.SIG_IGN:  # as `nohup` asks for
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
