"""Side channels: messages that user code and the environment exchange together with the steps.

Training analytics are Unity's telemetry; this project does not send them.
"""

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.errors import (
    UnityCommunicationException,
    UnityEnvironmentException,
    UnitySideChannelException,
    brief,
)
from pipeline.wire.channels import side_channels as wire
from pipeline.wire.channels import state as codec
from pipeline.wire.channels.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Sampler
from pipeline.wire.channels.side_channels import STATE, IncomingMessage, OutgoingMessage, written
from pipeline.wire.channels.state import StateMessageType

_log = logging.getLogger(__name__)

# Largest number of statistics, and of properties, that an environment may send: each name uses
# memory until the end of the run.
MAX_NAMES = 10_000
# Largest number of unknown channels that are warned about. The environment chooses their ids, so
# there may be any number of them.
_MAX_WARNINGS = 10


class SideChannel(ABC):
    """Base class of side channels; the trainer and the environment know a channel by its id."""

    def __init__(self, channel_id: uuid.UUID) -> None:
        self._channel_id = channel_id
        self.message_queue: list[bytes] = []

    @property
    def channel_id(self) -> uuid.UUID:
        """Id of the channel, which both ends use."""
        return self._channel_id

    def queue_message_to_send(self, msg: OutgoingMessage) -> None:
        """Send `msg` with the next step or reset."""
        # The bytes are copied, because the caller may append to its message later.
        self.message_queue.append(bytes(msg.buffer))

    @abstractmethod
    def on_message_received(self, msg: IncomingMessage) -> None:
        """Handle a message from the environment."""


Channel = TypeVar("Channel", bound=SideChannel)


class SideChannelManager:
    """All channels of one environment."""

    def __init__(self, channels: Sequence[SideChannel] = ()) -> None:
        self._channels: dict[uuid.UUID, SideChannel] = {}
        self._unknown: set[uuid.UUID] = set()
        for channel in channels:
            if channel.channel_id in self._channels:
                raise UnityEnvironmentException(
                    f"There cannot be two side channels with the same channel id "
                    f"{channel.channel_id}."
                )
            self._channels[channel.channel_id] = channel

    def of_kind(self, kind: type[Channel]) -> Channel | None:
        """Return the first channel of a class; None if there is none."""
        return next((c for c in self._channels.values() if isinstance(c, kind)), None)

    def outgoing(self) -> bytes:
        """Return the bytes of all queued messages, channel by channel; empty the queues."""
        frames = []
        for channel in self._channels.values():
            if channel.message_queue:
                frames += [(channel.channel_id, data) for data in channel.message_queue]
                channel.message_queue.clear()
        # Without messages there are no bytes, so that the other end decodes nothing.
        return wire.pack(frames) if frames else b""

    def deliver(self, data: bytes) -> None:
        """Pass received messages to their channels; warn once about each unknown channel."""
        for channel_id, payload in wire.unpack(data) if data else ():
            channel = self._channels.get(channel_id)
            if channel is not None:
                channel.on_message_received(IncomingMessage(payload))
            elif channel_id not in self._unknown and len(self._unknown) < _MAX_WARNINGS:
                # There is one warning for each channel, because Unity packages may send messages to
                # other channels in every step.
                self._unknown.add(channel_id)
                _log.warning("Unknown side channel data received. Channel type: %s.", channel_id)


class _SendOnlyChannel(SideChannel):
    def on_message_received(self, msg: IncomingMessage) -> None:
        """Raise UnityCommunicationException: the environment never sends on this channel."""
        raise UnityCommunicationException(
            f"The environment sent {len(msg.buffer)} bytes to {type(self).__name__}, "
            "which only sends."
        )


class EngineConfig(NamedTuple):
    """Settings of the environment's engine; None leaves a setting unchanged."""

    width: int | None
    height: int | None
    quality_level: int | None
    time_scale: float | None
    # Frames per second: `target_frame_rate` of real time (-1: no limit), `capture_frame_rate` of
    # simulated time.
    target_frame_rate: int | None
    capture_frame_rate: int | None

    @staticmethod
    def default_config() -> "EngineConfig":
        """Return settings for training: a small window, high speed and no frame limit."""
        # These are the values of ML-Agents' Python API; `mlagents-learn` has other values.
        return EngineConfig(80, 80, 1, 20.0, -1, 60)


