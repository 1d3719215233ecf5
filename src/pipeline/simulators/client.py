"""The simulator's end of the conversation with the trainer.

The simulator is the client: each of its calls carries a step's agents and blocks until the trainer
answers with actions, a reset, or the end. Messages are put together as bytes, because the arrays of
a batch are the bytes of the message except for headers.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from uuid import UUID

from pipeline.core.simulator import Simulator, no_state, restore, state_of
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import Steps
from pipeline.errors import UnityCommunicationException, UnityTimeOutException
from pipeline.wire.channels import side_channels
from pipeline.wire.channels.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Controls, Sampler
from pipeline.wire.channels.state import StateMessageType, decode, encode, message, read
from pipeline.wire.codec import records
from pipeline.wire.codec.actions import decode_actions
from pipeline.wire.codec.encoding import brain_parameters, compressed_steps_bytes, steps_bytes
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.transport.calls import CAPABILITIES, METHOD, OK, STOPPED
from pipeline.wire.transport.http2 import Channel

Exchange = Callable[..., m.ReceivedMessageProto]

_log = logging.getLogger(__name__)

COMMUNICATION_VERSION = "1.5.0"
PACKAGE_VERSION = "3.0.0"
"""Version of the Unity package that the simulator reports; since major version 3 images are
channels first.
"""
# More channels than any image has, for trainers that read images of several PNGs.
_ANY_NUMBER = 2**31

# Errors of Python and NumPy when a state does not fit the simulator that restores it.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Seconds between attempts to connect, and longest waits for the answers to the end message and to
# the greeting.
_RETRY_S, _END_S, _GREETING_S = 0.05, 2.0, 120.0
_STATUS_OK = records.delimited(1, b"\x08" + records.varint(OK))


def converse(
    make: Callable[[int, int], Simulator],
    *,
    port: int,
    connect_timeout_s: float = 30.0,
    compress: bool = False,
    report: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Run a simulator for the trainer on localhost:`port` until one of them ends the conversation.

    Args:
        make: returns the simulator for a seed and a number of areas, both sent by the trainer.
        port: TCP port that the trainer listens on.
        connect_timeout_s: longest wait until the trainer listens.
        compress: send images as PNG. Images of more than three channels need several PNGs in one
            observation; they stay uncompressed unless the trainer claims to read several PNGs.
        report: called with an error of the simulator before the trainer hears of the end.

    Raises:
        UnityTimeOutException: No trainer listens on the port, or it does not answer.
        UnityCommunicationException: The trainer is gone, or sent actions that do not fit.
    """
    channel = _connect(port, connect_timeout_s)
    try:

        def exchange(request: bytes, timeout_s: float | None = None) -> m.ReceivedMessageProto:
            answer = channel.call(request, timeout_s)
            return m.ReceivedMessageProto.FromString(answer)  # type: ignore[arg-type]  # bytes in its stubs

        # The environment speaks first; the answer has the seed of the simulator.
        answer = exchange(_greeting(), _GREETING_S)
        if answer.header.status != OK:
            return
        start = answer.unity_input.rl_initialization_input
        _log.info(
            "Connected to a trainer with package version %s and communication version %s.",
            start.package_version,
            start.communication_version,
        )
        several = start.capabilities.concatenatedPngObservations
        channels = (_ANY_NUMBER if several else 3) if compress else 0
        # Trainers of versions without num_areas leave the field at 0.
        _play(partial(make, start.seed, max(1, start.num_areas)), exchange, channels, report)
    except TimeoutError as error:
        raise UnityTimeOutException(
            f"the process that listens on localhost:{port} did not answer within {_GREETING_S:g} "
            "s; check that --mlagents-port is the trainer's port."
        ) from error
    except ConnectionError as error:
        raise UnityCommunicationException(
            f"the connection to the trainer on port {port} is lost ({error}); the environment ends."
        ) from error
    finally:
        channel.close()


