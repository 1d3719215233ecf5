"""`UnityEnvironment` with a process that uses the general gRPC runtime, as Unity does."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.core.specs import ActionTuple
from pipeline.envs.side_channels import EngineConfigurationChannel, RawBytesChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import launch_workers
from pipeline.errors import (
    SettingsError,
    UnityActionException,
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityObservationException,
    UnityTimeOutException,
    UnityWorkerInUseException,
)
from pipeline.wire.codec.decoding import NonFiniteError
from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.server import TRANSPORTS

NAME = "Echo?team=0"
RAW = uuid.UUID(int=7)


def children() -> set[psutil.Process]:
    """Return the child processes of this process that still run."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True, params=TRANSPORTS)
def _transport(request, monkeypatch):
    monkeypatch.setenv("PIPELINE_TRANSPORT", request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    threads, before = set(threading.enumerate()), children()
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # the general runtime's thread ends a moment after the server
    assert set(threading.enumerate()) <= threads
    assert children() <= before


def mode(name: str) -> dict[str, object]:
    return {"additional_args": ["--mode", name], "timeout_wait": 20}


def test_fake_environment_returns_sent_actions_as_observations_and_ends_episodes(fake: Path):
    with UnityEnvironment(fake, seed=5, timeout_wait=20) as env:
        assert dict(env.behavior_specs) == {}
        assert env.academy_capabilities.baseRLCapabilities
        env.reset()
        assert env.behavior_specs[NAME].action_spec.continuous_size == 2
        decision, terminal = env.get_steps(NAME)
        assert list(decision.agent_id) == [0, 1, 2]
        assert len(terminal) == 0
        np.testing.assert_array_equal(decision.obs[0][:, 1], [5, 5, 5])
        actions = np.arange(6, dtype=np.float32).reshape(3, 2)
        env.set_actions(NAME, ActionTuple(actions))
        env.step()
        decision, _ = env.get_steps(NAME)
        np.testing.assert_array_equal(decision.obs[0][:, 1:3], actions)
        env.step()
        np.testing.assert_array_equal(env.get_steps(NAME)[0].obs[0][:, 1:3], np.zeros((3, 2)))
        env.step()
        decision, terminal = env.get_steps(NAME)
        assert list(terminal.agent_id) == [1]
        assert not terminal.interrupted[0]
        assert list(decision.agent_id) == [0, 1, 2]
        assert env.codec_seconds > 0


def test_action_for_one_agent_leaves_zero_actions_for_others_and_the_first_step_is_a_reset(
    fake: Path,
):
    with UnityEnvironment(fake, timeout_wait=20) as env:
        env.step()
        assert env.get_steps(NAME)[0].obs[0][0, 0] == 0
        env.set_action_for_agent(NAME, 2, ActionTuple(np.ones((1, 2))))
        with pytest.raises(IndexError, match="agent_id 9 is did not request a decision"):
            env.set_action_for_agent(NAME, 9, ActionTuple(np.ones((1, 2))))
        env.step()
        obs = env.get_steps(NAME)[0].obs[0]
        np.testing.assert_array_equal(obs[:, 1:3], [[0, 0], [0, 0], [1, 1]])
        for number in range(12):  # recurring messages have new numbers in each step
            actions = np.full((3, 2), 0.25 * number, dtype=np.float32)
            env.set_actions(NAME, ActionTuple(actions))
            env.step()
            decision, _ = env.get_steps(NAME)
            np.testing.assert_array_equal(decision.obs[0][:, 1:3], actions)
            assert list(decision.agent_id) == [0, 1, 2]
        assert env._decoders[NAME].n_cached >= 4


def test_unity_environment_refuses_wrong_actions_repeated_sends_and_calls_after_close(fake: Path):
    with UnityEnvironment(fake, timeout_wait=20) as env:
        env.reset()
        with pytest.raises(
            UnityActionException,
            match=r"Echo\?team=0 needs a continuous input of dimension \(3, 2\) for .*\(2, 2\)",
        ):
            env.set_actions(NAME, ActionTuple(np.zeros((2, 2))))
        with pytest.raises(UnityActionException, match="The group Other does not correspond"):
            env.set_actions("Other", ActionTuple(np.zeros((3, 2))))
        env.step_send()
        with pytest.raises(UnityCommunicationException, match="still at work"):
            env.step_send()
        env.close()
        for call in (env.step, env.reset, env.close):
            with pytest.raises(UnityEnvironmentException, match="No Unity environment is loaded"):
                call()
    with pytest.raises(UnityEnvironmentException, match="worker-id must be 0"):
        UnityEnvironment(None, worker_id=1)
    channels = [EngineConfigurationChannel(), EngineConfigurationChannel()]
    with pytest.raises(UnityEnvironmentException, match="two side channels with the same"):
        UnityEnvironment(fake, side_channels=channels)


def test_side_channel_messages_are_sent_with_the_next_reset_and_their_echoes_arrive_once(
    fake: Path,
):
    raw = RawBytesChannel(RAW)
    with UnityEnvironment(fake, timeout_wait=20, side_channels=[raw]) as env:
        raw.send_raw_data(b"hello")
        raw.send_raw_data(b"")
        env.reset()
        assert raw.get_and_clear_received_messages() == [b"hello", b""]
        env.step()
        assert raw.get_and_clear_received_messages() == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (mode("exit"), UnityEnvironmentException, r"(?s)return code 3\..*cannot find the scene"),
        (mode("old"), UnityEnvironmentException, r"Python has 1\.5\.0.*has 0\.15\.0"),
        ({**mode("silent"), "timeout_wait": 1.5}, UnityTimeOutException, r"respond \(1\.5 s\)"),
    ],
    ids=["exits at once", "has another API version", "never connects"],
)
def test_environment_that_cannot_start_is_reported_with_the_reason(
    fake: Path, options, error, text
):
    with pytest.raises(error, match=text):
        UnityEnvironment(fake, **options)


