"""Code that both transports share: reading an environment's calls and waiting for calls."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
from pipeline.wire.codec import records
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.records import Received

METHOD = "/communicator_objects.UnityToExternalProto/Exchange"
LOST_S = 2.0
"""Seconds in which an environment may connect again after its connection broke."""
_POLL_S = 0.2
# ML-Agents' status numbers in a message's header: the conversation continues, or ends.
OK, STOP = 200, 400
NO_GREETING = "the first call must be a greeting: status 200 and the description of the environment"
FOREIGN = "the trainer waits for the call of another process"
NO_CALL = "the environment is still at work: wait for its message before sending another reply"
# Both ends announce every capability, because an end does not use features that the other end has
# not announced.
CAPABILITIES = m.UnityRLCapabilitiesProto(
    **{feature.name: True for feature in m.UnityRLCapabilitiesProto.DESCRIPTOR.fields}
)
STOPPED = m.UnityMessageProto(header={"status": STOP}).SerializeToString()

_TIME_OUT = """\
The Unity environment took too long to respond ({seconds:g} s). Make sure that:
\t the environment does not need user interaction to launch
\t the agents' Behavior Parameters > Behavior Type is set to "Default"
\t the environment and the Python interface have compatible versions
\t on a machine without a display, the environment is a server build or runs with --no-graphics"""


def parse_call(request: Received) -> m.ReceivedMessageProto:
    """Return the message in an environment's call.

    Raises:
        UnityCommunicatorStoppedException: The message says that the environment stops.
        UnityCommunicationException: The call is not a message of the protocol.
    """
    message = records.parse(m.ReceivedMessageProto, request)
    if message.header.status != OK:
        raise UnityCommunicatorStoppedException("Communicator has exited.")
    return message


def can_start_or_resume(request: Received, *, has_begun: bool) -> bool:
    """Return whether a call may begin the conversation or continue it on a new connection."""
    try:
        message = parse_call(request)
    except (UnityCommunicationException, UnityCommunicatorStoppedException):
        return False
    return has_begun or message.unity_output.HasField("rl_initialization_output")


def is_handshake(request: Received) -> bool:
    """Return whether a call that `can_start_or_resume` accepts is a greeting, the first call."""
    return bool(parse_call(request).unity_output.rl_initialization_output.communication_version)


def time_out(seconds: float) -> UnityTimeOutException:
    """Return the exception for an environment that made no call for `seconds`."""
    return UnityTimeOutException(_TIME_OUT.format(seconds=seconds))


class CallServer(ABC):
    """The server side of the connection: the trainer answers the environment's calls."""

    port: int
    """The TCP port that the server listens on."""
    _lost_at: float | None = None
    """Time at which the environment's connection broke, by `time.monotonic`; None if it is open."""

    def receive(self, timeout_s: float, check: Callable[[], None]) -> m.ReceivedMessageProto:
        """Return the environment's next call.

        Args:
            timeout_s: longest wait.
            check: called every 0.2 s while waiting; raises if the environment has ended.

        Raises:
            UnityTimeOutException: No call came within `timeout_s`.
            UnityCommunicatorStoppedException: The environment stops, or its connection broke.
            UnityCommunicationException: The call is not a message of the protocol.
        """
        now = time.monotonic()
        # Waits are short, because `check` must notice the end of a silent process.
        deadline, next_check = now + timeout_s, now + _POLL_S
        while True:
            left = deadline - now
            request, is_idle = self._await_call(max(0.0, min(left, _POLL_S)), now)
            if request is not None:
                return parse_call(request)
            # `check` is also called while bytes arrive, because a call may never become complete.
            if is_idle or now >= next_check:
                next_check = now + _POLL_S
                check()
                # A client with a broken connection reconnects at once if it can, so a longer
                # absence means that it has ended.
                if self._lost_at is not None and time.monotonic() - self._lost_at > LOST_S:
                    raise UnityCommunicatorStoppedException(
                        "Communicator has exited: the environment closed its connection without a "
                        "message."
                    )
                if left <= 0:
                    raise time_out(timeout_s)
            now = time.monotonic()

    @abstractmethod
    def _await_call(self, wait_s: float, now: float) -> tuple[Received | None, bool]:
        """Return the next call, or None after `wait_s`; and True if no bytes arrived meanwhile."""

    @abstractmethod
    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, wait up to `wait_s` until it disconnects, free the port."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
