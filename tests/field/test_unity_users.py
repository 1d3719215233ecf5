"""Reports of users who train agents in their own Unity environments."""

import json
import os
import signal
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from fake_player import CONFIG, START
from stops_after import EndsAfter

import pipeline
from pipeline.cli import main as cli
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import no_agents
from pipeline.envs import base, launch
from pipeline.envs.base import SilenceWatch
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import (
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)
from pipeline.wire.codec.generated import messages as m

NAME = "Ball?team=0"
SPEC = BehaviorSpec([ObservationSpec((1,), (1,), 0, "eye")], ActionSpec(1, ()))
LIMIT = 100
"""Messages without a decision after which the warning comes, in these tests."""


@pytest.fixture(autouse=True)
def early_line(monkeypatch):
    assert (base.FIRST_S, base.FIRST_EXCHANGES) == (30.0, 10_000)
    monkeypatch.setattr(base, "FIRST_EXCHANGES", LIMIT)


def greeting() -> m.UnityMessageProto:
    message = m.UnityMessageProto(header={"status": 200})
    start = message.unity_output.rl_initialization_output
    start.communication_version = "1.5.0"
    start.capabilities.baseRLCapabilities = True
    return message


def sent(*, asking=0, ended=0, announces=True) -> m.UnityMessageProto:
    """Return a player's message with these numbers of agents."""
    message = m.UnityMessageProto(header={"status": 200})
    if announces:
        start = message.unity_output.rl_initialization_output
        start.brain_parameters.add(brain_name=NAME).action_spec.num_continuous_actions = 1
    for agent in range(asking + ended):
        info = message.unity_output.rl_output.agentInfos[NAME].value.add(id=agent)
        info.done = agent >= asking
        info.observations.add(shape=[1]).float_data.data.append(0.5)
    return message


class Player:
    """A player without process and socket, which sends messages and repeats the last one.

    It takes `seconds` for each message.
    """

    port, has_greeted = 5005, True

    def __init__(self, *messages: m.UnityMessageProto, seconds: float = 0.0):
        self._messages = [greeting(), m.UnityMessageProto(header={"status": 200}), *messages]
        self._bytes = [message.SerializeToString() for message in self._messages]
        self.seconds, self.now = seconds, 0.0

    def clock(self) -> float:
        return self.now

    def receive(self, timeout_s, check):
        step_s = min(self.seconds, 1.0)
        for _ in range(round(self.seconds)):
            check()
            self.now += step_s
        data = self._bytes.pop(0) if len(self._bytes) > 1 else self._bytes[0]
        if self.seconds > timeout_s:
            raise UnityTimeOutException("too long")
        return m.ReceivedMessageProto.FromString(data)

    def reply(self, message):
        pass

    def release(self, wait_s):
        pass


def connected(player: Player, **options) -> UnityEnvironment:
    env = UnityEnvironment(None, server=player, **options)
    env.silence = SilenceWatch("the player", env._last_message, clock=player.clock)
    env.reset()
    return env


def lines(caplog) -> list[str]:
    return [record.message for record in caplog.records if "asked for a decision" in record.message]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([sent(announces=False)], "the environment has announced no behavior"),
        ([sent()], "last message has no agents of the behaviors ['Ball?team=0']"),
        (
            [sent(ended=3), sent(announces=False, ended=2)],
            "last message has ended agents only: 2 of Ball?team=0",
        ),
        (
            [sent(asking=2), sent(announces=False)],
            "last message has no agents of the behaviors ['Ball?team=0']",
        ),
    ],
    ids=["no behavior", "a behavior without agents", "all agents done", "agents stop appearing"],
)
def test_player_whose_agents_ask_for_no_decision_causes_one_warning(caplog, messages, said):
    with connected(Player(*messages)) as env:
        for _ in range(3):  # the first steps may be of agents that ask
            env.step()
        for _ in range(LIMIT - 4):
            env.step()
        assert lines(caplog) == []
        for _ in range(2):
            env.step()
        (line,) = lines(caplog)
        assert line.startswith(f"the player: no agent has asked for a decision in {LIMIT} messages")
        assert said in line
        assert "Decision Requester" in line
        assert 'Behavior Type "Default"' in line
        for _ in range(8 * LIMIT):
            env.step()
        assert len(lines(caplog)) == 1
        for _ in range(LIMIT):
            env.step()
        assert len(lines(caplog)) == 2  # ten times as long


