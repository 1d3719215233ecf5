"""What a run's processes tell each other, start each other with, and keep."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline import seeding
from pipeline.data.columns import Columns, Field
from pipeline.data.replay import Replay
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    SideChannelManager,
    StateChannel,
    StatsAggregationMethod,
    StatsSideChannel,
)
from pipeline.errors import CheckpointError, Interrupted, PipelineError, SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer import environment, worker
from pipeline.trainer.api import refuse_alone, unthreaded
from pipeline.trainer.checkpoints.replay_files import (
    delete_older_replays,
    load_replay,
    save_replay,
)
from pipeline.trainer.distributed import workers
from pipeline.trainer.environment import JobSpec
from pipeline.trainer.statistics import Statistics

CPU = torch.device("cpu")


def settings(**changes):
    behavior = {"trainer_type": "ppo", "threaded": True, **changes}
    run = load_run_settings(None, overrides={"behaviors": {"A": behavior, "B": behavior}})
    return replace(run, from_file=True, refused={"C": "no"})


def work(**changes):
    values = {
        "settings": settings(),
        "seed": 5,
        "run_dir": Path("runs").resolve(),
        "env": str(Path("game").resolve()),
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
    return JobSpec(**(values | changes))


def arrived(job):
    """Return the job as `all_gather_object` delivers it."""
    return pickle.loads(pickle.dumps(job.for_others()))  # noqa: S301  # our own bytes


def test_work_arrives_as_it_was_told():
    received = arrived(work())
    assert received == work()
    assert (received.settings.from_file, received.settings.refused) == (True, {"C": "no"})
    without = work(log_folder=None, env=None, base_port=None, init_from={})
    assert arrived(without) == without


def test_paths_are_the_same_for_a_process_in_another_folder():
    paths = {
        "run_dir": Path("runs"),
        "env": "game",
        "log_folder": Path("logs"),
        "init_from": {"A": Path("a.pt")},
    }
    assert work(**paths).for_others() == work()


def test_environments_that_are_objects_stay_where_they_are():
    assert work(env=["one", "two"]).for_others().env is None


@pytest.mark.parametrize(
    ("changes", "inference", "started", "message"),
    [
        ({}, True, False, "--inference plays in one process, and 3 learners"),
        ({"env": None}, False, True, "3 learners need environments of their own"),
        (
            {"settings": settings(self_play={"save_steps": 10})},
            False,
            True,
            "games are played in one process",
        ),
    ],
)
def test_what_only_one_process_can_do_is_refused(changes, inference, started, message):
    with pytest.raises(SettingsError, match=message):
        refuse_alone(work(**changes), 3, inference=inference, started=started)


def test_executables_and_processes_with_environments_of_their_own_may_learn_together():
    refuse_alone(work(), 3, inference=False, started=False)
    refuse_alone(work(env=["object"]), 3, inference=False, started=True)


def test_several_learners_do_not_learn_in_threads(caplog):
    caplog.set_level(logging.WARNING)
    run = load_run_settings(
        None,
        overrides={
            "default_settings": {"trainer_type": "ppo", "threaded": True},
            "behaviors": {"A": {"threaded": True}, "B": {"threaded": False}},
        },
    )
    changed = unthreaded(run)
    assert not changed.default_settings.threaded
    assert not any(behavior.threaded for behavior in changed.behaviors.values())
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert sorted(names) == ["A", "default_settings"]


def test_numbers_of_several_processes_are_added_up_and_the_firsts_latest_values_count():
    processes = []
    for rank in range(2):
        numbers = Statistics()
        numbers.add("mean", 1.0 + rank)
        numbers.add_episodes([10.0 * (rank + 1)], [4])
        numbers.add_environment(
            {
                "sum": [(3.0, StatsAggregationMethod.SUM)],
                "latest": [(5.0 + rank, StatsAggregationMethod.MOST_RECENT)],
                f"only {rank}": [(7.0, StatsAggregationMethod.MOST_RECENT)],
                "spread": [(float(rank), StatsAggregationMethod.HISTOGRAM)],
            }
        )
        processes.append(Statistics.of(json.loads(json.dumps(numbers.new()))))
    together = Statistics()
    together.add("mean", 6.0)
    together.add_from(processes)
    assert together.take_ended() == [10.0, 20.0]
    assert together.returns == [10.0, 20.0]
    assert list(together.recent) == [10.0, 20.0]
    assert together.n_episodes == 2
    assert together.distributions() == {"spread": [0.0, 1.0]}
    values = together.period()
    assert values["mean"] == 3.0
    assert (values["sum"], values["latest"]) == (6.0, 5.0)
    assert (values["only 0"], values["only 1"]) == (7.0, 7.0)


def learner(*, keeps=True, step=30):
    replay = Replay(Columns({"reward": Field(shape=())}, [Field(shape=(2,))]), capacity=8)
    return SimpleNamespace(step=step, replay_to_keep=replay if keeps else None)


def test_a_replay_is_kept_beside_the_checkpoint_and_older_ones_go(tmp_path, caplog, monkeypatch):
    for step in (10, 20, 30):
        saved = save_replay(tmp_path, learner(step=step))
        assert saved["replay"] == f"replay-{step}.npz"
    (tmp_path / "resume.pt").touch()
    delete_older_replays(tmp_path, {})
    assert len(list(tmp_path.glob("*.npz"))) == 3
    delete_older_replays(tmp_path, {"replay": "replay-30.npz"})
    assert {path.name for path in tmp_path.iterdir()} == {"replay-30.npz", "resume.pt"}
    with monkeypatch.context() as patch:  # somebody else was quicker
        patch.setattr(Path, "glob", lambda self, _: [self / "replay-7.npz"])
        delete_older_replays(tmp_path, {"replay": "replay-30.npz"})
    load_replay(tmp_path, saved, learner())
    load_replay(tmp_path, {"replay": "replay-30.npz"}, learner())  # of a version without digests
    load_replay(tmp_path, {}, learner(keeps=False))
    assert not caplog.records
    assert save_replay(tmp_path, learner(keeps=False)) == {}
    with pytest.raises(CheckpointError, match="replay-30"):
        save_replay(tmp_path / "resume.pt", learner())


@pytest.mark.parametrize("damage", ["nothing named", "gone", "objects", "cut", "changed", "header"])
def test_a_replay_that_cannot_be_read_is_begun_anew_with_a_warning(tmp_path, caplog, damage):
    saved = save_replay(tmp_path, learner())
    path = tmp_path / saved["replay"]
    if damage == "gone":
        path.unlink()
    elif damage == "objects":  # to read those would run what the file says
        state = learner().replay_to_keep.state_dict()
        first = next(iter(state))
        np.savez(path, **{**state, first: np.array([{"a": 1}], dtype=object)})
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "header":
        with zipfile.ZipFile(path, "w") as archive:  # with checksums that are right
            archive.writestr("place.npy", b"\x93NUMPY\x01\x00\x06\x00('a',\n")
    elif damage == "changed":
        state = learner().replay_to_keep.state_dict()
        np.savez(path, **{**state, "place": np.full(3, 99)})
    load_replay(tmp_path, {} if damage == "nothing named" else saved, learner())
    (record,) = caplog.records
    assert "was unable to load, starting from scratch" in record.getMessage()
    assert ("save_replay_buffer: true" in record.getMessage()) == (damage == "nothing named")


def launched(monkeypatch, *, rank=0, size=1, **changes):
    """The arguments that executables are launched with."""
    seen = {}

    def launch(file_name, n_workers, **options):
        seen.update(options, file_name=file_name, n_workers=n_workers)

    monkeypatch.setattr(environment, "launch_workers", launch)
    options = {
        "engine_settings": {
            "width": 101,
            "height": 102,
            "quality_level": 3,
            "time_scale": 4.0,
            "target_frame_rate": 55,
            "capture_frame_rate": 66,
            "no_graphics": True,
        },
        "env_settings": {
            "timeout_wait": 77,
            "num_areas": 8,
            "max_lifetime_restarts": 9,
            "restarts_rate_limit_n": 2,
            "restarts_rate_limit_period_s": 33,
        },
    }
    run = load_run_settings(None, overrides=options)
    job = JobSpec(settings=run, seed=4, run_dir=Path(), env="game", num_envs=3, **changes)
    environment.open_workers(job, SimpleNamespace(rank=rank, size=size))
    return seen


def test_executables_are_told_all_that_the_settings_say(monkeypatch, tmp_path):
    seen = launched(
        monkeypatch, env_args=["-x"], base_port=6000, log_folder=tmp_path, rank=2, size=4
    )
    assert (seen["file_name"], seen["n_workers"], seen["additional_args"]) == ("game", 3, ["-x"])
    assert seen["seed"] == seeding.derive(4, "environment")
    assert seen["base_port"] == 6000
    assert (seen["first"], seen["n_all"]) == (6, 12)
    assert seen["log_folder"] == str(tmp_path.resolve())
    assert (seen["no_graphics"], seen["no_graphics_monitor"]) == (True, False)
    assert (seen["timeout_wait"], seen["num_areas"]) == (77, 8)
    limits = seen["restarts"]
    assert limits.max_lifetime_restarts == 9
    assert (limits.restarts_rate_limit_n, limits.restarts_rate_limit_period_s) == (2, 33)


def test_the_engine_is_told_its_settings_through_the_channels_of_each_worker(monkeypatch):
    channels = launched(monkeypatch)["side_channels"]
    expected = EngineConfigurationChannel()
    expected.set_configuration_parameters(101, 102, 3, 4.0, 55, 66)
    first, second = channels(), channels()
    assert not {id(channel) for channel in first} & {id(channel) for channel in second}
    (engine,) = [channel for channel in first if isinstance(channel, EngineConfigurationChannel)]
    assert SideChannelManager([engine]).outgoing() == SideChannelManager([expected]).outgoing()
    other_types = {EnvironmentParametersChannel, StatsSideChannel, StateChannel}
    assert {type(channel) for channel in first} == {EngineConfigurationChannel, *other_types}


class Process:
    """Stands for a learner's process: its environment, what it was sent, and its exit code."""

    def __init__(self, _command, **options):
        self.env, self.code, self.sent = options["env"], None, []
        self.stdin = self
        self.own_session = options["start_new_session"]

    def write(self, content):
        self.sent.append(content)

    def flush(self):
        pass

    close = flush

    def poll(self):
        return self.code

    def wait(self, _timeout):
        return self.code


