"""The conversation of an environment with its trainer.

The environment is the client: each of its calls carries a step's agents and blocks until the
trainer answers with actions, a reset, or the end. Messages are put together as bytes here, because
the arrays of a batch already are the bytes of the message but for their headers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from uuid import UUID

from pipeline.errors import UnityCommunicationException, UnityTimeOutException
from pipeline.protocol import side_channels, wire
from pipeline.protocol.actions import decode_actions
from pipeline.protocol.calls import CAPABILITIES, METHOD, OK, STOPPED
from pipeline.protocol.encoding import brain_parameters, compressed_steps_bytes, steps_bytes
from pipeline.protocol.generated import messages as m
from pipeline.protocol.http2 import Channel
from pipeline.protocol.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Controls, Sampler
from pipeline.protocol.simulator import Simulator, no_state, restore, state_of
from pipeline.protocol.specs import ActionTuple
from pipeline.protocol.state import Kind, decode, encode, message, read
from pipeline.protocol.steps import Steps

Exchange = Callable[..., m.ReceivedMessageProto]

_log = logging.getLogger(__name__)

COMMUNICATION_VERSION = "1.5.0"
PACKAGE_VERSION = "3.0.0"
"""The Unity package whose conventions are followed; major 3 means images are channels first."""
_ANY_NUMBER = 2**31

_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Python and NumPy raise for a state that does not fit where it is loaded."""
_RETRY_S, _GOODBYE_S, _HELLO_S = 0.05, 2.0, 120.0
_STATUS_OK = wire.delimited(1, b"\x08" + wire.varint(OK))


def converse(
    make: Callable[[int, int], Simulator],
    *,
    port: int,
    connect_timeout_s: float = 30.0,
    compress: bool = False,
) -> None:
    """Be the environment of the trainer on localhost:`port` until one of them ends it.

    Args:
        make: gives the simulator for a seed and a number of areas, both told by the trainer.
        port: where the trainer listens.
        connect_timeout_s: longest wait for it to listen.
        compress: send images as PNG. Images of more than three channels need several PNGs in one
            observation, so they stay numbers if the trainer does not say that it reads these.

    Raises:
        UnityTimeOutException: Nothing listens on the port, or it does not answer.
        UnityCommunicationException: The trainer is gone, or sent actions that do not fit.
    """
    channel = _connect(port, connect_timeout_s)
    try:

        def exchange(request: bytes, timeout_s: float | None = None) -> m.ReceivedMessageProto:
            answer = channel.call(request, timeout_s)
            return m.ReceivedMessageProto.FromString(answer)  # type: ignore[arg-type]  # bytes in its stubs

        # The environment speaks first; the answer has the seed of the simulator.
        hello = exchange(_hello(), _HELLO_S)
        if hello.header.status != OK:
            return
        start = hello.unity_input.rl_initialization_input
        _log.info(
            "Connected to a trainer with package version %s and communication version %s.",
            start.package_version,
            start.communication_version,
        )
        several = start.capabilities.concatenatedPngObservations
        channels = (_ANY_NUMBER if several else 3) if compress else 0
        # Trainers before num_areas leave it at 0.
        _play(partial(make, start.seed, max(1, start.num_areas)), exchange, channels)
    except TimeoutError as error:
        raise UnityTimeOutException(
            f"what listens on localhost:{port} did not answer within {_HELLO_S:g} s; check that "
            "--mlagents-port is the trainer's port."
        ) from error
    except ConnectionError as error:
        raise UnityCommunicationException(
            f"the connection to the trainer on port {port} is lost ({error}); the environment ends."
        ) from error
    finally:
        channel.close()


