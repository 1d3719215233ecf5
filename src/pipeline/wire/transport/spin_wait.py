"""Waiting for the other process: poll for some milliseconds, then sleep.

Trainer and environment take turns of a few hundred microseconds. Waking a sleeping process costs
the kernel tens of microseconds, on a virtual machine hundreds, and also delays the process that
wakes the other; so each process polls for some milliseconds before it blocks. If polling does not
pay, because the other process is slower or more processes wait for this processor, a process soon
stops polling and tries again seldom; on a machine with a single processor it never polls.
`benchmarks/exchange.py`, with and without PIPELINE_SPIN_US=0, shows the effect.
"""

import math
import os
import time
from selectors import BaseSelector

from pipeline.errors import SettingsError

VARIABLE = "PIPELINE_SPIN_US"
# The time is longer than a gradient step, or a built-in simulator's step, on a slow machine. A
# process that stops polling just before the answer arrives must be woken, and then its own answer
# is late, too.
_DEFAULT_US = 4000.0
# The time is limited, because the time-out of a silent environment is not checked while polling.
_MAX_US = 1e6
# Polling is useless if other processes had the processor for a larger share of the polling time.
_MAX_OTHERS_SHARE = 0.25
# Largest number of waits without polling. The number doubles after each polling that was useless.
_MAX_SKIPS = 1024


class SpinWait:
    """Polls for a short time before a wait blocks, and less often while polling does not pay."""

    def __init__(self, limit_s: float | None = None) -> None:
        """Poll for `limit_s`; None for the value of PIPELINE_SPIN_US or its default."""
        self.limit_s = _limit() if limit_s is None else limit_s
        self._n_to_skip, self._next_skips = 0, 1

    def poll(self, selector: BaseSelector) -> None:
        """Poll `selector` until it is ready or the limit has passed."""
        if self._n_to_skip > 0:
            self._n_to_skip -= 1
            return
        # `others_s` is the time in which other processes had the processor. The thread's clock is
        # read first, so that `others_s` is not above 0 if no other process ran.
        worked, began = time.thread_time(), time.perf_counter()
        is_ready, end = False, began + self.limit_s
        while time.perf_counter() < end:
            if is_ready := bool(selector.select(0)):
                break
            _yield_processor()
        polled_s = time.perf_counter() - began
        others_s = polled_s - (time.thread_time() - worked)
        if is_ready and others_s < _MAX_OTHERS_SHARE * polled_s:
            self._next_skips = 1
            return
        self._n_to_skip = self._next_skips
        self._next_skips = min(2 * self._next_skips, _MAX_SKIPS)


def _yield_processor() -> None:
    """Let processes that wait for this processor run; returns at once if there are none."""
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
    if not microseconds <= _MAX_US:  # this is also true for NaN
        raise SettingsError(
            f"{VARIABLE}={text}: expected microseconds of polling before a wait blocks, at most "
            f"{_MAX_US:.0f}, such as 500; 0 turns polling off"
        )
    return max(microseconds, 0.0) * 1e-6


def _n_processors() -> int:
    # This process may be bound to fewer processors than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