class EngineConfigurationChannel(_SendOnlyChannel):
    """Sets the window size, quality and speed of the environment's engine."""

    def __init__(self) -> None:
        super().__init__(wire.ENGINE_CONFIGURATION)

    def set_configuration_parameters(
        self,
        width: int | None = None,
        height: int | None = None,
        quality_level: int | None = None,
        time_scale: float | None = None,
        target_frame_rate: int | None = None,
        capture_frame_rate: int | None = None,
    ) -> None:
        """Change the given settings of the environment's engine.

        Raises:
            UnitySideChannelException: Only one of width and height is given.
        """
        # The engine has one message for both sizes.
        if (width is None) != (height is None):
            raise UnitySideChannelException(
                f"You cannot set the width/height of the screen resolution without also setting "
                f"the height/width (width={width}, height={height})."
            )
        if width is not None and height is not None:
            self.queue_message_to_send(written(0, width, height))
        scale = None if time_scale is None else float(time_scale)
        settings = (quality_level, scale, target_frame_rate, capture_frame_rate)
        # The engine numbers the messages of these four settings 1 to 4, in this order; message 0
        # sets the window's size.
        for kind, value in enumerate(settings, 1):
            if value is not None:
                self.queue_message_to_send(written(kind, value))

    def set_configuration(self, config: EngineConfig) -> None:
        """Change all settings that `config` gives."""
        self.set_configuration_parameters(**config._asdict())


class EnvironmentParametersChannel(_SendOnlyChannel):
    """Sets numbers that the environment reads by name, fixed or drawn at each reading."""

    def __init__(self) -> None:
        super().__init__(wire.ENVIRONMENT_PARAMETERS)

    def set_float_parameter(self, key: str, value: float) -> None:
        """Give a parameter a fixed value."""
        self.set_parameter(key, value)

    def set_uniform_sampler_parameters(
        self, key: str, min_value: float, max_value: float, seed: int
    ) -> None:
        """Let the environment draw a parameter uniformly from [min_value, max_value]."""
        self.set_parameter(key, Sampler(kind=UNIFORM, values=(min_value, max_value), seed=seed))

    def set_gaussian_sampler_parameters(
        self, key: str, mean: float, st_dev: float, seed: int
    ) -> None:
        """Let the environment draw a parameter from a normal distribution."""
        self.set_parameter(key, Sampler(kind=GAUSSIAN, values=(mean, st_dev), seed=seed))

    def set_multirangeuniform_sampler_parameters(
        self, key: str, intervals: Sequence[tuple[float, float]], seed: int
    ) -> None:
        """Let the environment draw a parameter uniformly from the union of `intervals`."""
        ends = tuple(end for interval in intervals for end in interval)
        self.set_parameter(key, Sampler(kind=MULTI_RANGE, values=ends, seed=seed))

    def set_parameter(self, key: str, value: float | Sampler) -> None:
        """Give a parameter a fixed value, or let the environment draw it at each reading."""
        # The number after the name says what follows: 0 a value, 1 a sampler.
        if not isinstance(value, Sampler):
            self.queue_message_to_send(written(key, 0, float(value)))
            return
        # The seed is wrapped, because messages have int32.
        seed = (value.seed + 2**31) % 2**32 - 2**31
        count = [len(value.values)] if value.kind == MULTI_RANGE else []
        numbers = map(float, value.values)
        self.queue_message_to_send(written(key, 1, seed, value.kind, *count, *numbers))


class StatsAggregationMethod(IntEnum):
    """How the values of a statistic are combined into one value."""

    AVERAGE = 0
    MOST_RECENT = 1
    SUM = 2
    HISTOGRAM = 3


