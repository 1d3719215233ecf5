"""Several behaviors in one run: each has its own streams, limits, files and summaries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from failing_workers import FailsAt, Long
from pairs import Pair
from toys import BEHAVIOR, Chase, Corridor

from pipeline import seeding
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import SettingsError
from pipeline.export.policy import OnnxPolicy
from pipeline.tracking import names
from pipeline.trainer import loop as loop_module
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.statistics import Statistics


@pytest.fixture
def everything(quick):
    """Settings for behaviors of any name."""

    def make(**changes):
        run = quick(**changes)
        return replace(run, behaviors={}, default_settings=run.behaviors["Toy"])

    return make


def saved(result, name):
    return load_checkpoint(result.behaviors[name].checkpoint)["learner"]["algorithm"]


def test_behaviors_with_equal_settings_have_different_weights_actions_and_minibatches(
    quick, train_in
):
    toys = Chase(seed=3, n_agents=4), Chase(seed=3, n_agents=4)  # with equal observations
    result = train_in(Pair(*toys), quick("One", "Two", max_steps=100))
    first, second = saved(result, "One"), saved(result, "Two")
    assert result.behaviors["One"].n_updates == 0  # so the saved weights are the initial weights
    matrices = [key for key, value in first["policy"].items() if value.ndim == 2 and value.any()]
    assert len(matrices) > 1
    assert not any(torch.equal(first["policy"][key], second["policy"][key]) for key in matrices)
    assert not torch.equal(first["action_stream"], second["action_stream"])
    assert first["minibatch_stream"] != second["minibatch_stream"]
    assert not np.array_equal(toys[0].position, toys[1].position)


def test_single_listed_behavior_gets_the_seed_of_the_run():
    assert seeding.of_behavior(7, "One", ["One"]) == 7
    seeds = {seeding.of_behavior(7, name, ["One", "Two"]) for name in ("One", "Two")}
    assert len(seeds | {7}) == 3
    assert seeding.of_behavior(7, "One", []) in seeds
    assert seeding.of_behavior(8, "One", []) not in seeds


@pytest.mark.parametrize(("one", "two"), [(300, 900), (900, 300)])
def test_finished_behavior_acts_until_all_behaviors_have_finished(
    one, two, quick, tmp_path, recorder, train_in
):
    result = train_in(
        Pair(Corridor(n_agents=4), Chase(n_agents=4)),
        quick(limits={"One": one, "Two": two}),
        sinks=[recorder],
        export=True,
    )
    first, last = ("One", "Two") if one < two else ("Two", "One")
    assert result.behaviors[last].steps < 900 + 4 * 8
    assert result.behaviors[first].steps > 800  # it still acts after its max_steps
    assert 1 <= result.behaviors[first].n_updates <= 300 // 128
    assert result.behaviors[last].n_updates >= 5
    trains = [
        (step, bool(values["Is Training"])) for name, step, values in recorder.rows if name == first
    ]
    assert [training for _, training in trains] == [step <= 300 for step, _ in trains]
    assert max(step for step, _ in trains) >= 800
    for name, actions in (("One", 0), ("Two", 2)):
        policy = OnnxPolicy(tmp_path / f"{name}.onnx")
        assert policy.description.continuous_size == actions
        assert (tmp_path / name / "checkpoint.pt").is_file()


class Called(Chase):
    """An environment with a behavior of the given name."""

    def __init__(self, name):
        super().__init__(n_agents=4)
        self.name = name

    @property
    def behavior_specs(self):
        return {self.name: self.spec}

    def reset(self):
        return {self.name: super().reset()[BEHAVIOR]}


HOSTILE = ["../../../evil", "/evil", "a/b", "..", ".", "", "a\\b", "a\0b", "\n", "e" * 300]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("team", ["", "?team=0"])
def test_behavior_name_that_cannot_be_a_folder_is_refused_before_any_write(
    name, team, everything, tmp_path, train_in
):
    run_dir = tmp_path / "a" / "b" / "c" / "run"
    toy = Called(f"{name}{team}")
    with pytest.raises(SettingsError, match=r"^behavior '.*cannot be a folder's name, because"):
        train_in(toy, everything(), run_dir=run_dir)
    assert list(tmp_path.rglob("*")) == []


@pytest.fixture
def pair(quick, make_loop, recorder):
    """A loop after its first step, with two behaviors that have twenty different episodes each."""
    simulator = Pair(Corridor(n_agents=2), Corridor(n_agents=2))
    with WorkerSet([InProcessEnvironment(simulator)]) as workers:
        parameters = {"pay": 1.0}
        loop = make_loop(workers, quick("One", "Two", parameters=parameters), sinks=[recorder])
        loop._begin()
        loop._step()
        for name, value, step in (("One", 1.0, 145), ("Two", 7.0, 370)):
            learner = loop.learners[name]
            learner.statistics = Statistics()
            learner.statistics.add_episodes([value, value + 2.0] * 10, [4] * 20)
            learner.statistics.add("Mark", value)
            learner.seconds["mark"] = value
            learner.step = step
        yield loop


def test_summary_and_best_policy_use_only_statistics_of_their_own_behavior_and_summary_period(
    pair, recorder, tmp_path
):
    for learner in pair.learners.values():
        pair._summarize(learner)
    rows = {behavior: (step, values) for behavior, step, values in recorder.rows}
    assert {name: step for name, (step, _) in rows.items()} == {"One": 100, "Two": 300}
    tags = (names.REWARD, names.REWARD_STD, "Time/mark", "Mark", names.LESSON_NUMBER + "pay")
    assert [[values[tag] for tag in tags] for _, values in rows.values()] == [
        [2.0, 1.0, 1.0, 1.0, 0.0],
        [8.0, 1.0, 7.0, 7.0, 0.0],
    ]
    assert recorder.spreads[names.REWARD] == [[1.0, 3.0] * 10, [7.0, 9.0] * 10]
    best = {"One": {"reward": 2.0, "step": 145}, "Two": {"reward": 8.0, "step": 370}}
    assert pair.checkpoints.best == best
    pair.learners["Two"].seconds["mark"] = 10.0
    pair.learners["Two"].step = 401
    pair._summarize(pair.learners["Two"])
    assert recorder.rows[-1][2]["Time/mark"] == 3.0, "seconds since its last summary"
    pair.checkpoints.refresh(list(pair.learners.values()), {})
    for name, kept in best.items():
        states = [load_checkpoint(tmp_path / name / file) for file in ("checkpoint.pt", "best.pt")]
        assert [state["best"] for state in states] == [kept, kept]
    # A new lesson saves the best policy so far, and the comparison starts again.
    learner = pair.learners["One"]
    learner.statistics.recent.extend([50.0] * 100)
    pair.checkpoints.consider(learner)
    pair.lessons.apply = lambda _: True
    pair._apply_lessons()
    assert pair.checkpoints.best == {}
    assert load_checkpoint(tmp_path / "One/best.pt")["best"]["reward"] == 50.0


def test_behavior_saves_a_checkpoint_only_after_its_own_update_and_checkpoint_interval(
    pair, tmp_path
):
    one, two = pair.learners["One"], pair.learners["Two"]
    two.settings = replace(two.settings, checkpoint_interval=50)
    pair._updated = {"One"}  # at step 145 of 200; Two, at step 370, has had no update
    pair._save_due()
    assert not list(tmp_path.glob("*/*-*.pt"))
    one.step = 250
    pair._updated = {"One", "Two"}
    pair._save_due()
    assert [path.name for path in sorted(tmp_path.glob("*/*-*.pt"))] == ["One-250.pt", "Two-370.pt"]
    run = load_checkpoint(tmp_path / "Two/Two-370.pt")["run"]
    assert run["next_checkpoint"] == {"One": 400, "Two": 400}
    assert run["steps"] == {"One": 250, "Two": 370}
    assert pair.resume_points.is_due
    assert not pair._updated, "saving clears the updated behaviors"
    # A resumed behavior takes the step of its own next checkpoint from the saved state.
    run = {"next_checkpoint": {"One": 200, "Two": 350}}
    for learner in (one, two):
        pair._schedule(learner, run)
    assert pair._next_checkpoint == {"One": 200, "Two": 350}


def test_restart_of_a_worker_drops_only_the_open_rows_of_this_worker(quick, make_loop):
    def both(seed):
        return Pair(Long(seed=seed, n_agents=1), Long(seed=seed + 1, n_agents=2))

    envs = [InProcessEnvironment(both(1)), FailsAt(both(3), at=6)]
    new = InProcessEnvironment(both(8))
    with WorkerSet(envs, relaunch=lambda *_: new) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop._begin()
        steps = []
        for n in (9, 6):
            for _ in range(n):
                loop._step()
                loop._receive()
            steps.append({name: learner.step for name, learner in loop.learners.items()})
    # First eight rows of each agent of worker 0 count, then eight rows of each agent of worker 1
    # since the restart of worker 1.
    assert steps == [{"One": 8, "Two": 16}, {"One": 16, "Two": 32}]
    assert loop.resume_points.interrupted == [0]


def test_statistics_and_lessons_are_processed_before_updates_and_summaries_in_each_step(
    quick, make_loop, monkeypatch
):
    calls, left = [], {"One": 2, "Two": 0}

    def noted(text):
        return lambda *_: calls.append(text)

    def learn(name):
        left[name] -= 1
        return left[name] >= 0

    simulator = Pair(Corridor(n_agents=2), Corridor(n_agents=2))
    with WorkerSet([InProcessEnvironment(simulator)]) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop._begin()
        loop._step()
        loop._receive()
        monkeypatch.setattr(loop_module, "add_reports", noted("reports"))
        monkeypatch.setattr(loop.synchronizer, "sync_if_due", noted("meeting"))
        monkeypatch.setattr(loop.lessons, "on_step", noted("lessons"))
        for name, learner in loop.learners.items():
            monkeypatch.setattr(learner, "learn", lambda name=name: learn(name))
        monkeypatch.setattr(loop, "_note_update", lambda x: calls.append(f"{x.name} update"))
        monkeypatch.setattr(loop, "_summarize", lambda x: calls.append(f"{x.name} summary"))
        loop._step()
    learned = ["One update", "One update", "One summary", "Two summary"]
    assert calls == ["reports", "meeting", "lessons", *learned]


def test_device_is_chosen_for_the_number_of_agents_in_all_workers(quick, make_loop, monkeypatch):
    asked = {}

    def chosen(name, *_, n_agents, kept):
        asked[name] = n_agents, kept
        return torch.device("cpu")

    monkeypatch.setattr(loop_module, "fastest_device", chosen)
    envs = [Pair(Corridor(n_agents=a), Corridor(n_agents=b)) for a, b in ((1, 4), (2, 5))]
    with WorkerSet([InProcessEnvironment(env) for env in envs]) as workers:
        loop = make_loop(workers, quick("One", "Two"))
        loop.device = None
        loop._begin()
        loop._saved = {"Two": {"run": {"devices": {"One": "no", "Two": "cuda:7"}}}}
        monkeypatch.setattr(loop_module, "restore", lambda *_, **__: None)
        monkeypatch.setattr(loop.checkpoints, "restore", lambda *_, **__: None)
        loop._step()
        assert asked == {"One": (3, None), "Two": (9, "cuda:7")}
        assert loop._shared_state()["devices"] == {"One": "cpu", "Two": "cpu"}
