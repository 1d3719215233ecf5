"""What an environment's calls say, and what is wrong with them, for both transports."""

from __future__ import annotations

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
from pipeline.protocol import wire
from pipeline.protocol.generated.messages import ReceivedMessageProto, UnityMessageProto

OK, STOP = 200, 400
NO_GREETING = "a conversation begins with an environment's greeting: status 200, and what it is"
STOPPED = UnityMessageProto(header={"status": STOP}).SerializeToString()

_TIME_OUT = """\
The Unity environment took too long to respond ({seconds:g} s). Make sure that:
\t the environment does not need user interaction to launch
\t the agents' Behavior Parameters > Behavior Type is set to "Default"
\t the environment and the Python interface have compatible versions
\t on a machine without a display, the environment is a server build or runs with --no-graphics"""


def parse_call(request: bytes) -> ReceivedMessageProto:
    """Return the message in an environment's call.

    Raises:
        UnityCommunicatorStoppedException: It says that the environment stops.
        UnityCommunicationException: It is not a message of the protocol.
    """
    message = wire.parse(ReceivedMessageProto, request)
    if message.header.status != OK:
        raise UnityCommunicatorStoppedException("Communicator has exited.")
    return message


def may_own(request: bytes, *, has_begun: bool) -> bool:
    """Return whether a call may begin the conversation, or go on with it over a new connection."""
    try:
        message = parse_call(request)
    except (UnityCommunicationException, UnityCommunicatorStoppedException):
        return False
    return has_begun or message.unity_output.HasField("rl_initialization_output")


def begins_anew(request: bytes) -> bool:
    """Return whether a call that may own is a greeting; later ones announce behaviors alone."""
    return bool(parse_call(request).unity_output.rl_initialization_output.communication_version)


def time_out(seconds: float) -> UnityTimeOutException:
    """Return what to raise when no call came for `seconds`."""
    return UnityTimeOutException(_TIME_OUT.format(seconds=seconds))


def nothing_to_answer() -> UnityCommunicationException:
    """Return what to raise when a reply has no call."""
    return UnityCommunicationException(
        "the environment is still at work: wait for its message before sending another"
    )


def lost() -> UnityCommunicatorStoppedException:
    """Return what to raise when an environment broke its connection and did not come back."""
    return UnityCommunicatorStoppedException(
        "Communicator has exited: the environment closed its connection without a message."
    )
