"""Environments in another process: Unity's, and all others that use the ML-Agents protocol."""

import atexit
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.specs import check_behaviors, refuse_other_spec
from pipeline.core.steps import no_agents, same_steps
from pipeline.envs import launch
from pipeline.envs.base import StoredStepsEnv, last_message
from pipeline.envs.side_channels import (
    EnvironmentParametersChannel,
    SideChannel,
    SideChannelManager,
    StateChannel,
    Stats,
    StatsSideChannel,
)
from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)
from pipeline.wire.channels.parameters import Sampler
from pipeline.wire.codec import records
from pipeline.wire.codec.actions import actions_bytes
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.layout_cache import Decoder
from pipeline.wire.transport.calls import CAPABILITIES, OK
from pipeline.wire.transport.peers import PeerCheck
from pipeline.wire.transport.server import AnyServer

_log = logging.getLogger(__name__)

# Seconds to wait until the environment disconnects, at a normal end and after a failure.
_CLOSE_S, _FAST_CLOSE_S = 1.0, 0.2
# Number of messages between two calls of `trim`.
_TRIM_EVERY = 256
# Before such an error the environment has often printed the reason, so the environment's output is
# added to the error.
CONVERSATION_ERRORS = (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
)
_MAX_WARNINGS = 10


class UnityEnvironment(StoredStepsEnv):
    """An environment in another process, or in the Unity Editor.

    `step` and `reset` can be split into two halves, so that several environments compute at the
    same time.

    Attributes:
        academy_capabilities: capabilities of the environment's Unity package.
        port: the TCP port of the connection.
    """

    # The protocol's version since ML-Agents 0.25 (release 15).
    API_VERSION = "1.5.0"
    PACKAGE_VERSION = "1.1.0"  # the version of `mlagents_envs` with the same behavior
    DEFAULT_EDITOR_PORT = launch.EDITOR_PORT
    # Users' scripts read this constant of ML-Agents. It has no effect here, because the system
    # chooses the default port.
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
            file_name: path of the executable; None waits for Play in the Unity Editor.
            worker_id: number that is added to `base_port`; must be 0 without `file_name`.
            base_port: TCP port of worker 0. None: a free port that the system chooses, or 5004
                without `file_name`.
            seed: seed of the environment's random numbers.
            no_graphics: run without a display.
            no_graphics_monitor: run without a display, except for worker 0.
            timeout_wait: longest wait for each message, in seconds.
            additional_args: further arguments for the executable.
            side_channels: side channels with different ids.
            log_folder: absolute path of the folder for the player's log `Player-<worker>.log`.
            num_areas: number of training areas, if the environment replicates them.
            connect: False only starts the process; call `connect` before any other method.
            transport: "sockets" or "grpc", the general gRPC runtime; None means the value of the
                environment variable PIPELINE_TRANSPORT, or "sockets" if it is not set.
            server: a server that listens already, and stays open after `close`; only if
                `file_name` is None.

        Raises:
            UnityWorkerInUseException: The port is taken.
            UnityTimeOutException: The environment did not call in time.
            UnityEnvironmentException: The environment cannot be launched, has ended, or has an
                incompatible version.
        """
        super().__init__()
        if file_name is None and worker_id != 0:
            raise UnityEnvironmentException(
                "If the environment name is None, the worker-id must be 0 in order to connect with "
                f"the Editor; the worker-id is {worker_id}."
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
        atexit.register(self._shut_down, 0.0)  # the process must end even if `close` is not called
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
        # Nobody can call `close` after the constructor has raised, so process and port are freed
        # here.
        except BaseException:
            self._shut_down(0.0)
            raise

    def connect(self) -> None:
        """Wait for the environment's first calls, if the constructor did not.

        Raises:
            UnityTimeOutException: The environment did not call in time.
            UnityEnvironmentException: The environment has ended, or has an incompatible version.
        """
        try:
            # The environment first sends a greeting with version and capabilities, then behaviors.
            greeting = self._receive().unity_output
            output = greeting.rl_initialization_output
            # The version is checked first: an incompatible environment must not start.
            _check_version(output, self.API_VERSION)
            self.academy_capabilities.CopyFrom(output.capabilities)
            message = m.UnityMessageProto(header={"status": OK})
            start = message.unity_input.rl_initialization_input
            start.seed, start.num_areas = self._seed, self._num_areas
            start.communication_version = self.API_VERSION
            start.package_version = self.PACKAGE_VERSION
            start.capabilities.CopyFrom(CAPABILITIES)
            self._server.reply(message.SerializeToString())
            self._add_behaviors(greeting)
            self._add_behaviors(self._receive().unity_output)
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
                "The environment's Unity package (%s) has no base capabilities: upgrade it.",
                output.package_version,
            )

    def reset(self) -> None:
        """Begin a new episode for every agent, and drop actions that were set but not applied."""
        self.reset_send()
        self.reset_wait()

    def step(self) -> None:
        """Send the set actions, or zeros, and wait until an agent asks for a decision or ends."""
        self.step_send()
        self.step_wait()

    def reset_send(self) -> None:
        """First half of `reset`: send the command to the environment."""
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
        """First half of `step`: send the actions."""
        self._check_loaded()
        # As in ML-Agents, the first step is a reset.
        if not self._is_reset:
            self.reset_send()
            return
        start = time.perf_counter()
        message = m.UnityMessageProto(header={"status": OK})
        rl_input = message.unity_input.rl_input
        rl_input.command = m.STEP
        # The environment reads side channels first, so parameters are valid for this step.
        rl_input.side_channel = self._channels.outgoing()
        for name, actions in self._take_actions().items():
            data = actions_bytes(actions, self._specs[name].action_spec)
            # The bytes are a serialized list, which protobuf parses into the map's entry.
            rl_input.agent_actions[name].MergeFromString(data)
        self.codec_seconds += time.perf_counter() - start
        self._reply(message.SerializeToString())

    def step_wait(self) -> None:
        """Second half of `step`: receive the next message; an error closes the environment."""
        self._check_loaded()
        try:
            message = self._receive()
            start = time.perf_counter()
            self._update(message.unity_output)
            self.codec_seconds += time.perf_counter() - start
        except Exception:
            self._fail()
            raise

    # An environment answers a reset with the same kind of message as a step.
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
        """Return the statistics from a `StatsSideChannel` since the last call, by name."""
        return {} if self._stats is None else self._stats.get_and_reset_stats()

    @property
    def state_refusal(self) -> str | None:
        """Reason why `state_dict` returns no state; None if it returns one. Valid after a reset."""
        return "there is no StateChannel" if self._state is None else self._state.refusal

    def request_state(self) -> None:
        """Request the present state, as described at `BaseEnv`; to be called between two steps."""
        if self._state is not None:
            self._state.ask(self._client_state({} if self._stats is None else self._stats.stats))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that `request_state` asked for, once; None before it arrives."""
        return None if self._state is None else self._state.take()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, instead of a reset.

        Raises:
            ValueError: There is no `StateChannel`, or the environment does not restore the state.
            UnityObservationException: The environment has another specification than the state.
        """
        if self._state is None:
            super().load_state_dict(state)
            return
        # The state is sent with a reset, which begins no episodes if the state is restored.
        self._state.restore(state)
        self.reset()
        self._state.check_restored(state)
        stats = self._restore(state)
        # Decoders are not saved: they are made from the restored specifications.
        for name in self._specs.keys() - self._decoders.keys():
            self._decoders[name] = Decoder(self._specs[name], name)
        self._decoders = {name: self._decoders[name] for name in self._specs}
        if self._stats is not None:
            self._stats.stats = stats

    @property
    def is_known_from_start(self) -> bool:
        """Whether all messages to this environment since its start are recorded for a replay."""
        return self._state is not None and self._state.has_first

    def go_on_from(self, failed: Any) -> None:
        """Bring this environment to the state of `failed`, by a replay of its messages."""
        channel = failed._state
        if channel is None or not (channel.state or channel.has_first):
            raise ValueError("the failed environment's last state is not known")
        if channel.state is not None:
            self.load_state_dict(channel.state)
        self._is_reset = True
        # The failed environment has not answered the last message, so this message is sent after
        # the replay has been checked.
        *answered, last = channel.messages
        for message in answered:
            self._reply(message, is_replay=True)
            self.step_wait()
        # The replay must end in the steps that the trainer has acted on.
        if self._steps.keys() != failed._steps.keys() or not all(
            same_steps(steps, failed._steps[name]) for name, steps in self._steps.items()
        ):
            raise ValueError("the replay from the last state led to other observations")
        # From now on the failed environment's channels are used, because they have the statistics.
        self._use(failed._channels)
        self._reply(last, is_replay=True)
        self.step_wait()

    def close(self) -> None:
        """Tell the environment to stop, wait for it up to the time-out, then kill it.

        After a failure, which has closed the environment already, the first call does nothing.

        Raises:
            UnityEnvironmentException: The environment is closed already.
        """
        if not self._failed:
            self._check_loaded()
        self._failed = False
        self._shut_down(self._timeout_s)

    def __exit__(self, *error: object) -> None:
        # After an error the environment gets no time to end by itself, because it may hang.
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
        # Trimming costs a system call, so it is not done for each message.
        if self._process is not None:
            self._n_waits += 1
            if self._n_waits % _TRIM_EVERY == 0:
                self._process.trim()
        # Only waiting counts as silence, and not the time of updates before the wait.
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
        if self._process is not None and isinstance(error, CONVERSATION_ERRORS):
            self._process.wait(_FAST_CLOSE_S)  # a process prints the reason just before it ends
            error.args = (f"{error}{self._process.tail()}",)

    def _check(self) -> None:
        """Raise an error if the process has ended, and warn after a long wait."""
        if self._process is not None:
            self._process.check()
        self.silence.check()

    def _last_message(self) -> str:
        if not self._server.has_greeted:
            return "the environment has not connected yet"
        return last_message(self._steps, [*self._specs, *self._announced])

    def _add_behaviors(self, output: m.ReceivedOutputProto) -> None:
        """Store announced behaviors; the first agent of a behavior completes its specification."""
        for index, brain in enumerate(output.rl_initialization_output.brain_parameters):
            check_behaviors(max(index, len(self._announced) + len(self._specs)), brain.brain_name)
            self._announced[brain.brain_name] = announcement = m.BrainParametersProto()
            announcement.CopyFrom(brain)
        infos = output.rl_output.agentInfos
        for name in [announced for announced in self._announced if announced in infos]:
            agents = records.parse(m.UnityRLOutputProto.ListAgentInfoProto, infos[name]).value
            # The announcement has the actions only: shapes come with an agent's observations.
            if not agents:
                continue
            spec = behavior_spec_from(self._announced.pop(name), agents[0])
            # Unity announces a behavior again if its agents were removed and created again. The
            # specification must then be the same.
            if name in self._specs:
                refuse_other_spec(name, self._specs[name], spec, "a later announcement")
                continue
            self._specs[name] = spec
            self._decoders[name] = Decoder(spec, name)
            _log.info("Connected new brain: %s", name)

    def _update(self, output: m.ReceivedOutputProto) -> None:
        self._add_behaviors(output)
        infos = output.rl_output.agentInfos
        for name in infos:
            if name in self._specs or name in self._announced or name in self._unannounced:
                continue
            # An empty list of agents needs no warning, because no agent is ignored.
            if infos[name] and len(self._unannounced) < _MAX_WARNINGS:
                self._unannounced.add(name)
                _log.warning(
                    "Agents of %s are ignored: the environment has not announced this behavior.",
                    name,
                )
        # Every known behavior gets new steps, because agents of the previous message must not stay.
        for name, decoder in self._decoders.items():
            steps = decoder.decode(infos[name]) if name in infos else no_agents(self._specs[name])
            self._steps[name] = steps
        self._channels.deliver(output.rl_output.side_channel)

    def _fail(self) -> None:
        self._shut_down(0.0)
        self._failed = True

    def _shut_down(self, wait_s: float) -> None:
        """End the connection, the process and its children; a second call does nothing."""
        if not self._loaded:
            return
        self._loaded = False
        atexit.unregister(self._shut_down)
        # A server that was passed to the constructor stays open for the caller.
        end = self._server.release if self._is_attached else self._server.close
        end(_CLOSE_S if wait_s else _FAST_CLOSE_S)
        if self._process is not None:
            self._process.close(wait_s)


def _check_version(output: m.UnityRLInitializationOutputProto, ours: str) -> None:
    """Raise an error unless both ends of the connection have the same major version."""
    theirs = output.communication_version
    # Before 1.0 a minor version may be incompatible (https://semver.org/#spec-item-4).
    parts = 2 if theirs.startswith("0.") else 1
    if theirs.split(".")[:parts] != ours.split(".")[:parts]:
        raise UnityEnvironmentException(
            f"The communication API versions are not compatible: Python has {ours}, the Unity "
            f"environment has {theirs or 'none'} (package {output.package_version or 'unknown'}). "
            "Use a Unity package from 1.0 on (ML-Agents Release 1)."
        )
