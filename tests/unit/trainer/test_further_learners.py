"""How several processes of a run join, and what each reports when it ends."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from interpreter import python
from torch.distributed import HashStore, PrefixStore

from pipeline import __version__
from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.errors import Interrupted, LearnerLostError, PipelineError, SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer import api
from pipeline.trainer.checkpoints.file import save_checkpoint
from pipeline.trainer.distributed import group as group_module
from pipeline.trainer.distributed import workers
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.environment import JobSpec

CPU = torch.device("cpu")
TOY = {"behaviors": {"A": {"trainer_type": "ppo", "threaded": True}}}


class OpenedError(Exception):
    pass


@pytest.fixture
def launched(monkeypatch):
    """This process as one of several that have been started."""

    def be(rank, size):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": rank, "WORLD_SIZE": size}
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))

    return be


class ProcessGroup:
    """Stands for a `DistributedGroup`: keeps its arguments, and whether it was closed."""

    made: list[ProcessGroup]

    def __init__(self, store, *, rank, size, device, others=None, stop=None):
        self.store, self.rank, self.size, self.device = store, rank, size, device
        self.others, self.stop, self.closed = others, stop, False
        type(self).made.append(self)

    def close(self):
        self.closed = True


class Others:
    """The processes that the first one starts, and how long they get to end."""

    def __init__(self, n, **options):
        self.n, self.options, self.grace = n, options, []

    def end(self, grace_s):
        self.grace.append(grace_s)


@pytest.fixture
def made(monkeypatch):
    ProcessGroup.made = []
    monkeypatch.setattr(workers, "DistributedGroup", ProcessGroup)
    monkeypatch.setattr(workers, "LocalWorkers", Others)
    return ProcessGroup.made


def reported(store, rank):
    """The failure that a process has reported, as the processes waiting for it read it."""
    ours = PrefixStore("pipeline", store)
    key = f"failed/{rank}"
    until = time.monotonic() + 0.5  # it goes over a connection of its own
    while not ours.check([key]) and time.monotonic() < until:
        time.sleep(0.01)
    return [ours.get(key).decode()] if ours.check([key]) else []


@pytest.mark.parametrize(
    ("error", "failures", "grace"),
    [
        (None, [], workers._GRACE_S),
        (Interrupted("asked", exit_code=143), ["asked"], workers._GRACE_S),
        (PipelineError("no luck"), ["no luck"], workers._HURRY_S),
        (KeyError(), ["KeyError"], workers._HURRY_S),
        (LearnerLostError("rank 1 is gone"), [], workers._HURRY_S),
    ],
)
def test_the_first_process_starts_the_others_and_ends_them(made, tmp_path, error, failures, grace):
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, workers.started(3, device=CPU, threads=2, log_folder=tmp_path) as ranks:
        assert ranks.store.get("device") == b"cpu"
        if error is not None:
            raise error
    (member,) = made
    assert (member.rank, member.size, member.device, member.closed) == (0, 3, CPU, True)
    local = member.others
    assert (local.n, local.grace, reported(member.store, 0)) == (2, [grace], failures)
    assert local.options == {"port": local.options["port"], "threads": 2, "log_folder": tmp_path}
    assert local.options["port"] > 0


@pytest.mark.parametrize("by", ["torchrun", "the first process"])
def test_a_further_process_joins_with_the_device_of_the_first(made, monkeypatch, launched, by):
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
        assert not ranks.closed
        assert ends == (["with parent"] if by == "torchrun" else [ranks.stop])
    (member,) = made
    assert (member.rank, member.size, member.device, member.closed) == (2, 3, CPU, True)
    assert member.others is None
    assert calls == [("env://", 2, 3, group_module.PATIENCE_S)]


@pytest.mark.parametrize("at", ["device", "group", "work"])
def test_whatever_ends_a_further_process_is_told_to_those_that_wait(
    made, monkeypatch, launched, at
):
    store = HashStore()
    store.set("device", "cuda" if at == "device" else "cpu")
    monkeypatch.setattr(workers, "rendezvous", lambda *_, **__: iter([(store, 2, 3)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(workers, "_follow_first_process", lambda _: None)

    def refuses(*_, **__):
        raise PipelineError("no luck")

    if at == "device":
        monkeypatch.setattr(workers, "usable_device", refuses)
    if at == "group":
        monkeypatch.setattr(workers, "DistributedGroup", refuses)
    launched(2, 3)
    monkeypatch.setenv("PIPELINE_LEARNER", "1")
    with pytest.raises(PipelineError, match="no luck"), workers.joined():
        refuses()
    assert reported(store, 2) == ["no luck"]
    assert [group.closed for group in made] == ([True] if at == "work" else [])


class Said:
    """Stands for the group of all processes, and keeps what it is sent."""

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

    @contextlib.contextmanager
    def started(n, **options):
        seen.started.append((n, options))
        yield seen.ranks

    @contextlib.contextmanager
    def joined(device=None):
        seen.joined.append(device)
        yield seen.ranks

    def opened(job, group):
        seen.opened.append((job, group))
        seen.threads.append(torch.get_num_threads())
        raise OpenedError

    monkeypatch.setattr(api, "started", started)
    monkeypatch.setattr(api, "joined", joined)
    monkeypatch.setattr(api, "open_workers", opened)

    def train(settings=TOY, **changes):
        options = {"seed": 3, "run_dir": tmp_path / "run", "torch_threads": 2} | changes
        with pytest.raises(OpenedError):
            api.train("game", settings, **options)
        return seen

    return train


def test_a_run_opens_its_environments_as_it_was_asked(run, tmp_path):
    save_checkpoint(tmp_path / "a.pt", {"learner": {}})
    options = {
        "seed": 4,
        "run_dir": tmp_path,
        "num_envs": 2,
        "env_args": ["-x"],
        "base_port": 6000,
        "log_folder": tmp_path / "logs",
        "init_from": {"A": tmp_path / "a.pt"},
        "whole_weights": True,
        "resume": True,
        "torch_threads": 2,
        "starting_lesson": 1,
    }
    run_settings = load_run_settings(None, overrides=TOY)
    job = JobSpec(env="game", settings=run_settings.with_seed(4), **options)
    assert run(run_settings, **options).opened == [(job, SINGLE_PROCESS)]


@pytest.mark.parametrize("logs", [None, "elsewhere"])
def test_learners_are_started_and_told_what_the_first_was_asked(run, tmp_path, logs):
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
def test_processes_that_are_there_already_are_joined(run, launched, asked):
    launched(0, 2)
    seen = run(learners=asked)
    assert (seen.started, seen.joined) == ([], [CPU])
    assert seen.opened[0][1] is seen.ranks


def test_a_further_process_does_what_the_first_was_asked(run, launched):
    seen = run(learners=2)
    first, ranks = iter(seen.ranks.notes), seen.ranks
    launched(1, 2)
    ranks.rank, ranks.all_gather_object = 1, lambda note: [next(first), note]
    run(learners=2)
    (sent_job, _), (received_job, group) = seen.opened
    assert received_job == sent_job.for_others()
    assert group is ranks
    assert seen.threads == [2, 2]


def test_another_number_of_learners_than_processes_is_refused(launched, tmp_path):
    launched(0, 2)
    with pytest.raises(SettingsError, match="3 learners are asked for, but 2 processes"):
        api.train("game", TOY, seed=1, run_dir=tmp_path, learners=3)


def test_one_learner_asks_nobody_and_keeps_its_thread(run, caplog):
    caplog.set_level(logging.WARNING)
    seen = run()
    assert (seen.started, seen.joined, seen.ranks.notes) == ([], [], [])
    assert seen.opened[0][0].settings.behaviors["A"].threaded
    assert not caplog.records


def test_settings_may_be_the_path_of_a_file(run, tmp_path):
    file = tmp_path / "trainer.yaml"
    file.write_text("behaviors:\n  A:\n    trainer_type: ppo\n    max_steps: 123\n")
    assert run(file).opened[0][0].settings.behaviors["A"].max_steps == 123


def test_training_has_its_threads_and_gives_back_those_before_it(run):
    assert run(torch_threads=2).threads == [2]
    assert torch.get_num_threads() == 1


def test_environments_of_this_process_are_refused_for_learners_yet_to_start(run, tmp_path):
    with pytest.raises(SettingsError, match="2 learners need an executable that each can start"):
        api.train([object()], TOY, seed=1, run_dir=tmp_path, learners=2)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(group_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(group_module, "_REASON_S", 0.05)
    ranks = DistributedGroup(HashStore(), rank=0, size=1, device=CPU)
    yield ranks
    ranks.close()


def test_who_waits_for_others_looks_at_what_else_happens(alone, monkeypatch):
    looked = threading.Event()
    gather = group_module.dist.all_gather_object

    def waits(*arguments):
        assert looked.wait(10), "nobody looked"
        return gather(*arguments)

    monkeypatch.setattr(group_module.dist, "all_gather_object", waits)
    assert alone.all_gather_object({"a": 1}, look=looked.set) == [{"a": 1}]


def test_who_waits_for_a_process_that_has_ended_says_so(alone, monkeypatch):
    go = threading.Event()
    alone.others = SimpleNamespace(ended=lambda: {1: "has ended with exit code 3"})
    monkeypatch.setattr(group_module.dist, "all_reduce", lambda *_: go.wait(60))
    with pytest.raises(LearnerLostError, match=r"rank 1 \(of 1\) has ended with exit code 3"):
        alone.least(1)
    go.set()


def test_a_failure_without_a_reason_is_told_in_its_own_words(alone, monkeypatch):
    def fails(*_):
        raise RuntimeError("connection\nreset")

    monkeypatch.setattr(group_module.dist, "all_reduce", fails)
    for wait in (lambda: alone.most(1), lambda: alone.average_gradients_(torch.zeros(1))):
        with pytest.raises(LearnerLostError, match=r"does not answer any more \(connection reset"):
            wait()


def test_deviations_are_computed_in_float64(alone):
    values = torch.tensor([[1e8, 0.0], [1e8 + 8.0, 1.0]])
    assert alone.std(values).tolist() == [4.0, 0.5]
    assert alone.std(values).dtype == torch.float32


def test_a_process_with_most_rows_weighs_more_in_an_average(alone, monkeypatch):
    alone.size = 4
    monkeypatch.setattr(alone, "gathered", lambda value: [value, value // 2, value // 2, value * 0])
    means = torch.tensor([3.0])
    alone.average_(means, 10)
    assert means.tolist() == [3.0 * 2.0 / 4]  # the other three add nothing here


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("10.0.0.1", None)])
def test_learners_of_one_machine_talk_over_its_loopback(monkeypatch, address, name):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(group_module.dist, "init_process_group", lambda *_, **__: None)
    DistributedGroup(HashStore(), rank=0, size=1, device=CPU)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == name


def test_a_further_process_ends_also_where_the_first_is_gone_before_they_met(tmp_path):
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
            process.stdin.close()  # as the system does for a process that is killed
            assert process.wait(60.0) == PipelineError.exit_code


def test_at_the_end_every_process_is_told_and_waited_for(tmp_path, monkeypatch):
    waits = []
    processes = [SimpleNamespace(stdin=io.BytesIO(), wait=waits.append) for _ in range(2)]
    started = iter(processes)
    monkeypatch.setattr(workers.subprocess, "Popen", lambda *_, **__: next(started))
    workers.LocalWorkers(2, port=1, threads=1, log_folder=tmp_path).end(5.0)
    assert all(process.stdin.closed for process in processes)
    assert all(4.0 < wait <= 5.0 for wait in waits)
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "has ended with exit code 0"),
        (3, "has ended with exit code 3"),
        (-15, "was ended by SIGTERM"),
        (-9, "was ended by SIGKILL (by hand, or for lack of memory)"),
    ],
)
def test_a_process_that_has_ended_is_named_with_its_end_and_its_log(
    tmp_path, monkeypatch, code, how
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    processes = iter([SimpleNamespace(poll=lambda: None), SimpleNamespace(poll=lambda: code)])
    monkeypatch.setattr(workers.subprocess, "Popen", lambda *_, **__: next(processes))
    local = workers.LocalWorkers(2, port=1, threads=1, log_folder=tmp_path)
    assert local.ended() == {2: f"{how}; its log is {tmp_path}/learner-2.log"}


LOST = """
from datetime import timedelta
import os
import torch
from torch.distributed import TCPStore
from pipeline.errors import LearnerLostError
from pipeline.trainer.distributed.group import DistributedGroup

