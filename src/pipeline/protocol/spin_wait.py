"""How to wait for the other process: poll for a moment, then sleep.

Trainer and environment take turns of a few hundred microseconds. Waking a sleeping process costs
the kernel tens of microseconds, on a virtual machine hundreds, and delays the waking process, too;
so each end polls for some milliseconds before it blocks. Where polling does not pay, because the
other end is slower or other processes wait for this processor, an end soon stops polling and only
tries again now and then; with a single processor it never polls.
`benchmarks/exchange.py`, with and without PIPELINE_SPIN_US=0, shows the effect.
"""

from __future__ import annotations

import math
import os
import time
from selectors import BaseSelector

from pipeline.errors import SettingsError

VARIABLE = "PIPELINE_SPIN_US"
_DEFAULT_US = 4000.0
"""Longer than a gradient step or a built-in simulator's step takes on a slow machine. An end that
gives up just before the answer comes has to be woken, which makes the next answer later still."""
_MOST_US = 1e6
"""Limited, because the time-out of a silent environment is not checked while polling."""
_CROWDED = 0.25
"""Share of a poll in which other processes had the processor, from which polling does not pay."""
_MAX_PAUSE = 1024
"""Waits without polling after a poll that did not pay: doubled each time, up to this many."""


class SpinWait:
    """Polls for a short time before a wait blocks, and more seldom where that does not pay.

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
        # In this order of clocks `others_s` is at most 0 if no other process worked.
        worked, began = time.thread_time(), time.perf_counter()
        is_there, end = False, began + self.limit_s
        while time.perf_counter() < end:
            if is_there := bool(selector.select(0)):
                break
            _let_others_work()
        polled_s = time.perf_counter() - began
        others_s = polled_s - (time.thread_time() - worked)
        if is_there and others_s < _CROWDED * polled_s:
            self._pause = 1
            return
        self._left_out = self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)


def _let_others_work() -> None:
    """Give way to processes that wait for this processor; takes no time if there are none."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _limit() -> float:
    text = os.environ.get(VARIABLE)
    if text is None:
        return _DEFAULT_US * 1e-6 if _n_processors() > 1 else 0.0
    try:
        microseconds = float(text)
    except ValueError:
        microseconds = math.nan
    if not microseconds <= _MOST_US:  # nor what is no number
        raise SettingsError(
            f"{VARIABLE}={text}: expected microseconds to look before blocking, at most "
            f"{_MOST_US:.0f}, such as 500, or 0"
        )
    return max(microseconds, 0.0) * 1e-6


def _n_processors() -> int:
    # This process may be bound to fewer processors than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