def _connect(port: int, timeout_s: float) -> Channel:
    """Connect as soon as the trainer listens."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Channel(port, METHOD)
        except OSError:
            if time.monotonic() > deadline:
                raise UnityTimeOutException(
                    f"no trainer listens on localhost:{port} (waited {timeout_s:g} s). Start the "
                    "trainer and let it start this program, or check --mlagents-port."
                ) from None
        time.sleep(_RETRY_S)


def _play(make: Callable[[], Simulator], exchange: Exchange, compressed_channels: int) -> None:
    try:
        with closing(make()) as simulator:
            Session(simulator, compressed_channels).run(exchange)
    except ConnectionError:  # a trainer that is gone needs no last message
        raise
    except Exception:
        _say_goodbye(exchange)
        raise


def _say_goodbye(exchange: Exchange) -> None:
    """Send the status with which an environment ends; the trainer may be gone already."""
    try:
        exchange(STOPPED, _GOODBYE_S)
    except (ConnectionError, TimeoutError):
        _log.debug("The trainer did not hear the goodbye.")


class Session:
    """One simulator's part of the conversation after the handshake.

    Images of up to `compressed_channels` channels are sent as PNG.
    """

    def __init__(self, simulator: Simulator, compressed_channels: int = 0) -> None:
        self._simulator = simulator
        self._specs = dict(simulator.behavior_specs)
        self._max_channels = compressed_channels
        self._announced: set[str] = set()
        self._controls = Controls(simulator)
        # How many agents of each behavior have asked for a decision; None before a reset.
        self._asking: dict[str, int] | None = None
        self._questions: list[tuple[Kind, bytes]] = []
        self._answers: list[tuple[UUID, bytes]] = []
        self._is_restored = False

    def run(self, exchange: Exchange) -> None:
        """Answer commands until the trainer ends the conversation."""
        # An empty step: the trainer decides when the first episode begins.
        reply = exchange(_STATUS_OK)
        while reply.header.status == OK:
            command = reply.unity_input.rl_input
            # Before the command, as in Unity: parameters count for this step already.
            if command.side_channel:
                self._hear(command.side_channel)
            if command.command == m.QUIT:
                _say_goodbye(exchange)
                return
            reply = exchange(self._advance(command))

    def _advance(self, command: m.ReceivedRLInputProto) -> bytes:
        restored, self._is_restored = self._is_restored, False
        if restored and command.command == m.RESET:
            return self._message({})  # the trainer knows what the agents saw
        # Before the simulator reads: a sampler draws anew for each message.
        self._controls.draw()
        # The first command begins episodes whatever it is, as Unity's first step does.
        if command.command == m.RESET or self._asking is None:
            steps = self._simulator.reset()
        else:
            steps = self._simulator.step(self._actions(command, self._asking))
        self._asking = {name: len(decisions.agent_id) for name, (decisions, _) in steps.items()}
        return self._message(steps)

    def _actions(
        self, command: m.ReceivedRLInputProto, asking: Mapping[str, int]
    ) -> dict[str, ActionTuple]:
        """Actions of every behavior's asking agents, zeros where the trainer sent none."""
        sent_actions = command.agent_actions
        actions = {}
        for name, n_agents in asking.items():
            spec = self._specs[name].action_spec
            if name not in sent_actions:
                actions[name] = spec.empty_action(n_agents)
                continue
            action = decode_actions(sent_actions[name], spec)
            if len(action.continuous) != n_agents:
                raise UnityCommunicationException(
                    f"{name}: the trainer sent actions for {len(action.continuous)} agents, but "
                    f"{n_agents} had asked for a decision."
                )
            actions[name] = action
        return actions

    def _message(self, steps: Mapping[str, Steps]) -> bytes:
        entries = []
        new = m.UnityRLInitializationOutputProto()
        for name, (decisions, terminals) in steps.items():
            spec = self._specs[name]
            images = [obs.shape for obs in spec.observation_specs if len(obs.shape) == 3]
            if any(shape[0] <= self._max_channels for shape in images):
                body = compressed_steps_bytes(decisions, terminals, spec, self._max_channels)
            else:
                body = steps_bytes(decisions, terminals, spec)
            # With its first agents, as a Unity player does.
            if body and name not in self._announced:
                self._announced.add(name)
                new.brain_parameters.append(brain_parameters(name, spec))
            # Lengths come before contents in protobuf, so parts are joined once, at the end.
            entries += _nested(2, [wire.delimited(1, name.encode()), wire.head(2, len(body)), body])
        frames: list[tuple[UUID, bytes]] = []
        for stat, value, aggregation in self._controls.take_stats():
            frame = side_channels.OutgoingMessage()
            frame.write_string(stat)
            frame.write_float32(value)
            frame.write_int32(aggregation)
            frames.append((side_channels.STATS, bytes(frame.buffer)))
        # A simulator can only tell whether it has a state now that episodes have begun.
        self._answer(Kind.CAN)
        frames += self._answers
        self._answers = []
        if frames:
            entries.append(wire.delimited(3, side_channels.pack(frames)))
        output = _nested(1, entries)
        if new.brain_parameters:
            output.append(wire.delimited(2, new.SerializeToString()))
        return b"".join([_STATUS_OK, *_nested(2, output)])

    def _hear(self, data: bytes) -> None:
        """Apply the side-channel messages that came with a command; skip all others."""
        for channel_id, payload in side_channels.unpack(data):
            if channel_id == side_channels.ENVIRONMENT_PARAMETERS:
                self._hear_parameter(side_channels.IncomingMessage(payload))
            elif channel_id == side_channels.ENGINE_CONFIGURATION:
                _log.debug("An engine setting is ignored: there is no engine.")
            elif channel_id == side_channels.STATE:
                self._questions.append(read(payload))
            else:
                _log.debug("A message on side channel %s is ignored.", channel_id)
        # Not at once: a parameter that stands later in the same message belongs to the state.
        self._answer(Kind.STATE, Kind.RESTORE, Kind.CANNOT)

    def _answer(self, *kinds: Kind) -> None:
        """Answer the questions of these kinds on the state side channel."""
        selected = [question for question in self._questions if question[0] in kinds]
        self._questions = [question for question in self._questions if question[0] not in kinds]
        for kind, content in selected:
            try:
                answer = self._state(kind, content)
            except _MISFITS as error:
                reason = f"{type(error).__name__}: {error}" if kind == Kind.RESTORE else str(error)
                answer = message(Kind.CANNOT, reason.encode())
            self._answers.append((side_channels.STATE, answer))

    def _state(self, kind: Kind, content: bytes) -> bytes:
        """Return the answer to a question about the state; restore `content` if asked to."""
        if kind == Kind.RESTORE:
            state = decode(content)
            restore(self._simulator, state["simulator"])
            self._controls.load_state_dict(state["controls"])
            self._asking = {name: int(n) for name, n in state["asking"].items()}
            self._is_restored = True
            return message(Kind.RESTORE)
        simulator_state = state_of(self._simulator)
        if simulator_state is None or kind == Kind.CANNOT:
            raise ValueError(no_state(self._simulator))
        state = {
            "simulator": simulator_state,
            "controls": self._controls.state_dict(),
            "asking": self._asking or {},
        }
        reply = message(Kind.STATE, encode(state))
        return reply if kind == Kind.STATE else message(Kind.CAN)

    def _hear_parameter(self, message: side_channels.IncomingMessage) -> None:
        name = message.read_string()
        if message.read_int32() == 0:
            self._controls.set_value(name, message.read_float32())
            return
        seed, kind = message.read_int32(), message.read_int32()
        if kind == MULTI_RANGE:
            values = message.read_float32_list()
        elif kind in (UNIFORM, GAUSSIAN):
            values = [message.read_float32(), message.read_float32()]
        else:
            _log.warning("Parameter '%s': sampler kind %d is unknown; ignored.", name, kind)
            return
        sampler = Sampler(kind=kind, values=tuple(values), seed=seed)
        self._controls.set_sampler(name, sampler)


def _hello() -> bytes:
    message = m.UnityMessageProto(header={"status": OK})
    output = message.unity_output.rl_initialization_output
    output.name = "AcademySingleton"
    output.communication_version = COMMUNICATION_VERSION
    output.package_version = PACKAGE_VERSION
    output.capabilities.CopyFrom(CAPABILITIES)
    return bytes(message.SerializeToString())


def _nested(number: int, parts: list[bytes]) -> list[bytes]:
    """`parts` as the content of field `number`, not yet joined."""
    return [wire.head(number, sum(map(len, parts))), *parts]
