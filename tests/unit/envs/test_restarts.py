"""Restarts of failed workers: one worker at a time, and within a budget."""

import contextlib
import logging
import os
import re
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from test_agent_composition import Pair, connected
from toys import Chase

from pipeline.core.specs import ActionTuple
from pipeline.core.steps import steps_to_mapping
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.side_channels import EnvironmentParametersChannel, StateChannel, StatsSideChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import RestartBudget, WorkerSet, launch_workers
from pipeline.errors import Interrupted
from pipeline.settings.trainer.schema import EnvironmentSettings
from pipeline.wire.channels import state as codec
from pipeline.wire.channels.side_channels import IncomingMessage

NAME = "3DBall?team=0"


def play(workers, n_steps):
    for _ in range(n_steps):
        workers.step()


def test_restart_budget_counts_all_restarts_and_recent_restarts_of_each_worker(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("pipeline.envs.workers.time", clock)
    limits = EnvironmentSettings(
        max_lifetime_restarts=3, restarts_rate_limit_n=2, restarts_rate_limit_period_s=10
    )
    budget = RestartBudget(limits)
    assert [budget.spend(0), budget.spend(0)] == [1, 2]
    assert "2 of 2 in 10 s" in str(budget.refusal(0))
    assert budget.refusal(1) is None
    clock.now = 10.5
    assert budget.refusal(0) is None
    budget.spend(0)
    clock.now = 100.0
    assert "3 of 3 in all" in str(budget.refusal(0))
    unlimited = EnvironmentSettings(max_lifetime_restarts=-1, restarts_rate_limit_n=-1)
    budget = RestartBudget(unlimited)
    for _ in range(50):
        budget.spend(0)
    assert budget.refusal(0) is None
    for none in ("max_lifetime_restarts", "restarts_rate_limit_n"):
        assert RestartBudget(EnvironmentSettings(**{none: 0})).refusal(0) is not None


def launched(build, n_workers=2):
    limits = EnvironmentSettings(restarts_rate_limit_n=-1)
    return launch_workers(
        build,
        n_workers,
        seed=5,
        timeout_wait=60,
        restarts=limits,
        side_channels=lambda: [EnvironmentParametersChannel(), StatsSideChannel(), StateChannel()],
    )


def hurt(workers, signal_number):
    """Send a signal to the process of worker 1, and return the process's number."""
    workers.envs[1]._timeout_s = 3.0  # seconds, because processes start slowly under load
    pid = workers.envs[1]._process._process.pid
    os.kill(pid, signal_number)
    return pid


def played_on(workers, n_steps, *, disturb=lambda _: None):
    """Step with actions drawn by step and a changing parameter; return steps and states."""
    seen = []
    for step in range(n_steps):
        if step % 7 == 3:
            workers.set_parameter("gravity", 4.0 + step / 10)
        if step % 11 == 9:
            workers.request_states()
        steps = workers.get_steps(NAME)
        seen.append(
            ([steps_to_mapping(worker_steps) for worker_steps in steps], workers.take_stats())
        )
        spec = workers.behavior_specs[NAME].action_spec
        draw = np.random.default_rng(step)
        actions = [draw.uniform(-1, 1, (len(d), spec.continuous_size)) for d, _ in steps]
        workers.set_actions(NAME, [ActionTuple(action.astype(np.float32)) for action in actions])
        disturb(step)
        workers.step()
        if step % 11 == 9:
            seen.append(workers.state_dict())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_replacement_of_a_killed_or_hanging_process_gives_the_same_steps(
    how, packed, tmp_path, caplog
):
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=2)
    kills = {0, 1, 2, 9, 10, 20, 31} if how == signal.SIGKILL else {12}
    dead_pids = []

    def disturb(step):
        if step in kills:
            dead_pids.append(hurt(workers, how))

    with launched(build) as workers:
        workers.reset()
        undisturbed = played_on(workers, 40)
    with caplog.at_level(logging.INFO), launched(build) as workers:
        dead_pids.append(hurt(workers, how))  # before its first answer
        workers.reset()
        other = workers.envs[0]._process._process.pid
        disturbed = played_on(workers, 40, disturb=disturb)
        assert workers.envs[0]._process._process.pid == other
        assert workers.envs[1]._process._process.pid not in dead_pids
        assert workers.take_restarted() == []
    np.testing.assert_equal(disturbed, undisturbed)
    assert caplog.text.count("Restarting worker[1]") == len(dead_pids)
    assert caplog.text.count("Worker[1] continues from its last step.") == len(dead_pids)
    for pid in dead_pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ("state", "the failed environment's last state is not known"),
        ("observations", "the replay from the last state led to other observations"),
        ("twice", "the replay failed: .*SIGKILL"),
    ],
)
def test_worker_is_reset_if_its_messages_cannot_be_replayed(
    lost, why, packed, tmp_path, caplog, monkeypatch
):
    with launched(packed("balance_ball", tmp_path / "balance_ball", n_agents=2)) as workers:
        workers.reset()
        workers.step()
        if lost == "state":
            workers.envs[1]._state.give_up()
        if lost == "observations":
            monkeypatch.setattr("pipeline.envs.unity.same_steps", lambda *_: False)
        if lost == "twice":
            load = UnityEnvironment.load_state_dict

            def fails(env, state):
                load(env, state)
                os.kill(env._process._process.pid, signal.SIGKILL)

            monkeypatch.setattr(UnityEnvironment, "load_state_dict", fails)
        hurt(workers, signal.SIGKILL)
        workers.step()
        assert workers.take_restarted() == [1]
        play(workers, 5)
        for decision, _ in workers.get_steps(NAME):
            assert np.isfinite(decision.obs[0]).all()
    assert re.search(rf"Worker\[1\] begins new episodes \({why}", caplog.text)
    assert "cannot be repeated exactly" in caplog.text