@pytest.mark.parametrize(
    ("name", "good_steps", "error", "text"),
    [
        ("die", 1, UnityEnvironmentException, r"return code -9 \(SIGKILL\)"),
        ("quit", 1, UnityCommunicatorStoppedException, "Communicator has exited"),
        ("nan", 0, NonFiniteError, r"NaN values.*Echo\?team=0, observation 0 'echo'"),
        ("changed", 1, UnityObservationException, rf"^behavior {re.escape(NAME)}: a later announc"),
    ],
)
def test_environment_that_fails_in_a_step_is_reported_with_the_reason(
    fake: Path, name, good_steps, error, text
):
    with UnityEnvironment(fake, **mode(name)) as env:
        env.reset()
        for _ in range(good_steps):
            env.step()
        with pytest.raises(error, match=text):
            env.step()
        env.close()  # does nothing, because a failure has closed the environment already


def test_agents_of_a_behavior_that_is_not_announced_are_ignored_with_one_warning(
    fake: Path, caplog
):
    with UnityEnvironment(fake, **mode("unannounced")) as env:
        env.reset()
        for _ in range(3):
            env.step()
        assert list(env.behavior_specs) == [NAME]
        assert len(env.get_steps(NAME)[0]) == 3
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "Agents of Stranger?team=0 are ignored: the environment has not announced this behavior."
    ]


@pytest.mark.parametrize("when", ["announced-first", "announced-second", "observed-first"])
def test_behavior_may_be_announced_in_the_greeting_or_in_a_later_message_without_agents(
    fake: Path, when, caplog
):
    with UnityEnvironment(fake, **mode(when)) as env:
        assert list(env.behavior_specs) == [NAME] * (when == "observed-first")
        env.reset()
        assert env.behavior_specs[NAME].action_spec.continuous_size == 2
        env.set_actions(NAME, ActionTuple(np.full((3, 2), 0.5)))
        env.step()
        np.testing.assert_array_equal(env.get_steps(NAME)[0].obs[0][:, 1:3], np.full((3, 2), 0.5))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_port_in_use_is_reported_with_the_number_of_the_worker(fake: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UnityWorkerInUseException, match="worker number 2 ") as caught:
            UnityEnvironment(fake, worker_id=2, base_port=port - 2)
        assert (caught.value.worker_id, caught.value.port) == (2, port)


def test_transport_argument_has_precedence_over_the_environment_variable(fake: Path, monkeypatch):
    monkeypatch.setenv("PIPELINE_TRANSPORT", "carrier pigeon")
    with UnityEnvironment(fake, timeout_wait=20, transport="grpc") as env:
        assert isinstance(env._server, GrpcServer)
    with pytest.raises(SettingsError, match=r"PIPELINE_TRANSPORT: 'carrier pigeon'.*sockets.*grpc"):
        UnityEnvironment(fake)


def test_workers_that_cannot_start_leave_no_process_behind(fake: Path):
    with pytest.raises(UnityEnvironmentException, match="return code 3"):
        launch_workers(fake, 2, seed=0, additional_args=["--mode", "exit"], timeout_wait=20)


def test_environment_closed_between_step_send_and_step_wait_exits_with_code_0(fake: Path):
    env = UnityEnvironment(fake, timeout_wait=20)
    env.reset()
    env.step_send()
    env.close()
    assert env._process is not None
    assert env._process._process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_no_environment_survives_a_killed_trainer(fake: Path):
    source = str(Path(__file__).parents[3] / "src")
    code = f"""
import sys; sys.path.insert(0, {source!r})
from pipeline.envs.unity import UnityEnvironment
env = UnityEnvironment({str(fake)!r}, timeout_wait=20)
print(env._process._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(  # noqa: S603  # the lines above
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        environment = psutil.Process(int(trainer.stdout.readline()))
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(60)
    psutil.wait_procs([environment], timeout=60)
    assert not environment.is_running() or environment.status() == psutil.STATUS_ZOMBIE


def test_workers_step_together_and_keep_their_order(fake: Path):
    with launch_workers(fake, 2, seed=10, timeout_wait=20) as workers:
        workers.reset()
        assert list(workers.behavior_specs) == [NAME]
        seeds = [decision.obs[0][0, 1] for decision, _ in workers.get_steps(NAME)]
        assert seeds == [10, 11]
        workers.set_actions(NAME, [ActionTuple(np.full((3, 2), k)) for k in (1, 2)])
        workers.step()
        echoes = [decision.obs[0][0, 1] for decision, _ in workers.get_steps(NAME)]
        assert echoes == [1, 2]
