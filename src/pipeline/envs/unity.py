"""Drive a Unity environment, or any program that speaks the protocol."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.envs import launch
from pipeline.envs.base import Stats, StoredStepsEnv, last_message
from pipeline.envs.side_channels import (
    EnvironmentParametersChannel,
    SideChannel,
    SideChannelManager,
    StateChannel,
    StatsSideChannel,
)
from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)
from pipeline.protocol import wire
from pipeline.protocol.actions import actions_bytes
from pipeline.protocol.calls import CAPABILITIES, OK
from pipeline.protocol.decoding import behavior_spec_from
from pipeline.protocol.generated import messages as m
from pipeline.protocol.layout_cache import Decoder
from pipeline.protocol.parameters import Sampler
from pipeline.protocol.peers import PeerCheck
from pipeline.protocol.server import AnyServer
from pipeline.protocol.specs import check_behaviors, refuse_other_spec
from pipeline.protocol.steps import no_agents, same_steps

_log = logging.getLogger(__name__)

_HANG_UP_S, _HURRY_S = 1.0, 0.2
_TRIM_EVERY = 256
CONVERSATION_ERRORS = (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
"""The reason of these errors is in what the environment has printed."""
_MAX_WARNINGS = 10


class UnityEnvironment(StoredStepsEnv):
    """An environment in another process, or in the Unity Editor.

    `step` and `reset` may be split into two halves, so that several work at the same time.

    Attributes:
        academy_capabilities: what the environment's package can do.
        port: the TCP port of the conversation.
    """

    API_VERSION = "1.5.0"
    PACKAGE_VERSION = "1.1.0"  # of the `mlagents_envs` whose behavior this follows
    DEFAULT_EDITOR_PORT = launch.EDITOR_PORT
    BASE_ENVIRONMENT_PORT = 5005

    def __init__(
        self,
        file_name: str | Path | None = None,
        worker_id: int = 0,
        base_port: int | None = None,
        seed: int = 0,
        no_graphics: bool = False,
        no_graphics_monitor: bool = False,
        timeout_wait: float = 60,
        additional_args: Sequence[str] | None = None,
        side_channels: Sequence[SideChannel] | None = None,
        log_folder: str | Path | None = None,
        num_areas: int = 1,
        *,
        connect: bool = True,
        transport: str | None = None,
        server: AnyServer | None = None,
    ) -> None:
        """Launch the environment and wait for its first calls.

        Args:
            file_name: executable; None waits for Play in the Unity Editor.
            worker_id: added to `base_port`; 0 without `file_name`.
            base_port: TCP port of worker 0. None: a free one that the system chooses, or 5004
                without `file_name`.
            seed: of the environment's randomness.
            no_graphics: run without a display.
            no_graphics_monitor: the same, except for worker 0.
            timeout_wait: seconds to wait for each message.
            additional_args: for the executable.
            side_channels: at most one of each id.
            log_folder: absolute; the player's log `Player-<worker>.log` is written there.
            num_areas: training areas that the environment makes, if it replicates them.
            connect: False launches only; call `connect` before anything else.
            transport: "sockets" or "grpc", the general gRPC runtime; None means what the
                environment variable PIPELINE_TRANSPORT says, "sockets" if nothing.
            server: a server that listens already, and goes on when this is closed; without
                `file_name`.

        Raises:
            UnityWorkerInUseException: The port is taken.
            UnityTimeOutException: The environment did not call in time.
            UnityEnvironmentException: It cannot be launched, ended, or has another version.
        """
        super().__init__()
        if file_name is None and worker_id != 0:
            raise UnityEnvironmentException(
                "If the environment name is None, the worker-id must be 0 in order to connect with "
                f"the Editor; it is {worker_id}."
            )
        self.academy_capabilities = m.UnityRLCapabilitiesProto()
        self._use(SideChannelManager(side_channels or ()))
        self._timeout_s = timeout_wait
        self._seed, self._num_areas = seed, num_areas
        self._process: launch.EnvironmentProcess | None = None
        self._n_waits = 0
        self._decoders: dict[str, Decoder] = {}
        self._announced: dict[str, m.BrainParametersProto] = {}
        self._unannounced: set[str] = set()
        self._failed = False
        executable = None if file_name is None else launch.find_executable(file_name)
        self._is_attached = server is not None
        peers = PeerCheck(is_started_here=executable is not None)
        self._server = server or launch.listening(
            executable, base_port, worker_id, transport=transport, peers=peers
        )
        self.port = self._server.port
        name = "the environment" if executable is None else f"{executable.name}, worker {worker_id}"
        self.silence.name = f"{name} on port {self.port}"
        atexit.register(self._shut_down, 0.0)  # no orphan, also when nobody closes it
        try:
            if server is None and executable is None:
                _log.info(launch.PRESS_PLAY, self.port)
            elif executable is not None:
                log = Path(log_folder) / f"Player-{worker_id}.log" if log_folder else None
                arguments = launch.command_line(
                    executable,
                    port=self.port,
                    no_graphics=no_graphics or (no_graphics_monitor and worker_id != 0),
                    log=log,
                    additional_args=additional_args or (),
                )
                self._process = launch.EnvironmentProcess(arguments, log=log, peers=peers)
            if connect:
                self.connect()
        except BaseException:
            self._shut_down(0.0)
            raise

    def connect(self) -> None:
        """Wait for the environment's first calls, if the constructor did not.

        Raises:
            UnityTimeOutException: The environment did not call in time.
            UnityEnvironmentException: It ended, or has another version.
        """
        try:
            # The environment speaks first: a hello with versions and capabilities, then behaviors.
            hello = self._receive().unity_output
            output = hello.rl_initialization_output
            # Before the answer, so that an environment of another version is not started.
            _check_version(output, self.API_VERSION)
            self.academy_capabilities.CopyFrom(output.capabilities)
            message = m.UnityMessageProto(header={"status": OK})
            start = message.unity_input.rl_initialization_input
            start.seed, start.num_areas = self._seed, self._num_areas
            start.communication_version = self.API_VERSION
            start.package_version = self.PACKAGE_VERSION
            start.capabilities.CopyFrom(CAPABILITIES)
            self._server.reply(message.SerializeToString())
            self._learn(hello)
            self._learn(self._receive().unity_output)
        except BaseException:
            self._shut_down(0.0)
            raise
        _log.info(
            "Connected to Unity environment with package version %s and communication version %s",
            output.package_version,
            output.communication_version,
        )
        if not output.capabilities.baseRLCapabilities:
            _log.warning(
                "The environment's Unity package (%s) lacks the base capabilities: upgrade it.",
                output.package_version,
            )

    def reset(self) -> None:
        """Begin a new episode for every agent, and forget the set actions."""
        self.reset_send()
        self.reset_wait()

    def step(self) -> None:
        """Send the set actions, or zeros, and run until an agent asks for a decision or ends."""
        self.step_send()
        self.step_wait()

    def reset_send(self) -> None:
        """First half of `reset`."""
        self._check_loaded()
        message = m.UnityMessageProto(header={"status": OK})
        rl_input = message.unity_input.rl_input
        rl_input.command = m.RESET
        rl_input.side_channel = self._channels.outgoing()
        self._actions.clear()
        self._is_reset = True
        self.silence.end()
        self._reply(message.SerializeToString())

    def step_send(self) -> None:
        """First half of `step`."""
        self._check_loaded()
        if not self._is_reset:
            self.reset_send()
            return
        start = time.perf_counter()
        message = m.UnityMessageProto(header={"status": OK})
        rl_input = message.unity_input.rl_input
        rl_input.command = m.STEP
        # Channels before actions: parameters that are set now count for this step.
        rl_input.side_channel = self._channels.outgoing()
        for name, actions in self._take_actions().items():
            data = actions_bytes(actions, self._specs[name].action_spec)
            rl_input.agent_actions[name].MergeFromString(data)
        self.codec_seconds += time.perf_counter() - start
        self._reply(message.SerializeToString())

    def step_wait(self) -> None:
        """Second half of `step`: take in the next message; a failure closes everything."""
        self._check_loaded()
        try:
            message = self._receive()
            start = time.perf_counter()
            self._update(message.unity_output)
            self.codec_seconds += time.perf_counter() - start
        except Exception:
            self._fail()
            raise

    reset_wait = step_wait

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter with the next step or reset.

        Returns:
            False if there is no `EnvironmentParametersChannel` among the side channels.
        """
        if self._parameters is not None:
            self._parameters.set_parameter(name, value)
        return self._parameters is not None

    def take_stats(self) -> Stats:
        """Return what came over a `StatsSideChannel` since the last call, by name."""
        return {} if self._stats is None else self._stats.get_and_reset_stats()

    @property
    def state_refusal(self) -> str | None:
        """Why the environment does not give its state; None if it does. To ask after a reset."""
        return "there is no StateChannel" if self._state is None else self._state.refusal

    def request_state(self) -> None:
        """Ask for everything that the next decisions depend on, to come with the next step."""
        if self._state is not None:
            self._state.ask(self._client_state({} if self._stats is None else self._stats.stats))

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the last `request_state` asked for, once, after the next step."""
        return None if self._state is None else self._state.take()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, in place of a reset.

        Raises:
            ValueError: There is no `StateChannel`, or the environment does not take the state up.
        """
        if self._state is None:
            super().load_state_dict(state)
            return
        # The state goes with a reset, which begins no episodes where it is taken up.
        self._state.restore(state)
        self.reset()
        self._state.check_restored(state)
        stats = self._restore(state)
        for name in self._specs.keys() - self._decoders.keys():
            self._decoders[name] = Decoder(self._specs[name], name)
        self._decoders = {name: self._decoders[name] for name in self._specs}
        if self._stats is not None:
            self._stats.stats = stats

    @property
    def is_known_from_start(self) -> bool:
        """Whether all messages since the start are recorded, so that a new one can replay them."""
        return self._state is not None and self._state.has_first

    def go_on_from(self, failed: Any) -> None:
        """Replay the messages of a failed environment, from its last state or from the start."""
        channel = failed._state
        if channel is None or not (channel.state or channel.has_first):
            raise ValueError("its state is not known")
        if channel.state is not None:
            self.load_state_dict(channel.state)
        self._is_reset = True
        *answered, last = channel.messages
        for message in answered:
            self._reply(message, is_replay=True)
            self.step_wait()
        if self._steps.keys() != failed._steps.keys() or not all(
            same_steps(steps, failed._steps[name]) for name, steps in self._steps.items()
        ):
            raise ValueError("from the state that it gave, it came to other observations")
        self._use(failed._channels)
        self._reply(last, is_replay=True)
        self.step_wait()

    def close(self) -> None:
        """Tell the environment to stop, wait for it up to the time-out, then kill it.

        After a failure, which has closed everything already, the first call does nothing.

        Raises:
            UnityEnvironmentException: It is closed already.
        """
        if not self._failed:
            self._check_loaded()
        self._failed = False
        self._shut_down(self._timeout_s)

    def __exit__(self, *error: object) -> None:
        self._shut_down(self._timeout_s if error[0] is None else 0.0)

    def _use(self, channels: SideChannelManager) -> None:
        self._channels = channels
        self._parameters = channels.of_kind(EnvironmentParametersChannel)
        self._stats = channels.of_kind(StatsSideChannel)
        self._state = channels.of_kind(StateChannel)

    def _reply(self, content: bytes, *, is_replay: bool = False) -> None:
        if self._state is not None and not is_replay:
            self._state.sent(content)
        try:
            self._server.reply(content)
        except Exception as error:
            self._quote_output(error)
            self._fail()
            raise

    def _receive(self) -> m.ReceivedMessageProto:
        if self._process is not None:
            self._n_waits += 1
            if self._n_waits % _TRIM_EVERY == 0:
                self._process.trim()
        # Measured from here: the trainer may have updated its networks since the last message.
        if self.silence.is_on:
            self.silence.begin_wait()
        try:
            message = self._server.receive(self._timeout_s, self._check)
        except Exception as error:
            self._quote_output(error)
            raise
        if self.silence.is_on:
            self.silence.end_wait()
        return message

    def _quote_output(self, error: Exception) -> None:
        """Add the last lines that the environment has printed to an error that says no reason."""
        if self._process is not None and isinstance(error, CONVERSATION_ERRORS):
            self._process.wait(_HURRY_S)  # a wrapper script says last why it ends
            error.args = (f"{error}{self._process.tail()}",)

    def _check(self) -> None:
        """While nothing comes: raise if the process has ended, and say so after a long wait."""
        if self._process is not None:
            self._process.check()
        self.silence.check()

    def _last_message(self) -> str:
        if not self._server.has_greeted:
            return "it has not connected yet"
        return last_message(self._steps, [*self._specs, *self._announced])

    def _learn(self, output: m.ReceivedOutputProto) -> None:
        """Store announcements; a behavior's specification is complete with its first agent."""
        for index, brain in enumerate(output.rl_initialization_output.brain_parameters):
            check_behaviors(max(index, len(self._announced) + len(self._specs)), brain.brain_name)
            self._announced[brain.brain_name] = announcement = m.BrainParametersProto()
            announcement.CopyFrom(brain)
        infos = output.rl_output.agentInfos
        for name in [announced for announced in self._announced if announced in infos]:
            agents = wire.parse(m.UnityRLOutputProto.ListAgentInfoProto, infos[name]).value
            if not agents:
                continue
            spec = behavior_spec_from(self._announced.pop(name), agents[0])
            if name in self._specs:
                refuse_other_spec(name, self._specs[name], spec, "a later announcement")
                continue
            self._specs[name] = spec
            self._decoders[name] = Decoder(spec, name)
            _log.info("Connected new brain: %s", name)

    def _update(self, output: m.ReceivedOutputProto) -> None:
        """Learn new behaviors, and decode every behavior's agents."""
        self._learn(output)
        infos = output.rl_output.agentInfos
        for name in infos:
            if name in self._specs or name in self._announced or name in self._unannounced:
                continue
            # A behavior without agents waits for its first one; none is ignored.
            if infos[name] and len(self._unannounced) < _MAX_WARNINGS:
                self._unannounced.add(name)
                _log.warning("Agents of %s are ignored: the behavior is not announced.", name)
        for name, decoder in self._decoders.items():
            steps = decoder.decode(infos[name]) if name in infos else no_agents(self._specs[name])
            self._steps[name] = steps
        self._channels.deliver(output.rl_output.side_channel)

    def _fail(self) -> None:
        self._shut_down(0.0)
        self._failed = True

    def _shut_down(self, wait_s: float) -> None:
        """Stop the conversation, the process and everything it started; does nothing twice."""
        if not self._loaded:
            return
        self._loaded = False
        atexit.unregister(self._shut_down)
        end = self._server.release if self._is_attached else self._server.close
        end(_HANG_UP_S if wait_s else _HURRY_S)
        if self._process is not None:
            self._process.close(wait_s)


def _check_version(output: m.UnityRLInitializationOutputProto, ours: str) -> None:
    """Raise unless both ends speak the same major version (before 1.0: major and minor)."""
    theirs = output.communication_version
    # Before 1.0 a minor version may break what the one before had.
    parts = 2 if theirs.startswith("0.") else 1
    if theirs.split(".")[:parts] != ours.split(".")[:parts]:
        raise UnityEnvironmentException(
            f"The communication API versions are not compatible: Python has {ours}, the Unity "
            f"environment has {theirs or 'none'} (package {output.package_version or 'unknown'}). "
            "Use a Unity package from 1.0 on (ML-Agents Release 1)."
        )
