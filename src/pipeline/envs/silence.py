"""Says when an environment goes on for long without asking for a decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from pipeline.errors import brief
from pipeline.protocol.steps import Steps

_log = logging.getLogger(__name__)

FIRST_S, FIRST_EXCHANGES = 30.0, 10_000
"""Seconds of waiting, and messages without a decision, after which a line says so."""
_LONGER = 10
"""How many times longer a silence must last before the line comes again."""
_REMEDY = (
    "The wait ends when an agent asks: in Unity each agent needs a Decision Requester (or calls "
    'RequestDecision) and the Behavior Type "Default", and agents that end must appear again'
)


class SilenceWatch:
    """Counts the messages of one environment in which no agent asks for a decision.

    Args:
        name: of the environment, for the line.
        last_sent: describes the environment's last message, for the line.
        clock: gives seconds.

    Attributes:
        is_on: whether a silence is counted. While agents ask, callers read nothing else.
    """

    def __init__(
        self,
        name: str,
        last_sent: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._last_sent = last_sent
        self._clock = clock
        self.end()

    def end(self) -> None:
        """Forget the silence: an agent has asked, or all episodes begin again."""
        self.is_on = False
        self._n_exchanges, self._waited_s, self._next = 0, 0.0, 1.0
        self._since: float | None = None

    def count(self) -> None:
        """Count a message in which no agent asks; the wait for the next message begins."""
        self._n_exchanges += 1
        self.check()

    def begin_wait(self) -> None:
        """Measure the waiting time from now on."""
        self._since = self._clock()

    def end_wait(self) -> None:
        """Add the time since `begin_wait`, if a wait has begun."""
        if self._since is not None:
            self._waited_s += self._clock() - self._since
        self._since = None

    def check(self) -> None:
        """Write the line if it is due; to be called now and then during a wait, too."""
        self.is_on = True
        self.end_wait()
        self.begin_wait()
        length = max(self._waited_s / FIRST_S, self._n_exchanges / FIRST_EXCHANGES)
        if length < self._next:
            return
        self._next = _LONGER * length
        _log.warning(
            "%s: no agent has asked for a decision in %d messages and %.0f s of waiting; %s. %s",
            self.name,
            self._n_exchanges,
            self._waited_s,
            self._last_sent(),
            _REMEDY,
        )


def last_message(steps: Mapping[str, Steps], known: Iterable[str]) -> str:
    """Describe an environment's last message, given each behavior's agents in it."""
    waiting = {name: len(decision) for name, (decision, _) in steps.items() if len(decision)}
    if waiting:
        return f"it has not answered the actions of {_counts(waiting)}"
    ended = {name: len(terminal) for name, (_, terminal) in steps.items() if len(terminal)}
    if ended:
        return f"its last message has ended agents only: {_counts(ended)}"
    if names := sorted(known):
        return f"its last message has no agents of its behaviors {brief(names)}"
    return "it has announced no behavior"


def _counts(agents: Mapping[str, int]) -> str:
    return brief(", ".join(f"{number} of {name}" for name, number in agents.items()))