# Values of each statistic, by the statistic's name, each with its method of aggregation.
Stats = dict[str, list[tuple[float, StatsAggregationMethod]]]
_METHODS = {int(method): method for method in StatsAggregationMethod}


def aggregation_of(name: str, number: int) -> StatsAggregationMethod:
    """Return the aggregation method `number`; raise UnitySideChannelException if it is unknown."""
    method = _METHODS.get(number)
    if method is None:
        known = ", ".join(f"{member.value} {member.name}" for member in StatsAggregationMethod)
        raise UnitySideChannelException(
            f"the environment's statistic {brief(name)} has the aggregation method {number}; "
            f"known methods are {known}: use one of them"
        )
    return method


def check_names(names: Sized, name: str, kind: str) -> None:
    """Raise UnitySideChannelException if an environment has sent too many names."""
    if len(names) > MAX_NAMES:
        raise UnitySideChannelException(
            f"the environment has sent more than {MAX_NAMES} {kind} with different names, the last "
            f"name is {brief(name)!r}: use fixed names, without numbers that change"
        )


class StatsSideChannel(SideChannel):
    """Receives the statistics that the environment records."""

    def __init__(self) -> None:
        super().__init__(wire.STATS)
        self.stats: Stats = {}
        self._names: set[str] = set()

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Store one value of a statistic; the errors are those of `add`."""
        key = msg.read_string()
        self.add(key, msg.read_float32(), msg.read_int32())

    def add(self, key: str, value: float, number: int) -> None:
        """Store one value of the statistic `key` with the aggregation method of this number.

        Raises:
            UnitySideChannelException: The method is unknown, or there are too many statistics.
        """
        method = aggregation_of(key, number)
        if key not in self._names:
            self._names.add(key)
            check_names(self._names, key, "statistics")
        self.stats.setdefault(key, []).append((value, method))

    def get_and_reset_stats(self) -> Stats:
        """Return all values of each statistic since the last call, by name."""
        stats, self.stats = self.stats, {}
        return stats


class FloatPropertiesChannel(SideChannel):
    """Exchanges named numbers, which both ends may set."""

    def __init__(self, channel_id: uuid.UUID | None = None) -> None:
        super().__init__(channel_id or wire.FLOAT_PROPERTIES)
        self._properties: dict[str, float] = {}

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Store one received property."""
        key = msg.read_string()
        self._properties[key] = msg.read_float32()
        check_names(self._properties, key, "properties")

    def set_property(self, key: str, value: float) -> None:
        """Set a property on both ends."""
        self._properties[key] = value
        self.queue_message_to_send(written(key, float(value)))

    def get_property(self, key: str) -> float | None:
        """Return a property's value; None if neither end has set it."""
        return self._properties.get(key)

    def list_properties(self) -> list[str]:
        """Return the names of all properties."""
        return list(self._properties)

    def get_property_dict_copy(self) -> dict[str, float]:
        """Return a copy of all properties, by name."""
        return dict(self._properties)


