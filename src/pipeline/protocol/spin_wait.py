"""How to wait for the other process: poll for a moment, then sleep.

Trainer and environment take turns of a few hundred microseconds. Waking a sleeping process costs
the kernel tens of them, on a virtual machine more; so each end polls for up to a millisecond before
it blocks. Where that does not pay, because the other end is slower or waits for this processor, it
soon stops polling and only tries again now and then; with a single processor it never polls.
`benchmarks/exchange.py`, with and without PIPELINE_SPIN_US=0, shows the effect.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from selectors import BaseSelector

VARIABLE = "PIPELINE_SPIN_US"
_DEFAULT_US = 1000.0
"""Twice what a trainer with a small network needs to decide. With half of it an environment gave up
polling just before the answer came, and had to be woken, which made the next answer later still."""
_MAX_PAUSE = 1024
"""Waits without polling after a poll that saw nothing: doubled each time, up to this many."""


class SpinWait:
    """Polls for a short time before a wait blocks, and more seldom where polling sees nothing.

    Args:
        limit_s: how long to poll; None for PIPELINE_SPIN_US or its default.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = _limit() if limit_s is None else limit_s
        self._left_out = 0
        self._pause = 1

    def poll(self, selector: BaseSelector) -> None:
        """Ask `selector` again and again until something is there or the limit is over."""
        if self._left_out > 0:
            self._left_out -= 1
            return
        end = time.perf_counter() + self.limit_s
        while time.perf_counter() < end:
            if selector.select(0):
                self._pause = 1
                return
        self._left_out = self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)


def _limit() -> float:
    given = os.environ.get(VARIABLE)
    if given is None:
        return _DEFAULT_US * 1e-6 if _n_processors() > 1 else 0.0
    try:
        return max(float(given), 0.0) * 1e-6
    except ValueError as error:
        raise SettingsError(
            f"{VARIABLE}={given}: expected microseconds to look before blocking, such as 500, or 0"
        ) from error


def _n_processors() -> int:
    # This process may be bound to fewer processors than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