class Others:
    def ended(self):
        return {1: "was ended by SIGKILL"}

patience = timedelta(seconds=600)
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
try:
    DistributedGroup(store, rank=0, size=2, device=torch.device("cpu"), others=Others())
except LearnerLostError as error:
    print(error, flush=True)
    os._exit(7)
"""


def test_a_process_that_ends_before_it_has_its_place_is_missed_at_once():
    done = python("-c", LOST, check=False)
    assert (done.returncode, done.stdout) == (
        7,
        "the learner of rank 1 (of 2) was ended by SIGKILL\n",
    ), done.stderr


STOPPED = """
from datetime import timedelta
import os, signal, threading, time
import torch
from torch.distributed import TCPStore
from pipeline.trainer.distributed import workers

def interrupt(words):
    words.get("device")  # which it says before it waits for the other
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
patience = timedelta(seconds=600)
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
other = store.clone()
threading.Thread(target=interrupt, args=(store.clone(),)).start()
try:
    with workers._member(store, rank=0, size=2, device=torch.device("cpu")):
        pass
except KeyboardInterrupt:
    print(other.get("pipeline/failed/0").decode(), flush=True)
    os._exit(7)
"""


def test_a_process_that_is_stopped_before_it_has_its_place_says_so_and_ends():
    done = python("-c", STOPPED, check=False)
    assert (done.returncode, done.stdout) == (7, "KeyboardInterrupt\n"), done.stderr