def test_slow_player_whose_agents_ask_for_no_decision_causes_a_warning_after_30_s(caplog):
    player = Player(sent(asking=1), sent(announces=False), seconds=4.0)
    with connected(player) as env:
        for _ in range(7):
            env.step()
            assert lines(caplog) == []
            player.now += 100.0  # an update of the networks is no wait for the player
        env.step()
        assert "in 7 messages and 30 s of waiting" in lines(caplog)[0]


def test_hanging_player_causes_a_warning_before_its_time_out(caplog):
    player = Player(sent(asking=2))
    with connected(player, timeout_wait=3600) as env:
        env.step()
        player.seconds = 4000.0
        with pytest.raises(UnityTimeOutException):
            env.step()
    first, *later = lines(caplog)
    assert (
        "0 messages and 30 s of waiting; the environment has not answered the actions of 2 of"
        in first
    )
    assert len(later) == 2  # after 300 and 3000 s


def test_player_with_pauses_between_decisions_causes_no_warning(caplog):
    messages = [sent(asking=1), *[sent(announces=False, ended=1)] * (LIMIT - 1)]
    with connected(Player(*messages, *messages[:1], *messages[1:], *messages[:1])) as env:
        for _ in range(2 * LIMIT):
            env.step()
    assert lines(caplog) == []


class Nobody:
    """A simulator all agents of which have ended."""

    behavior_specs: ClassVar = {NAME: SPEC}

    def reset(self):
        return {NAME: no_agents(SPEC)}

    def step(self, actions):
        assert not actions
        return self.reset()

    def close(self):
        pass


class OfAnotherClass:
    """An environment with ML-Agents' low-level API that has none of our base classes."""

    def __init__(self):
        self.behavior_specs = {NAME: SPEC}

    def get_steps(self, _):
        return no_agents(SPEC)

    def set_actions(self, name, action):
        pass

    def reset(self):
        pass

    def close(self):
        pass

    step = reset


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: InProcessEnvironment(Nobody()), "InProcessEnvironment"),
        (OfAnotherClass, "OfAnotherClass"),
    ],
)
def test_in_process_environment_whose_agents_ask_for_no_decision_causes_a_warning(
    caplog, make, kind
):
    # PettingZoo#513, PettingZoo#881: agents that have ended stay in `agents`
    with WorkerSet([make(), make()]) as workers:
        workers.reset()
        for _ in range(LIMIT):
            for name in workers.behavior_specs:
                nobody = [SPEC.action_spec.empty_action(0)] * 2
                workers.set_actions(name, nobody)
            assert lines(caplog) == []
            workers.step()
    assert [line.partition(":")[0] for line in lines(caplog)] == [
        f"worker {worker} ({kind})" for worker in range(2)
    ]


@pytest.mark.parametrize("n_steps", [LIMIT, LIMIT + 1])
def test_training_logs_a_warning_if_no_agent_asks_for_a_decision(caplog, tmp_path: Path, n_steps):
    settings = {"default_settings": {"trainer_type": "ppo"}}
    callbacks = [EndsAfter(n_steps)]
    env = InProcessEnvironment(Nobody())
    result = pipeline.train(env, settings, seed=1, run_dir=tmp_path, callbacks=callbacks)
    assert result.behaviors == {}
    assert len(lines(caplog)) == (n_steps > LIMIT)


WITH_HELPER = f"""#!/bin/sh
sleep 3599 &
echo $! > "$HELPER"
{{end}}{START} "$@"
"""


