"""Stop on a signal: the first signal ends training after a step, the second at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # Windows does not have the last two
_HANDLED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@dataclass(slots=True)
class StopRequest:
    """Records whether a signal has requested a stop, and the signal's number."""

    signal_number: int | None = None

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that this signal has ended: 128 + the signal's number."""
        return 128 + (self.signal_number or signal.SIGINT)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Yield a request that SIGINT, SIGTERM, SIGUSR1 or SIGHUP sets during the block.

    The first signal restores the default handlers, so that a second signal ends the process.
    Outside the main thread no signal is handled.
    """
    request = StopRequest()
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # signature of handlers
        # The signal is only noted: the loop stops between two steps, where the state can be saved.
        request.signal_number = number
        for handled in before:
            signal.signal(handled, signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in _HANDLED}
    # `nohup` makes a process ignore SIGHUP, and the signal must stay ignored.
    if before.get(getattr(signal, "SIGHUP", None)) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
