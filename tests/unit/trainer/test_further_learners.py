"""How several processes of a run start, join and end, and how they get the job."""

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from interpreter import python
from torch.distributed import HashStore, PrefixStore

from pipeline import __version__, seeding
from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    SideChannelManager,
    StateChannel,
    StatsSideChannel,
)
from pipeline.errors import Interrupted, LearnerLostError, PipelineError, SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer import api, environment, worker
from pipeline.trainer.api import refuse_single_process_only, without_threaded
from pipeline.trainer.checkpoints.file import save_checkpoint
from pipeline.trainer.distributed import group as group_module
from pipeline.trainer.distributed import workers
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.environment import JobSpec

CPU = torch.device("cpu")
OPTIONS = {
    "seed": 5,
    "run_dir": Path("runs").resolve(),
    "num_envs": 3,
    "env_args": ["--a", "1"],
    "base_port": 5005,
    "log_folder": Path("logs").resolve(),
    "init_from": {"A": Path("a.pt").resolve()},
    "whole_weights": True,
    "resume": True,
    "torch_threads": 2,
    "starting_lesson": 1,
}
TOY = {"behaviors": {"A": {"trainer_type": "ppo", "threaded": True}}}


class OpenedError(Exception):
    pass


@pytest.fixture
def launched(monkeypatch):
    """Make this process one of several that torchrun has started."""

    def be(rank, size):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": rank, "WORLD_SIZE": size}
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))

    return be


@pytest.fixture
def made(monkeypatch):
    """Replace `DistributedGroup` and `LocalWorkers`; return the groups, which are made later."""
    groups = []

    def group(store, **options):
        groups.append(Mock(store=store, **{"others": None} | options))
        return groups[-1]

    monkeypatch.setattr(workers, "DistributedGroup", group)
    monkeypatch.setattr(workers, "LocalWorkers", lambda n, **options: Mock(n=n, options=options))
    return groups


def reported(store, rank):
    """Return the failure that a process has reported, as waiting processes read it."""
    ours = PrefixStore("pipeline", store)
    key = f"failed/{rank}"
    until = time.monotonic() + 0.5  # the failure is sent over another connection
    while not ours.check([key]) and time.monotonic() < until:
        time.sleep(0.01)
    return [ours.get(key).decode()] if ours.check([key]) else []


@pytest.mark.parametrize(
    ("error", "failures", "grace"),
    [
        (None, [], workers._GRACE_S),
        (Interrupted("asked", exit_code=143), ["asked"], workers._GRACE_S),
        (PipelineError("no luck"), ["no luck"], workers._SHORT_GRACE_S),
        (KeyError(), ["KeyError"], workers._SHORT_GRACE_S),
        (LearnerLostError("rank 1 is gone"), [], workers._SHORT_GRACE_S),
    ],
)
def test_first_process_starts_and_ends_the_other_processes(made, tmp_path, error, failures, grace):
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, workers.started(3, device=CPU, threads=2, log_folder=tmp_path) as ranks:
        assert ranks.store.get("device") == b"cpu"
        if error is not None:
            raise error
    (member,) = made
    assert (member.rank, member.size, member.device, member.close.called) == (0, 3, CPU, True)
    local = member.others
    local.end.assert_called_once_with(grace)
    assert (local.n, reported(member.store, 0)) == (2, failures)
    assert local.options == {"port": local.options["port"], "threads": 2, "log_folder": tmp_path}
    assert local.options["port"] > 0