@pytest.mark.parametrize(
    "end", ["good end", "exit 0", "exit 3", "killed", "an error of ours", "restart"]
)
def test_helper_process_of_a_wrapper_script_ends_when_the_environment_ends(
    tmp_path, monkeypatch, end
):
    monkeypatch.setenv("HELPER", str(tmp_path / "helper"))
    program = tmp_path / "wrapper.sh"
    program.write_text(WITH_HELPER.format(end=f"{end}\n" if end.startswith("exit") else ""))
    program.chmod(0o755)
    env = UnityEnvironment(program, connect=False)
    process = env._process
    assert process is not None
    if end.startswith("exit"):
        with pytest.raises(UnityEnvironmentException, match=f"with return code {end[-1]}"):
            env.connect()
    else:
        env.connect()
    helper = psutil.Process(int((tmp_path / "helper").read_text()))
    assert os.getpgid(helper.pid) == process._process.pid != os.getpgid(0)
    if end == "killed":
        process._process.send_signal(signal.SIGKILL)
        with pytest.raises(UnityEnvironmentException, match="SIGKILL"):
            env.reset()
    elif end == "an error of ours":
        with pytest.raises(KeyError), env:
            raise KeyError
    elif end == "restart":
        env._fail()  # the call that precedes a restart of a worker
    elif end == "good end":
        env.close()
        assert process._process.returncode == 0
    gone, _ = psutil.wait_procs([helper], timeout=60)
    assert gone == [helper]


def test_process_group_is_killed_only_while_its_id_belongs_to_the_environment(
    tmp_path, monkeypatch
):
    killed = []
    program = tmp_path / "sim"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    process = launch.EnvironmentProcess([str(program)])
    real = os.killpg

    def killpg(group, number):
        # not reaped yet, so the number is still this process's
        killed.append((group, psutil.Process(group).status()))
        real(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    assert process.wait(60)
    assert killed == [(process._process.pid, psutil.STATUS_ZOMBIE)]
    process.close(0.0)
    process.close(0.0)
    assert len(killed) == 1


WRAPPER = f"""#!/bin/sh
echo "wrapper: no libvulkan" >&2
for last; do :; done
mkdir -p "${{last%/*}}"
echo "player: out of memory" > "$last"
{START.removeprefix("exec")} --quiet MODE "$@"
echo "wrapper: the player crashed" >&2
exit 134
"""


def wrapper(folder: Path, mode: str) -> Path:
    """A script that starts a player, the last argument of which is its log."""
    program = folder / "wrapper.sh"
    program.write_text(WRAPPER.replace("MODE", mode))
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("mode", "kind", "last"),
    [
        ("--mode die", UnityEnvironmentException, "wrapper: the player crashed"),
        ("--mode quit", UnityCommunicatorStoppedException, "fake environment starts"),
        ("--mode silent", UnityTimeOutException, "fake environment starts"),
    ],
)
def test_error_of_a_failed_player_quotes_its_log_and_output(tmp_path, mode, kind, last):
    """Both the player's log and what a wrapper script prints are quoted."""
    logs = str(tmp_path / "logs")

    def play():
        timeout_s = 3 if "silent" in mode else 60
        program = wrapper(tmp_path, mode)
        with UnityEnvironment(program, log_folder=logs, timeout_wait=timeout_s) as env:
            for _ in range(9):
                env.step()

    with pytest.raises(kind) as caught:
        play()
    *_, quoted = str(caught.value).partition(" The last lines of the environment's ")
    lines = quoted.splitlines()
    assert lines[:3] == [
        f"{logs}/Player-0.log:",
        "player: out of memory",
        "The last lines of the environment's output:",
    ]
    assert (lines[3], lines[-1]) == ("wrapper: no libvulkan", last)