class RawBytesChannel(SideChannel):
    """Exchanges bytes with a meaning that both ends must know."""

    def __init__(self, channel_id: uuid.UUID) -> None:
        super().__init__(channel_id)
        self._received: list[bytes] = []

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Store one received message."""
        self._received.append(msg.get_raw_bytes())

    def get_and_clear_received_messages(self) -> list[bytes]:
        """Return all messages that were received since the last call."""
        received, self._received = self._received, []
        return received

    def send_raw_data(self, data: bytes | bytearray) -> None:
        """Send bytes with the next step or reset."""
        msg = OutgoingMessage()
        msg.set_raw_bytes(data)
        self.queue_message_to_send(msg)


_NOT_ANSWERED = (
    "the environment does not support the state side channel (docs/explanation/resume.md)"
)
# Largest size in bytes of all recorded messages. If they become larger, they are dropped, and no
# replay is possible until the next state.
_MAX_RECORDED_BYTES = 64_000_000


class StateChannel(SideChannel):
    """Asks an environment for its state, and records messages for a replay after a failure.

    The last state and the messages since then reproduce the present state of the environment.
    Register this channel after channels that change the environment, so that a state includes their
    changes.

    Attributes:
        refusal: reason why the environment does not give its state; None if it does.
        state: the last received state, as `take` returns it; None before the first state.
        has_first: whether `messages` begins with the first message that was sent, so that an
            environment with the same seed can replay the messages without a state.
        messages: messages since `state`, oldest first; the last message may have no answer yet.
    """

    def __init__(self) -> None:
        super().__init__(STATE)
        # An environment without the channel never answers, so a refusal is assumed.
        self.refusal: str | None = _NOT_ANSWERED
        self.state: Mapping[str, Any] | None = None
        self.has_first = True
        self.messages: list[bytes] = []
        self._n_bytes = 0
        self._asked_at: int | None = None  # number of messages before the request
        self._extra: Mapping[str, Any] = {}
        self._answer: dict[str, Any] | None = None
        self._is_restored = False
        self._send(StateMessageType.CAN)

    def sent(self, message: bytes) -> None:
        """Record a message for a replay."""
        # The first message, a reset, is always recorded, because a state can be requested only
        # after a reset. If no state was requested before the second message, recording ends.
        if self.state is None and self._asked_at is None and (self.messages or not self.has_first):
            self.give_up()
            return
        self.messages.append(message)
        # Without a limit, a run without checkpoints would take more and more memory.
        self._n_bytes += len(message)
        if self._n_bytes > _MAX_RECORDED_BYTES:
            self.give_up()

    def give_up(self) -> None:
        """Drop state and messages: no replay is possible until the next state is received."""
        self.state, self._asked_at, self.has_first = None, None, False
        self.messages, self._n_bytes = [], 0

    def know(self, state: Mapping[str, Any]) -> None:
        """Store a received state, and drop the messages that were sent before it was requested."""
        if self._asked_at is not None:
            self.state, self.has_first = state, False
            # A replay begins at the request, so earlier messages are not needed.
            del self.messages[: self._asked_at]
            self._asked_at = None
            self._n_bytes = sum(map(len, self.messages))

    def ask(self, kept: Mapping[str, Any]) -> None:
        """Request the environment's state before the next step, if the environment gives its state.

        `take` returns the state together with the entries of `kept`.
        """
        if self.refusal is not None:
            if self.state is None:  # the environment has never given its state
                self.give_up()
            return
        self._extra, self._answer = kept, None
        self._asked_at = len(self.messages)
        self._send(StateMessageType.STATE)

    def take(self) -> dict[str, Any] | None:
        """Return the state that the last `ask` requested, with the entries of `kept`.

        Return None before the state arrives, and at a second call.
        """
        answer, self._answer = self._answer, None
        return answer

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Send a state from `take` with the next reset, which then begins no episodes."""
        self._is_restored = False
        self._send(StateMessageType.RESTORE, saved["environment"].tobytes())

    def check_restored(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError, with the reason, if the environment has not restored the state."""
        if not self._is_restored:
            raise ValueError(self.refusal or "the environment has not restored its state")
        # The state is stored as if it had been requested now, because it includes the effects of
        # all messages.
        self._asked_at = len(self.messages)
        self.know(saved)

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Handle an answer to a request; the answer may have any `StateMessageType`."""
        kind, content = codec.read(msg.get_raw_bytes())
        if kind == StateMessageType.CAN:
            self.refusal = None
        elif kind == StateMessageType.STATE:
            # The bytes become an array, because checkpoints can have plain values and arrays only.
            data = np.frombuffer(content, dtype=np.uint8).copy()
            self._answer = {"environment": data, **self._extra}
            self.know(self._answer)
        elif kind == StateMessageType.RESTORE:
            self._is_restored = True
        else:
            # The text is shortened, because messages quote it and another process chose it.
            self.refusal = content.decode(errors="replace")[:1000]

    def _send(self, kind: StateMessageType, content: bytes = b"") -> None:
        self.message_queue.append(codec.message(kind, content))
