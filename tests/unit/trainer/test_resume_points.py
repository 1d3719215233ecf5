"""Resume points, and the record of interruptions that were not resumed exactly."""

import copy
import logging
import os
import signal
from collections import Counter
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from histories import plain
from steps import take_turn
from stops_after import StopsAfter
from toys import Corridor

import pipeline
from pipeline.dag import provenance
from pipeline.dag.stages import train
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import Interrupted
from pipeline.settings import load_run_settings
from pipeline.trainer.checkpoints.file import load_checkpoint, mapped, save_checkpoint
from pipeline.trainer.checkpoints.manager import CheckpointManager, NullCheckpointManager
from pipeline.trainer.checkpoints.restore import latest_run, load_policy, resumes_exactly
from pipeline.trainer.checkpoints.resume_points import JointResumePoints
from pipeline.trainer.distributed.sync import Synchronizer
from pipeline.trainer.loop import result_of
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.stopping import StopRequest


class Stateless(Corridor):
    def state_dict(self):
        return None


@pytest.fixture
def run(quick, make_loop, in_process):
    """Train or resume the run; the run stops when `StopRequest` was called `stop` times."""

    def train(toy, stop=None, **changes):
        with WorkerSet([in_process(toy(n_agents=4))]) as workers:
            loop = make_loop(workers, quick(**changes), resume=True)
            return loop.run(StopRequest() if stop is None else StopsAfter(stop))

    return train


def test_exact_resume_records_no_interruption(run, quick, tmp_path):
    with pytest.raises(Interrupted):
        run(Corridor, stop=80)
    assert resumes_exactly(tmp_path, quick())
    assert run(Corridor).interrupted == ()
    assert "interrupted" not in load_checkpoint(tmp_path / "Toy/checkpoint.pt")["run"]


def test_resume_on_another_device_type_does_not_count_as_exact(run, quick, tmp_path):
    with pytest.raises(Interrupted):
        run(Corridor, stop=80)
    path = tmp_path / "Toy/checkpoint.pt"
    state = load_checkpoint(path)
    of_cuda = torch.zeros(16, dtype=torch.uint8)  # the size of a CUDA generator's state
    state["learner"]["algorithm"]["action_stream"] = of_cuda
    save_checkpoint(path, state)
    assert resumes_exactly(tmp_path, quick(), device="cuda")
    assert not resumes_exactly(tmp_path, quick(), device="cpu")
    step = state["learner"]["step"]
    assert run(Corridor).interrupted == (step,)
    assert load_policy(path).interrupted == [step]