@pytest.mark.parametrize("nan_at", [2, 40])
def test_error_about_an_environment_that_keeps_failing_says_how_to_resume(
    tmp_path, monkeypatch, capsys, nan_at
):
    """The error says how to resume if there is a checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    program = wrapper(tmp_path, f"--mode die --nan-at {nan_at}")
    command = ["learn", "config.yaml", "--env", str(program), "--max-lifetime-restarts=0"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    said = "wrapper: the player crashed"
    if nan_at > 2:
        assert Path("results/ppo/Echo/checkpoint.pt").is_file()
        said += (
            " | The state is saved in results/ppo: to continue, give the same command with "
            "--resume."
        )
    assert error.startswith("error: Worker 0 exceeded the allowed number of restarts, 0 of 0")
    assert error.endswith(f"| {said}")


def times_of_mlagents(n_envs: int, *, threaded: bool) -> dict:
    """A run of 100 s; each environment works 50 s and needs 4 s for its messages.

    The loop decides for one environment while another one works, so it waits less than that.
    """
    leaf = {"update": {"total": 20.0}, "storage": {"total": 90.0 if threaded else 6.0}}
    learning = {"_update_policy": leaf["update"], "process_trajectory": leaf["storage"]}
    work = {"communicator.exchange": {"total": 50.0 * n_envs}}
    work["steps_from_proto"] = {"total": 4.0 * n_envs}
    workers = {"total": 0.1, "children": {"worker_root": {"total": 180.0, "children": work}}}
    step_s, thread = 70.0 + 26.0 * threaded, {}
    stepping = {"workers": workers, "TorchPolicy.evaluate": {"total": 25.0}}
    loop = {"env_step": {"total": step_s, "count": 1000, "children": stepping}}
    if threaded:
        thread = {"trainer_threads": {"total": 0.0, "children": {"thread_root": {"total": 99.0}}}}
        thread["trainer_threads"]["children"]["thread_root"]["children"] = learning
    else:
        loop["trainer_advance"] = {"total": 28.0, "children": learning}
    advance = {"TrainerController.advance": {"total": 98.0, "children": loop}}
    start = {"total": 100.0, "children": advance | thread}
    command = f"mlagents-learn x.yaml --num-envs={n_envs}"
    metadata = {"mlagents_version": "1.1.0", "command_line_arguments": command}
    return {"metadata": metadata, "children": {"TrainerController.start_learning": start}}


ROWS = {
    False: [
        (
            "environment",
            "41.7",
            "42%",
            "41.7 ms an exchange, each environment works 50.0 s, also in parallel",
        ),
        ("wire", "3.3", "3%", ""),
        ("inference", "25.0", "25%", ""),
        ("storage", "6.0", "6%", ""),
        ("update", "20.0", "20%", ""),
        ("other", "4.0", "4%", ""),
    ],
    True: [
        ("environment", "50.0", "50%", "50.0 ms an exchange"),
        ("wire", "4.0", "4%", ""),
        ("inference", "25.0", "25%", ""),
        ("update", "20.0", "", "in parallel with the loop"),
        ("other", "21.0", "21%", ""),
        (
            "(update)",
            "90.0",
            "",
            "the updates' thread waits for experience and stores it, in parallel with the loop",
        ),
    ],
}


@pytest.mark.parametrize("threaded", ROWS)
def test_shares_of_an_mlagents_timers_file_add_up_to_100_percent(tmp_path, capsys, threaded):
    """With two environments, or `threaded`, parts run in parallel with the loop."""
    file = tmp_path / "timers.json"
    file.write_text(json.dumps(times_of_mlagents(2, threaded=threaded)))
    assert cli.main(["timers", str(file)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.split("\n\n")[1].splitlines()]
    shown = []
    for name, seconds, _, *rest in lines:
        words = [word for word in rest if "█" not in word]
        share = words.pop(0) if words and words[0].endswith("%") else ""
        shown.append((name, seconds, share, " ".join(words)))
    assert [row[:3] for row in shown] == [row[:3] for row in ROWS[threaded]]
    for row, expected in zip(shown, ROWS[threaded], strict=True):
        assert row[3].startswith(expected[3])
    assert sum(int(share[:-1]) for _, _, share, _ in shown if share) == 100
    assert "If the trainer took no time, the run would be 2.0 times as fast" in out