def _connect(port: int, timeout_s: float) -> Channel:
    """Connect as soon as the trainer listens; raise UnityTimeOutException after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Channel(port, METHOD)
        except OSError:
            if time.monotonic() > deadline:
                raise UnityTimeOutException(
                    f"no trainer listens on localhost:{port} (waited {timeout_s:g} s). Start the "
                    "trainer and let it start this executable, or check --mlagents-port."
                ) from None
        time.sleep(_RETRY_S)


def _play(
    make: Callable[[], Simulator],
    exchange: Exchange,
    compressed_channels: int,
    report: Callable[[Exception], None],
) -> None:
    try:
        with closing(make()) as simulator:
            Session(simulator, compressed_channels).run(exchange)
    except ConnectionError:  # the trainer is gone: there is nobody to send the end to
        raise
    except Exception as error:
        report(error)
        _send_end(exchange)
        raise


def _send_end(exchange: Exchange) -> None:
    try:
        exchange(STOPPED, _END_S)
    except (ConnectionError, TimeoutError):
        _log.debug("The trainer did not receive the end of the conversation.")


class Session:
    """Answers the trainer's commands for one simulator, after the handshake.

    Images of up to `compressed_channels` channels are sent as PNG.
    """

    def __init__(self, simulator: Simulator, compressed_channels: int = 0) -> None:
        self._simulator = simulator
        self._specs = dict(simulator.behavior_specs)
        self._max_channels = compressed_channels
        self._announced: set[str] = set()
        self._controls = Controls(simulator)
        # Number of agents of each behavior that asked for a decision; None before a reset.
        self._n_asking: dict[str, int] | None = None
        self._requests: list[tuple[StateMessageType, bytes]] = []
        self._answers: list[tuple[UUID, bytes]] = []
        self._is_restored = False

    def run(self, exchange: Exchange) -> None:
        """Answer commands until the trainer ends the conversation."""
        # The first message has no agents: the trainer decides when the first episode begins.
        reply = exchange(_STATUS_OK)
        while reply.header.status == OK:
            command = reply.unity_input.rl_input
            # Side channels are read before the command, as in Unity: new parameters are valid for
            # this step.
            if command.side_channel:
                self._receive(command.side_channel)
            if command.command == m.QUIT:
                _send_end(exchange)
                return
            reply = exchange(self._advance(command))

    def _advance(self, command: m.ReceivedRLInputProto) -> bytes:
        restored, self._is_restored = self._is_restored, False
        if restored and command.command == m.RESET:
            return self._message({})  # the trainer has the agents' observations in its checkpoint
        self._controls.draw()
        # The first command begins episodes even if it is a step, as in Unity.
        if command.command == m.RESET or self._n_asking is None:
            steps = self._simulator.reset()
        else:
            steps = self._simulator.step(self._actions(command, self._n_asking))
        self._n_asking = {name: len(decisions.agent_id) for name, (decisions, _) in steps.items()}
        return self._message(steps)

    def _actions(
        self, command: m.ReceivedRLInputProto, asking: Mapping[str, int]
    ) -> dict[str, ActionTuple]:
        """Return the agents' actions by behavior; zeros for a behavior that the command lacks."""
        actions = {}
        # The simulator expects actions for exactly the agents that asked, in the same order.
        for name, n_agents in asking.items():
            spec = self._specs[name].action_spec
            if name not in command.agent_actions:
                actions[name] = spec.empty_action(n_agents)
                continue
            action = decode_actions(command.agent_actions[name], spec)
            # Actions have no ids: they belong to agents by their order only.
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
            # A behavior is announced together with its first agents, as in Unity.
            if body and name not in self._announced:
                self._announced.add(name)
                new.brain_parameters.append(brain_parameters(name, spec))
            # In protobuf a length precedes its content, so parts are joined once, at the end. An
            # entry of the map `agentInfos`, which is field 2 of UnityRLOutputProto, has the name as
            # field 1 and the list of agents as field 2.
            entries += _nested(
                2, [records.delimited(1, name.encode()), records.head(2, len(body)), body]
            )
        frames: list[tuple[UUID, bytes]] = []
        for stat, value, method in self._controls.take_stats():
            content = side_channels.written(stat, float(value), method)
            frames.append((side_channels.STATS, bytes(content.buffer)))
        # A CAN request is answered now: a simulator may give its state only after episodes have
        # begun.
        self._answer(StateMessageType.CAN)
        frames += self._answers
        self._answers = []
        if frames:
            # Field 3 of UnityRLOutputProto has the messages of all side channels.
            entries.append(records.delimited(3, side_channels.pack(frames)))
        # UnityOutputProto has the steps as field 1 and newly announced behaviors as field 2.
        output = _nested(1, entries)
        if new.brain_parameters:
            output.append(records.delimited(2, new.SerializeToString()))
        return b"".join([_STATUS_OK, *_nested(2, output)])

    def _receive(self, data: bytes) -> None:
        for channel_id, payload in side_channels.unpack(data):
            if channel_id == side_channels.ENVIRONMENT_PARAMETERS:
                self._set_parameter(side_channels.IncomingMessage(payload))
            elif channel_id == side_channels.STATE:
                self._requests.append(read(payload))
            else:  # such as the engine's settings, because there is no engine
                _log.debug("A message on side channel %s is ignored.", channel_id)
        # Requests about the state are answered last, because the state must include parameters that
        # come later in the same message.
        self._answer(StateMessageType.STATE, StateMessageType.RESTORE, StateMessageType.CANNOT)

    def _answer(self, *kinds: StateMessageType) -> None:
        selected = [request for request in self._requests if request[0] in kinds]
        self._requests = [request for request in self._requests if request[0] not in kinds]
        for kind, content in selected:
            try:
                answer = self._state(kind, content)
            except _MISFITS as error:
                reason = str(error)
                if kind == StateMessageType.RESTORE:
                    reason = f"{type(error).__name__}: {error}"
                answer = message(StateMessageType.CANNOT, reason.encode())
            self._answers.append((side_channels.STATE, answer))

    def _state(self, kind: StateMessageType, content: bytes) -> bytes:
        """Return the answer to a state request; a RESTORE request restores `content`."""
        if kind == StateMessageType.RESTORE:
            state = decode(content)
            restore(self._simulator, state["simulator"])
            self._controls.load_state_dict(state["controls"])
            # The first actions after a restore are checked against these numbers of agents.
            self._n_asking = {name: int(n) for name, n in state["asking"].items()}
            self._is_restored = True
            return message(StateMessageType.RESTORE)
        simulator_state = state_of(self._simulator)
        # A trainer never sends CANNOT; if one does, it gets a refusal.
        if simulator_state is None or kind == StateMessageType.CANNOT:
            raise ValueError(no_state(self._simulator))
        state = {
            "simulator": simulator_state,
            "controls": self._controls.state_dict(),
            "asking": self._n_asking or {},
        }
        reply = message(StateMessageType.STATE, encode(state))
        return reply if kind == StateMessageType.STATE else message(StateMessageType.CAN)

    def _set_parameter(self, message: side_channels.IncomingMessage) -> None:
        # ML-Agents' layout: the name, 0 for a number or 1 for a sampler, and the sampler's fields.
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
            _log.warning("Parameter '%s' is not set: the sampler type %d is unknown.", name, kind)
            return
        self._controls.set_sampler(name, Sampler(kind=kind, values=tuple(values), seed=seed))


def _greeting() -> bytes:
    message = m.UnityMessageProto(header={"status": OK})
    output = message.unity_output.rl_initialization_output
    # The name that Unity's Academy sends.
    output.name = "AcademySingleton"
    output.communication_version = COMMUNICATION_VERSION
    output.package_version = PACKAGE_VERSION
    output.capabilities.CopyFrom(CAPABILITIES)
    return bytes(message.SerializeToString())


def _nested(number: int, parts: list[bytes]) -> list[bytes]:
    """Return the bytes of the length-delimited field `number`: its header, then `parts`."""
    return [records.head(number, sum(map(len, parts))), *parts]