def test_inexact_interruptions_are_recorded_in_the_run_and_in_the_published_policy(
    run, quick, tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with pytest.raises(Interrupted):
            run(Stateless, stop=50)
    assert caplog.text.count("can be resumed but not exactly") == 2
    assert "worker 0: Stateless does not give its state" in caplog.text
    assert not resumes_exactly(tmp_path, quick())
    first, second = run(Stateless).interrupted
    assert 100 < first < second < 500
    assert not resumes_exactly(tmp_path, quick())  # though the run is complete
    made_by, entries = {"stage": "learn", "sources": {}}, []
    monkeypatch.setattr(provenance, "text", lambda history: (entries.extend(history), "")[1])
    publish(tmp_path / "Toy/checkpoint.pt", tmp_path, history=[made_by])
    assert entries == [made_by | {"interrupted_at_steps": [first, second]}]


@pytest.mark.parametrize("toy", [Corridor, Stateless])
def test_resuming_a_complete_run_records_no_interruption(run, quick, tmp_path, toy):
    """A stage resumes such a run if it was killed before it moved the results to their place."""
    complete_run = run(toy)
    content = (tmp_path / "Toy/checkpoint.pt").read_bytes()
    assert resumes_exactly(tmp_path, quick())
    assert run(toy).interrupted == complete_run.interrupted == ()
    assert (tmp_path / "Toy/checkpoint.pt").read_bytes() == content


def test_resume_point_is_discarded_if_an_environment_restarts_meanwhile(
    make_loop, make_learner, quick, in_process, monkeypatch
):
    with WorkerSet([in_process(Corridor())]) as workers:
        workers.reset()
        points = make_loop(workers, quick()).resume_points
        points.note_start([make_learner(Corridor.spec)])
        with monkeypatch.context() as patch:
            patch.setattr(workers, "state_dict", lambda: None)
            points.begin([], {})
        assert not points.is_kept
        points.begin([], {})
        assert points.is_kept


@pytest.mark.parametrize(("toy", "expected"), [(Corridor, 5), (Stateless, None)])
def test_number_of_rows_at_the_last_synchronisation_is_restored_only_on_an_exact_resume(
    run, tmp_path, monkeypatch, toy, expected
):
    """The number decides when the next synchronisation is due."""
    with pytest.raises(Interrupted):
        run(toy, stop=80)
    path = tmp_path / "Toy/checkpoint.pt"
    save_checkpoint(path, load_checkpoint(path) | {"held": 5})
    registered = []

    def register(self, learner, *, seed, held):
        registered.append(held)

    monkeypatch.setattr(Synchronizer, "register", register)
    run(toy)
    assert registered == [expected]


def test_process_of_rank_1_sends_its_resume_point_to_the_first_process(
    make_learner, quick, in_process, tmp_path
):
    learner, written = make_learner(Corridor.spec), []
    learner.sync = SimpleNamespace(held=7)
    keeper = NullCheckpointManager(tmp_path, quick())
    keeper.write = lambda *_, **__: written.append(1)
    with WorkerSet([in_process(Corridor())]) as workers:
        workers.reset()
        points = JointResumePoints(keeper, workers, 0.0)
        points.note_start([learner])
        points.begin([learner], {})
        sent = []
        points.merge([points.local_state()] * 2, lambda part: (sent.append(part), [])[1])
        assert points.is_kept
    (((states), environments),) = sent
    assert states["Toy"]["held"] == 7
    assert len(environments) == 1
    assert not written


def test_later_changes_of_the_learner_do_not_change_a_pending_resume_point(
    make_loop, make_learner, quick, in_process, tmp_path, monkeypatch
):
    learner = make_learner(Corridor.spec)
    with WorkerSet([in_process(Corridor())]) as workers:
        workers.reset()
        take_turn(learner, workers.get_steps(*workers.behavior_specs))
        points = make_loop(workers, quick()).resume_points
        points.note_start([learner])
        monkeypatch.setattr(workers, "is_split", True)
        points.begin([learner], {})
        assert points.is_pending
        before = copy.deepcopy(learner.state_dict()["algorithm"]["policy"])
        experience = copy.deepcopy(learner.experience(with_open=True))
        for values in learner.algorithm.policy.state_dict().values():
            values.add_(1.0)
        mapped(learner.experience(with_open=True), np.ndarray, lambda array: array.fill(7))
        points.complete()
    saved = load_checkpoint(tmp_path / "Toy/checkpoint.pt")
    torch.testing.assert_close(saved["learner"]["algorithm"]["policy"], before, rtol=0, atol=0)
    assert plain(saved["experience"]) == plain(experience)


def test_interruption_before_any_agent_appeared_is_recorded_at_step_0(make_loop, quick, in_process):
    with WorkerSet([in_process(Corridor())]) as workers:
        points = make_loop(workers, quick()).resume_points
        assert not points.is_exact, "the environments were not asked yet"
        points.interrupt([])
    assert points.interrupted == [0]


def test_unsaved_replay_makes_a_resume_inexact_and_is_logged(run, quick, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = {"buffer_size": 200, "batch_size": 16, "buffer_init_steps": 20}
    sac = {"trainer_type": "sac", "hyperparameters": rows, "max_steps": 200}
    with pytest.raises(Interrupted):
        run(Corridor, stop=25, **sac)
    assert "save_replay_buffer of Toy is false" in caplog.text
    assert not resumes_exactly(tmp_path, quick(**sac))
    assert len(run(Corridor, **sac).interrupted) == 1


def test_run_resumes_from_the_newest_step_at_which_all_behaviors_were_saved(quick, tmp_path):
    by_behavior = {"A": (2, 1), "B": (2, 1), "C": (1,)}
    for name, moments in by_behavior.items():
        for number, file in zip(moments, ("checkpoint.pt", "previous-checkpoint.pt"), strict=False):
            state = {"behavior": name, "run": {"steps": {"A": number}}, "learner": {}}
            save_checkpoint(tmp_path / name / file, state)
    saved = CheckpointManager(tmp_path, quick("A", "B", "C")).saved()
    assert {name: state["run"]["steps"]["A"] for name, state in saved.items()} == dict.fromkeys(
        by_behavior, 1
    )


def attempted(run_dir, settings, *, exact, learners=1):
    """Return whether a stage's attempt would continue the run."""
    attempt = SimpleNamespace(run=run_dir, resumed=True)
    experiment = SimpleNamespace(exact=exact, learners=learners)
    device = {"device": "cpu"}
    stage = SimpleNamespace(experiment=experiment, instance="a/seed1", runtime=lambda: device)
    train._restart_if_not_exact(stage, attempt, settings)
    return attempt.resumed


@pytest.mark.parametrize(
    ("env", "exact", "n_learners", "goes_on"),
    [
        (Stateless, "required", 1, False),
        (Stateless, "preferred", 1, True),
        (Corridor, "required", 1, True),
        (Corridor, "required", 2, False),
    ],
)
def test_run_that_requires_an_exact_resume_starts_at_step_0_if_this_resume_is_impossible(
    run, quick, tmp_path, env, exact, n_learners, goes_on
):
    with pytest.raises(Interrupted):
        run(env, stop=50)
    assert attempted(tmp_path, quick(), exact=exact, learners=n_learners) is goes_on
    assert any(tmp_path.iterdir()) is goes_on


class Coin(gymnasium.Env):
    """A Gymnasium environment without a state; stops the training at step `stop_at`."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, stop_at=0):
        self.n_left = stop_at

    def reset(self, *, seed=None, options=None):  # noqa: ARG002  # as Gymnasium calls it
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.n_left -= 1
        if self.n_left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.observation_space.sample(), float(action), self.n_left % 7 == 0, False, {}


def test_gymnasium_environment_without_state_makes_a_resume_inexact(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    numbers = {"batch_size": 16, "buffer_size": 64}
    behavior = {"trainer_type": "ppo", "hyperparameters": numbers, "max_steps": 400}
    settings = {"default_settings": behavior}
    with pytest.raises(Interrupted):
        pipeline.train(Coin(stop_at=200), settings, seed=1, run_dir=tmp_path)
    assert "can be resumed but not exactly: the environments then start new" in caplog.text
    assert not resumes_exactly(tmp_path, load_run_settings(None, overrides=settings))
    result = pipeline.train(Coin(), settings, seed=1, run_dir=tmp_path, resume=True)
    (policy,) = (trained.checkpoint for trained in result.behaviors.values())
    assert load_policy(policy).interrupted == list(result.interrupted) == [200]
    longer = load_run_settings(None, overrides={"default_settings": behavior | {"max_steps": 800}})
    assert not attempted(tmp_path, longer, exact="required")


def test_interruption_is_recorded_at_the_step_of_the_newest_resume_file(quick, make_loop, tmp_path):
    early, late = {"steps": {"A": 10, "B": 30}}, {"steps": {"A": 20, "B": 30}}
    states = {
        "A": {"run": late},
        "B": {"run": early},
        "C": {"run": None},
        "D": {},
        "E": {"run": {}},
    }
    assert latest_run(states) is latest_run(dict(reversed(states.items()))) is late
    assert latest_run({"D": {}}) == latest_run({}) == {}
    with WorkerSet([InProcessEnvironment(Corridor())]) as workers:
        points = make_loop(workers, quick()).resume_points
        points.resumed({**late, "interrupted": [5]}, is_exact=False)
        workers.reset()
        points.note_start([SimpleNamespace(finished=False, algorithm=SimpleNamespace(replay=None))])
    assert points.interrupted == [5, 30]
    learner = SimpleNamespace(
        step=3, n_updates=1, statistics=Statistics(), snapshot_pool=None, counts=Counter()
    )
    result = result_of({"A": learner}, tmp_path, {}, interrupted=[5, 30], n_exchanges=0)
    assert result.behaviors["A"].interrupted_at == 30


@pytest.mark.parametrize("first_wants", [True, False])
def test_only_the_first_process_requests_resume_points(first_wants, quick, tmp_path):
    keeper = CheckpointManager(tmp_path, quick())
    points = JointResumePoints(keeper, None, 0.0)
    points.want()
    notes = [
        points.local_state() | {"gives states": True, "interrupted": steps} for steps in ([5], [3])
    ]
    notes[0 if not first_wants else 1]["wanted"] = False
    points.merge(notes, None)
    assert points.is_due is first_wants
    assert points.interrupted == [3, 5]


def test_resume_point_of_several_processes_is_written_once_when_all_processes_are_ready():
    calls, written = [], []
    keeper = SimpleNamespace(
        has_numbered=lambda _: False,
        snapshot=lambda *_, **__: calls.append("snapshot") or {"A": {"held": 1}, "B": {"held": 2}},
        write=lambda states, workers: written.append((states, workers)),
    )
    workers = SimpleNamespace(
        request_states=lambda: calls.append("request"), is_split=True, state_dict=lambda: ["ours"]
    )
    learners = [SimpleNamespace(name=name) for name in "AB"]
    points = JointResumePoints(keeper, workers, 0.0)
    points.is_exact = points.gives_states = True
    other = ({"A": {"held": 3}, "B": {"held": 4}}, ["theirs"])

    def meet(progress=None):
        note = points.local_state()
        notes = [note, note | {"progress": progress or note["progress"]}]
        points.merge(notes, lambda part: [part, other])
        return points.is_due

    for number, (end, n_written) in enumerate(((None, 1), ("lost", 1), (None, 2)), 1):
        points.want()
        assert meet()
        points.begin(learners, {})
        assert calls == ["snapshot", "request"] * number, "the request follows the snapshot"
        assert not points.is_due
        assert not meet()
        points.complete()
        before = len(written)
        assert not meet("waits")
        assert len(written) == before
        assert not meet(end)
        for _ in range(2):
            assert not meet(), "one request gives one resume point"
        assert len(written) == n_written
    for states, environments in written:
        assert environments == ["ours"]
        assert {name: state["held"] for name, state in states.items()} == {"A": 1, "B": 2}
        assert {name: state["ranks"] for name, state in states.items()} == {
            name: [{"held": n, "environments": ["theirs"]}] for name, n in (("A", 3), ("B", 4))
        }