@pytest.mark.parametrize("by", ["torchrun", "the first process"])
def test_joining_process_takes_the_device_type_of_the_first_process(
    made, monkeypatch, launched, by
):
    store, calls, ends = HashStore(), [], []
    store.set("device", "cpu")

    def found(url, rank, size, timeout):
        calls.append((url, rank, size, timeout.total_seconds()))
        return iter([(store, rank, size)])

    monkeypatch.setattr(workers, "rendezvous", found)
    monkeypatch.setattr(workers, "_end_with_parent", lambda: ends.append("with parent"))
    monkeypatch.setattr(workers, "_follow_first_process", ends.append)
    launched(2, 3)
    monkeypatch.setenv("PIPELINE_LEARNER", "" if by == "torchrun" else "1")
    with workers.joined() as ranks:
        assert not ranks.close.called
        assert ends == (["with parent"] if by == "torchrun" else [ranks.stop])
    (member,) = made
    assert (member.rank, member.size, member.device, member.close.called) == (2, 3, CPU, True)
    assert member.others is None
    assert calls == [("env://", 2, 3, group_module.PATIENCE_S)]


@pytest.mark.parametrize("at", ["device", "group", "work"])
def test_error_of_a_joined_process_is_reported_to_the_waiting_processes(
    made, monkeypatch, launched, at
):
    store = HashStore()
    store.set("device", "cuda" if at == "device" else "cpu")
    monkeypatch.setattr(workers, "rendezvous", lambda *_, **__: iter([(store, 2, 3)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(workers, "_follow_first_process", lambda _: None)

    refuses = Mock(side_effect=PipelineError("no luck"))
    if at == "device":
        monkeypatch.setattr(workers, "usable_device", refuses)
    if at == "group":
        monkeypatch.setattr(workers, "DistributedGroup", refuses)
    launched(2, 3)
    monkeypatch.setenv("PIPELINE_LEARNER", "1")
    with pytest.raises(PipelineError, match="no luck"), workers.joined():
        refuses()
    assert reported(store, 2) == ["no luck"]
    assert [group.close.called for group in made] == ([True] if at == "work" else [])


class Said:
    """Replaces the group of all processes: records the objects that are sent to it."""

    rank, size, device = 0, 2, CPU

    def __init__(self):
        self.notes = []

    def all_gather_object(self, note):
        self.notes.append(note)
        return [note, note]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Train with several learners up to the opening of the environments."""
    seen = SimpleNamespace(ranks=Said(), started=[], joined=[], opened=[], threads=[])

    def started(n, **options):
        seen.started.append((n, options))
        return contextlib.nullcontext(seen.ranks)

    def joined(device=None):
        seen.joined.append(device)
        return contextlib.nullcontext(seen.ranks)

    def opened(job, group):
        seen.opened.append((job, group))
        seen.threads.append(torch.get_num_threads())
        raise OpenedError

    monkeypatch.setattr(api, "started", started)
    monkeypatch.setattr(api, "joined", joined)
    monkeypatch.setattr(api, "open_workers", opened)

    def train(settings=TOY, *, learners=1, **changes):
        options = {"seed": 3, "run_dir": tmp_path / "run", "torch_threads": 2} | changes
        with pytest.raises(OpenedError):
            api.train(JobSpec("game", api.read_settings(settings), **options), learners=learners)
        return seen

    return train


def test_single_process_opens_environments_with_the_arguments_of_train(run, tmp_path):
    save_checkpoint(tmp_path / "a.pt", {"learner": {}})
    options = OPTIONS | {"run_dir": tmp_path, "init_from": {"A": tmp_path / "a.pt"}}
    run_settings = load_run_settings(None, overrides=TOY)
    job = JobSpec(env="game", settings=run_settings.with_seed(5), **options)
    assert run(run_settings, **options).opened == [(job, SINGLE_PROCESS)]


@pytest.mark.parametrize("logs", [None, "elsewhere"])
def test_first_process_starts_the_learners_and_sends_them_the_job(run, tmp_path, logs):
    folder = None if logs is None else tmp_path / logs
    seen = run(learners=2, log_folder=folder)
    expected = {
        "device": CPU,
        "threads": 2,
        "log_folder": folder or tmp_path / "run" / "run_logs",
    }
    assert seen.started == [(2, expected)]
    assert seen.joined == []
    ((job, group),) = seen.opened
    assert group is seen.ranks
    assert not job.settings.behaviors["A"].threaded
    note, sent_job = seen.ranks.notes
    assert note["version"] == __version__
    assert sent_job == job.for_others()


@pytest.mark.parametrize("asked", [1, 2])
def test_first_process_joins_processes_that_torchrun_started_and_starts_none(run, launched, asked):
    launched(0, 2)
    seen = run(learners=asked)
    assert (seen.started, seen.joined) == ([], [CPU])
    assert seen.opened[0][1] is seen.ranks


def test_process_of_rank_1_trains_with_the_job_of_the_first_process(run, launched):
    seen = run(learners=2)
    first, ranks = iter(seen.ranks.notes), seen.ranks
    launched(1, 2)
    ranks.rank, ranks.all_gather_object = 1, lambda note: [next(first), note]
    run(learners=2)
    (sent_job, _), (received_job, group) = seen.opened
    assert received_job == sent_job.for_others()
    assert group is ranks
    assert seen.threads == [2, 2]


def test_environment_objects_for_several_learners_and_a_wrong_number_of_learners_are_refused(
    run, launched, tmp_path
):
    job = JobSpec([object()], api.read_settings(TOY), seed=1, run_dir=tmp_path)
    with pytest.raises(SettingsError, match="each of the 2 learners starts an executable"):
        api.train(job, learners=2)
    launched(0, 2)
    with pytest.raises(SettingsError, match="3 does not match the 2 processes"):
        api.train(replace(job, env="game"), learners=3)


def test_single_learner_keeps_threaded_true_and_restores_the_number_of_torch_threads(
    run, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    file = tmp_path / "trainer.yaml"
    file.write_text("behaviors: {A: {trainer_type: ppo, threaded: true, max_steps: 123}}\n")
    seen = run(file, torch_threads=2)
    assert (seen.started, seen.joined, seen.ranks.notes) == ([], [], [])
    settings = seen.opened[0][0].settings.behaviors["A"]
    assert (settings.threaded, settings.max_steps) == (True, 123)
    assert not caplog.records
    assert seen.threads == [2]
    assert torch.get_num_threads() == 1


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(group_module, "_POLL_S", 0.01)
    monkeypatch.setattr(group_module, "_REASON_S", 0.05)
    ranks = DistributedGroup(HashStore(), rank=0, size=1, device=CPU)
    yield ranks
    ranks.close()


def test_all_gather_object_calls_the_function_look_while_it_waits_for_other_processes(
    alone, monkeypatch
):
    looked = threading.Event()
    gather = group_module.dist.all_gather_object

    def waits(*arguments):
        assert looked.wait(10), "`look` was not called"
        return gather(*arguments)

    monkeypatch.setattr(group_module.dist, "all_gather_object", waits)
    assert alone.all_gather_object({"a": 1}, look=looked.set) == [{"a": 1}]


def test_waiting_for_an_ended_process_raises_an_error_with_its_exit_code(alone, monkeypatch):
    go = threading.Event()
    alone.others = SimpleNamespace(ended=lambda: {1: "has ended with exit code 3"})
    monkeypatch.setattr(group_module.dist, "all_reduce", lambda *_: go.wait(60))
    with pytest.raises(LearnerLostError, match=r"rank 1 \(of 1\) has ended with exit code 3"):
        alone.least(1)
    go.set()


def test_broken_connection_raises_learner_lost_error_with_the_reason(alone, monkeypatch):
    fails = Mock(side_effect=RuntimeError("connection\nreset"))
    monkeypatch.setattr(group_module.dist, "all_reduce", fails)
    for wait in (lambda: alone.most(1), lambda: alone.average_gradients_(torch.zeros(1))):
        with pytest.raises(LearnerLostError, match=r"no longer answers \(connection reset"):
            wait()


def test_standard_deviations_are_computed_in_float64(alone):
    values = torch.tensor([[1e8, 0.0], [1e8 + 8.0, 1.0]])
    assert alone.std(values).tolist() == [4.0, 0.5]
    assert alone.std(values).dtype == torch.float32


def test_average_over_processes_is_weighted_by_the_number_of_rows_of_each_process(
    alone, monkeypatch
):
    alone.size = 4
    monkeypatch.setattr(alone, "gathered", lambda value: [value, value // 2, value // 2, value * 0])
    means = torch.tensor([3.0])
    alone.average_(means, 10)
    assert means.tolist() == [3.0 * 2.0 / 4]  # the other three processes add nothing here


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("10.0.0.1", None)])
def test_learners_of_one_machine_communicate_over_the_loopback_interface(
    monkeypatch, address, name
):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(group_module.dist, "init_process_group", lambda *_, **__: None)
    DistributedGroup(HashStore(), rank=0, size=1, device=CPU)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == name


def test_started_process_ends_if_the_first_process_ends_before_they_connect(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the first process never answers
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        place |= {"RANK": "1", "WORLD_SIZE": "2", "PIPELINE_LEARNER": "1"}
        command = "from pipeline.trainer.distributed import workers; workers._GRACE_S = 0.1;"
        command += "from pipeline.trainer.worker import work; work()"
        with subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-c", command], env=os.environ | place, stdin=subprocess.PIPE
        ) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.stdin.close()  # as the system does when the first process is killed
            assert process.wait(60.0) == PipelineError.exit_code


BEFORE_ITS_PLACE = """
from datetime import timedelta
import os, signal, threading, time
import torch
from torch.distributed import TCPStore
from pipeline.errors import LearnerLostError
from pipeline.trainer.distributed import workers
from pipeline.trainer.distributed.group import DistributedGroup

class Others:
    def ended(self):
        return {1: "was ended by SIGKILL"}

def interrupt(words):
    words.get("device")  # which it says before it waits for the other
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
patience = timedelta(seconds=600)
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
place = {"rank": 0, "size": 2, "device": torch.device("cpu")}
"""
LOST = """
try:
    DistributedGroup(store, others=Others(), **place)
except LearnerLostError as error:
    print(error, flush=True)
    os._exit(7)
"""
STOPPED = """
other = store.clone()
threading.Thread(target=interrupt, args=(store.clone(),)).start()
try:
    with workers._member(store, **place):
        pass
except KeyboardInterrupt:
    print(other.get("pipeline/failed/0").decode(), flush=True)
    os._exit(7)
"""


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (LOST, "the learner of rank 1 (of 2) was ended by SIGKILL\n"),
        (STOPPED, "KeyboardInterrupt\n"),
    ],
    ids=["lost", "stopped"],
)
def test_end_of_a_process_before_the_process_group_exists_is_reported_at_once(program, told):
    done = python("-c", BEFORE_ITS_PLACE + program, check=False)
    assert (done.returncode, done.stdout) == (7, told), done.stderr


def settings(**changes):
    behavior = {"trainer_type": "ppo", "threaded": True, **changes}
    run = load_run_settings(None, overrides={"behaviors": {"A": behavior, "B": behavior}})
    return replace(run, from_file=True, refused={"C": "no"})


def job(**changes):
    env = str(Path("game").resolve())
    return JobSpec(**{"settings": settings(), "env": env} | OPTIONS | changes)


def arrived(job):
    """Return the job as `all_gather_object` delivers it."""
    return pickle.loads(pickle.dumps(job.for_others()))  # noqa: S301  # our own bytes


def test_job_spec_round_trips_with_absolute_paths():
    received = arrived(job())
    assert received == job()
    assert (received.settings.from_file, received.settings.refused) == (True, {"C": "no"})
    without = job(log_folder=None, env=None, base_port=None, init_from={})
    assert arrived(without) == without
    paths = {"run_dir": Path("runs"), "env": "game", "log_folder": Path("logs")}
    assert job(**paths, init_from={"A": Path("a.pt")}).for_others() == job()
    assert job(env=["one", "two"]).for_others().env is None, "objects are not sent"


@pytest.mark.parametrize(
    ("changes", "inference", "started", "message"),
    [
        ({}, True, False, "--inference runs in one process, not in 3"),
        ({"env": None}, False, True, "each of the 3 learners starts its own environments"),
        ({"self_play": {"save_steps": 10}}, False, True, "self-play runs in one process"),
        ({}, False, False, None),
        ({"env": ["object"]}, False, True, None),
    ],
)
def test_jobs_that_need_a_single_process_are_refused_for_several_processes(
    changes, inference, started, message
):
    if "self_play" in changes:
        changes = {"settings": settings(**changes)}
    with pytest.raises(SettingsError, match=message) if message else contextlib.nullcontext():
        refuse_single_process_only(job(**changes), 3, inference=inference, started=started)


def test_threaded_is_switched_off_with_a_warning_for_several_learners(caplog):
    caplog.set_level(logging.WARNING)
    run = load_run_settings(
        None,
        overrides={
            "default_settings": {"trainer_type": "ppo", "threaded": True},
            "behaviors": {"A": {"threaded": True}, "B": {"threaded": False}},
        },
    )
    changed = without_threaded(run)
    assert not changed.default_settings.threaded
    assert not any(behavior.threaded for behavior in changed.behaviors.values())
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert sorted(names) == ["A", "default_settings"]


ENGINE = {
    "width": 101,
    "height": 102,
    "quality_level": 3,
    "time_scale": 4.0,
    "target_frame_rate": 55,
    "capture_frame_rate": 66,
    "no_graphics": True,
}
ENV = {
    "timeout_wait": 77,
    "num_areas": 8,
    "max_lifetime_restarts": 9,
    "restarts_rate_limit_n": 2,
    "restarts_rate_limit_period_s": 33,
}


def test_executables_receive_all_engine_and_env_settings(monkeypatch, tmp_path):
    launch = Mock()
    monkeypatch.setattr(environment, "launch_workers", launch)
    run = load_run_settings(None, overrides={"engine_settings": ENGINE, "env_settings": ENV})
    options = {"env_args": ["-x"], "base_port": 6000, "log_folder": tmp_path}
    job = JobSpec(settings=run, seed=4, run_dir=Path(), env="game", num_envs=3, **options)
    environment.open_workers(job, SimpleNamespace(rank=2, size=4))
    channels = launch.call_args.kwargs["side_channels"]
    launch.assert_called_once_with(
        "game",
        3,
        additional_args=["-x"],
        seed=seeding.derive(4, "environment"),
        base_port=6000,
        first=6,
        n_all=12,
        log_folder=str(tmp_path.resolve()),
        no_graphics=True,
        no_graphics_monitor=False,
        timeout_wait=77,
        num_areas=8,
        restarts=run.env_settings,
        side_channels=channels,
    )
    assert ENV.items() <= asdict(run.env_settings).items()
    # Each worker has its own channels, and the engine gets its settings through them.
    expected = EngineConfigurationChannel()
    expected.set_configuration_parameters(101, 102, 3, 4.0, 55, 66)
    first, second = channels(), channels()
    assert not {id(channel) for channel in first} & {id(channel) for channel in second}
    (engine,) = [channel for channel in first if isinstance(channel, EngineConfigurationChannel)]
    assert SideChannelManager([engine]).outgoing() == SideChannelManager([expected]).outgoing()
    other_types = {EnvironmentParametersChannel, StatsSideChannel, StateChannel}
    assert {type(channel) for channel in first} == {EngineConfigurationChannel, *other_types}


@pytest.fixture
def others(monkeypatch, tmp_path):
    """Two learners of `LocalWorkers` without processes."""

    def process(_command, **options):
        return Mock(**options | {"poll.return_value": None, "stdin": Mock()})

    monkeypatch.setattr(workers.subprocess, "Popen", process)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return workers.LocalWorkers(2, port=4321, threads=3, log_folder=tmp_path / "logs")


def test_started_processes_get_store_rank_and_size_by_environment_variables(others):
    source = str(Path(workers.__file__).parents[3])
    for rank, process in others._processes.items():
        assert process.start_new_session
        ranks = {name: process.env[name] for name in ("RANK", "LOCAL_RANK")}
        assert ranks == {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert process.env["WORLD_SIZE"] == process.env["LOCAL_WORLD_SIZE"] == "3"
        assert (process.env["MASTER_ADDR"], process.env["MASTER_PORT"]) == ("127.0.0.1", "4321")
        assert process.env["OMP_NUM_THREADS"] == "3"
        assert process.env["PYTHONPATH"].split(":") == [source, "mine"]
    assert sorted(others._processes) == [1, 2]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "has ended with exit code 0"),
        (3, "has ended with exit code 3"),
        (-15, "was ended by SIGTERM"),
        (-9, "was ended by SIGKILL (by a user, or by the system for lack of memory)"),
    ],
)
def test_ended_process_is_reported_with_its_exit_code_or_signal_and_its_log(others, code, how):
    assert others.ended() == {}
    others._processes[2].poll.return_value = code
    assert others.ended() == {2: f"{how}; its log is {others.log_of(2)}"}
    assert others.log_of(2).name == "learner-2.log"


def test_only_the_first_request_to_stop_is_forwarded_to_the_other_processes(others):
    others.forward_stop(15)
    others.forward_stop(2)
    for process in others._processes.values():
        process.stdin.write.assert_called_once_with(b"15\n")


def test_learners_share_one_time_limit_to_end_and_are_killed_after_this_limit(others, monkeypatch):
    now, waits = [100.0], []

    def wait(seconds=None):
        if seconds is not None:
            waits.append(seconds)
            now[0] += seconds
            raise workers.subprocess.TimeoutExpired("learner", seconds)

    for process in others._processes.values():
        process.wait.side_effect = wait
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    others.end(15.0)
    assert waits == [15.0, 0.0]
    for process in others._processes.values():
        assert (process.stdin.close.called, process.kill.called) == (True, True)


def test_started_learners_are_ended_if_another_learner_cannot_be_started(monkeypatch, tmp_path):
    first = Mock()
    monkeypatch.setattr(workers.subprocess, "Popen", Mock(side_effect=[first, MemoryError]))
    with pytest.raises(MemoryError):
        workers.LocalWorkers(2, port=4321, threads=3, log_folder=tmp_path / "logs")
    assert first.wait.call_args.args == (pytest.approx(workers._SHORT_GRACE_S, abs=1.0),)


def test_each_learner_uses_the_gpu_with_its_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert workers.device_of_this_process(CPU) == CPU
    assert workers.device_of_this_process(torch.device("cuda")) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(SettingsError, match="cuda:0 is one GPU, but each learner needs its own"):
        workers.device_of_this_process(torch.device("cuda:0"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SettingsError, match="local rank 2, but this machine has 2 GPUs"):
        workers.device_of_this_process(torch.device("cuda"))


@pytest.mark.parametrize("what", ["version", "torch"])
def test_learner_with_another_version_of_pipeline_or_torch_is_refused(what):
    def exchanged(note):
        assert isinstance(note, dict)  # the job is not sent to a process with another version
        return [note, {**note, what: "0"}]

    with pytest.raises(PipelineError, match=f"rank 1 has {what} 0, but the learner of rank 0 has"):
        workers.broadcast_job(SimpleNamespace(all_gather_object=exchanged), job())
    group = SimpleNamespace(all_gather_object=lambda note: [note, note])
    assert workers.broadcast_job(group, job()) == job()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (Interrupted("asked", exit_code=143), 143),
        (SettingsError("wrong"), SettingsError.exit_code),
        (OSError("gone"), PipelineError.exit_code),
    ],
)
def test_worker_process_exits_with_the_code_of_its_error(monkeypatch, error, code):
    monkeypatch.setattr(worker, "run_as_learner", Mock(side_effect=error))
    monkeypatch.setenv("PIPELINE_LEARNER", "1")
    assert worker.work() == code