@pytest.fixture
def others(monkeypatch, tmp_path):
    monkeypatch.setattr(workers.subprocess, "Popen", Process)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return workers.LocalWorkers(2, port=4321, threads=3, log_folder=tmp_path / "logs")


def test_further_learners_know_the_store_their_rank_and_how_many_they_are(others):
    source = str(Path(workers.__file__).parents[3])
    for rank, process in others._processes.items():
        assert process.own_session
        ranks = {name: process.env[name] for name in ("RANK", "LOCAL_RANK")}
        assert ranks == {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert process.env["WORLD_SIZE"] == process.env["LOCAL_WORLD_SIZE"] == "3"
        assert (process.env["MASTER_ADDR"], process.env["MASTER_PORT"]) == ("127.0.0.1", "4321")
        assert process.env["OMP_NUM_THREADS"] == "3"
        assert process.env["PYTHONPATH"].split(":") == [source, "mine"]
    assert sorted(others._processes) == [1, 2]


def test_how_each_learner_has_ended_is_told_with_its_log(others):
    assert others.ended() == {}
    others._processes[1].code = -signal.SIGKILL
    others._processes[2].code = 3
    ended = others.ended()
    assert ended[1].startswith("was ended by SIGKILL (by hand, or for lack of memory); its log is")
    assert ended[2] == f"has ended with exit code 3; its log is {others.log_of(2)}"
    others._processes[1].code = -signal.SIGTERM
    assert others.ended()[1].startswith("was ended by SIGTERM; its log is")


def test_learners_are_asked_to_stop_once(others):
    others.pass_on(15)
    others.pass_on(2)
    assert [process.sent for process in others._processes.values()] == [[b"15\n"], [b"15\n"]]


def test_learners_have_one_time_to_end_in_and_then_are_killed(others, monkeypatch):
    now, waits, killed = [100.0], [], []

    def wait(process, seconds=None):
        if seconds is not None:
            waits.append(seconds)
            now[0] += seconds
            raise workers.subprocess.TimeoutExpired("learner", seconds)

    def kill(process):
        killed.append(process)

    monkeypatch.setattr(Process, "wait", wait)
    monkeypatch.setattr(Process, "kill", kill, raising=False)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    others.end(15.0)
    assert (waits, killed) == ([15.0, 0.0], list(others._processes.values()))


def test_learners_that_are_started_end_with_a_start_that_fails(monkeypatch, tmp_path):
    ended = []

    class Second(Process):
        def __init__(self, *arguments, **options):
            if options["env"]["RANK"] == "2":
                raise MemoryError
            super().__init__(*arguments, **options)

        def wait(self, seconds):
            ended.append(seconds)

    monkeypatch.setattr(workers.subprocess, "Popen", Second)
    with pytest.raises(MemoryError):
        workers.LocalWorkers(2, port=4321, threads=3, log_folder=tmp_path / "logs")
    assert ended == [pytest.approx(workers._HURRY_S, abs=1.0)]


def test_each_learner_takes_the_gpu_of_its_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert workers.of_this_process(CPU) == CPU
    assert workers.of_this_process(torch.device("cuda")) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(SettingsError, match="cuda:0 is one GPU, but each learner needs its own"):
        workers.of_this_process(torch.device("cuda:0"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SettingsError, match="local rank 2, and there are 2 GPUs here"):
        workers.of_this_process(torch.device("cuda"))


@pytest.mark.parametrize("what", ["version", "torch"])
def test_a_learner_of_another_version_is_refused(what):
    def exchanged(note):
        assert isinstance(note, dict)  # and not the job, which is not sent to another version
        return [note, {**note, what: "0"}]

    with pytest.raises(PipelineError, match=f"rank 1 has {what} 0, that of rank 0 has"):
        workers.broadcast_job(SimpleNamespace(all_gather_object=exchanged), work())
    group = SimpleNamespace(all_gather_object=lambda note: [note, note])
    assert workers.broadcast_job(group, work()) == work()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (Interrupted("asked", exit_code=143), 143),
        (SettingsError("wrong"), SettingsError.exit_code),
        (OSError("gone"), PipelineError.exit_code),
    ],
)
def test_a_further_learner_ends_with_the_code_of_what_ended_it(monkeypatch, error, code):
    def take_part():
        if error is not None:
            raise error

    monkeypatch.setattr(worker, "take_part", take_part)
    monkeypatch.setenv("PIPELINE_LEARNER", "1")
    assert worker.work() == code
