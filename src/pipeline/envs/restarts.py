"""How often a worker that fails may be started again."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)

if TYPE_CHECKING:
    from pipeline.settings.schema import EnvironmentSettings

# A process that died, hangs, or has left the conversation.
RESTARTABLE = (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)


class RestartBudget:
    """Counts the restarts of each worker; without settings their defaults are the limits."""

    def __init__(
        self,
        limits: EnvironmentSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Not at the top: programs that only step an environment need no settings.
        from pipeline.settings.schema import EnvironmentSettings

        self.limits = limits or EnvironmentSettings()
        self._clock = clock
        self._times: dict[int, deque[float]] = defaultdict(deque)
        self.counts: dict[int, int] = defaultdict(int)

    def refusal(self, worker: int) -> str | None:
        """Return why the worker may not be started once more, or None if it may."""
        limits = self.limits
        if 0 <= limits.max_lifetime_restarts <= self.counts[worker]:
            return (
                f"{self.counts[worker]} of {limits.max_lifetime_restarts} in all "
                "(env_settings.max_lifetime_restarts)"
            )
        recent = self._times[worker]
        while recent and self._clock() - recent[0] > limits.restarts_rate_limit_period_s:
            recent.popleft()
        if 0 <= limits.restarts_rate_limit_n <= len(recent):
            return (
                f"{len(recent)} of {limits.restarts_rate_limit_n} in "
                f"{limits.restarts_rate_limit_period_s:g} s (env_settings.restarts_rate_limit_n)"
            )
        return None

    def spend(self, worker: int) -> int:
        """Count one more restart of the worker, and return its number from 1."""
        self._times[worker].append(self._clock())
        self.counts[worker] += 1
        return self.counts[worker]