@pytest.mark.slow
def test_worker_killed_right_after_a_resume_continues_exactly_by_replay_of_its_messages(
    packed, tmp_path
):
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=2)
    with launched(build) as workers:
        workers.reset()
        play(workers, 3)
        workers.request_states()
        states = []
        uninterrupted = played_on(workers, 6, disturb=lambda _: states.append(workers.state_dict()))
    with launched(build) as workers:
        workers.load_state_dict(states[1])
        hurt(workers, signal.SIGKILL)
        resumed = played_on(workers, 6)
        assert workers.take_restarted() == []
    np.testing.assert_equal(resumed, uninterrupted)


def test_recorded_messages_above_the_size_limit_are_dropped_until_the_next_state(monkeypatch):
    monkeypatch.setattr("pipeline.envs.side_channels._MAX_RECORDED_BYTES", 10)
    channel = StateChannel()
    channel.refusal = None  # as after the environment's first answer
    channel.sent(b"12345")
    assert (channel.has_first, channel.messages) == (True, [b"12345"])
    channel.sent(b"before anything is known")
    assert (channel.has_first, channel.messages) == (False, [])
    channel.sent(b"1")
    assert channel.messages == []
    channel.ask({})
    channel.sent(b"1234")
    channel.know({"is": 1})
    channel.sent(b"56")
    channel.ask({})
    channel.sent(b"78")
    assert (channel.state, channel.messages) == ({"is": 1}, [b"1234", b"56", b"78"])
    channel.know({"is": 2})
    assert (channel.state, channel.messages) == ({"is": 2}, [b"78"])
    channel.sent(b"123456789")
    assert (channel.state, channel.messages) == (None, [])
    channel.know({"is": 3})  # its request was before the messages that were dropped
    assert channel.state is None


class Waits(InProcessEnvironment):
    """An environment that records the error with which its `with` block ends."""

    def __init__(self, n_agents=1) -> None:
        super().__init__(Chase(n_agents=n_agents))
        self.left_with = []

    def __exit__(self, *error):
        self.left_with.append(error[0])
        super().__exit__(*error)


@pytest.mark.parametrize(
    ("error", "passed", "wait_s"),
    [(None, None, 7.0), (ValueError(), ValueError, 0.0), (Interrupted("asked"), None, 7.0)],
)
def test_closing_workers_raises_the_original_error_and_does_not_wait_after_an_error(
    error, passed, wait_s
):
    envs = [Waits(), Waits(), connected(Pair(), timeout_wait=7.0)]
    process = envs[2]._process = Mock()
    raised = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with raised as seen, WorkerSet(envs):
        if error is not None:
            raise error
    assert [env.left_with for env in envs[:2]] == [[passed], [passed]]
    process.close.assert_called_once_with(wait_s)
    if error is not None:
        assert seen.value is error
        assert seen.value.__context__ is None


def test_returned_state_has_the_values_that_were_given_with_the_latest_request(monkeypatch):
    monkeypatch.setattr("pipeline.envs.side_channels._MAX_RECORDED_BYTES", 8)

    def answer(kind, content=b""):
        channel.on_message_received(IncomingMessage(codec.message(kind, content)))

    channel = StateChannel()
    answer(codec.StateMessageType.CAN)
    channel.sent(b"aaaa")
    channel.ask({"kept": 1})
    channel.sent(b"bb")
    answer(codec.StateMessageType.STATE, b"one")
    channel.ask({"kept": 2})
    assert channel.take() is None, "the answer to the second request is still to come"
    channel.sent(b"cc")
    answer(codec.StateMessageType.STATE, b"two")
    channel.sent(b"dd")
    channel.sent(b"eeee")  # 8 bytes since the state; earlier bytes do not count
    state = channel.take()
    assert (state["kept"], state["environment"].tobytes()) == (2, b"two")
    assert channel.take() is None
    assert channel.messages == [b"cc", b"dd", b"eeee"]
    for saved in (state, {**state, "kept": 3}):
        channel.restore(saved)
        channel.sent(b"f")
        with pytest.raises(ValueError, match="not restored"):
            channel.check_restored(saved)
        answer(codec.StateMessageType.RESTORE)
        channel.check_restored(saved)
        assert (channel.state["kept"], channel.messages) == (saved["kept"], [])
