"""The loop with environments in this process: counts, summaries, checkpoints, resuming."""

import contextlib
import json
import threading
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from steps import decision_steps, take_turn, terminal_steps
from stops_after import EndsAfter, StopsAfter
from threadpoolctl import threadpool_info, threadpool_limits
from toys import CHOICE, Chase, Corridor, Crowd

import pipeline
from pipeline import trainer
from pipeline.algos.ppo import PPO
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import CheckpointError, Interrupted, UnityException
from pipeline.settings import load_run_settings
from pipeline.trainer import JobSpec
from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint
from pipeline.trainer.stopping import StopRequest


def test_numpy_uses_as_many_threads_as_torch_while_environments_step(quick, train_in):
    """Idle threads of OpenBLAS would take processor time from the environments."""
    numbers = set()

    class Watched(Corridor):
        def step(self, actions):
            pools = threadpool_info()
            numbers.update(pool["num_threads"] for pool in pools if pool["user_api"] == "blas")
            return super().step(actions)

    with threadpool_limits(2, user_api="blas"):
        settings = quick(max_steps=40)
        train_in(Watched(), settings, torch_threads=1)
    assert numbers == {1}


@pytest.mark.parametrize("n_workers", [1, 3])
def test_steps_and_episodes_of_agents_that_come_and_go_are_counted_exactly(
    n_workers, quick, make_loop, in_process
):
    crowds = [Crowd(seed=seed) for seed in range(n_workers)]
    with WorkerSet([in_process(crowd) for crowd in crowds]) as workers:
        loop = make_loop(workers, quick("Mood", "Choice"))
        result, learners = loop.run(StopRequest()), loop.learners
    assert all(crowd.n_empty > 2 for crowd in crowds)
    for name in ("Mood", "Choice"):
        of_behavior = [
            (crowd.expected[f"{name}?team=0"], crowd.alive[f"{name}?team=0"].values())
            for crowd in crowds
        ]
        behavior = result.behaviors[name]
        assert behavior.steps == sum(expected.n_steps(8, alive) for expected, alive in of_behavior)
        assert behavior.n_episodes == sum(len(expected.lives) for expected, _ in of_behavior)
        assert behavior.n_updates > 1
        assert behavior.steps >= 500
        n_left = sum(len(expected.left) for expected, _ in of_behavior)
        assert learners[name].slots.n_slots <= 6 * n_workers + n_left  # freed slots are used again
        if n_workers == 1:  # with several, the order of episodes that end in one step differs
            recent = [life.total for life in of_behavior[0][0].lives][-100:]
            assert behavior.mean_reward == pytest.approx(np.mean(recent), abs=1e-5)
    assert any(expected.left for crowd in crowds for expected in crowd.expected.values())


def test_run_ends_at_the_first_step_at_or_above_max_steps(quick, train_in):
    toy = Corridor(n_agents=4)
    toy.step = Mock(wraps=toy.step)
    result = train_in(toy, quick())
    # Four agents close at most eight rows each at a time.
    assert 500 <= result.behaviors["Toy"].steps < 500 + 4 * 8
    assert toy.is_closed
    assert result.n_exchanges == toy.step.call_count + 1, "the last step is not awaited"
    parts = dict(result.seconds)
    total = parts.pop("total")
    assert parts.keys() == {"environment", "wire", "inference", "storage", "update"}
    assert all(seconds > 0 for part, seconds in parts.items() if part != "wire"), "no time is 0"
    assert total / 2 < sum(parts.values()) < total


def test_time_of_compiling_is_not_part_of_the_update_time(quick, recorder, train_in, monkeypatch):
    def take_long(algorithm):
        """Let each gradient step report 100 s of compiling."""
        optimizer = algorithm.optimizer

        def compiled(losses, columns, lengths, *, max_norm):
            optimizer.compile_s += 100.0
            optimizer.compiled = None
            results = optimizer.descend(losses, columns, lengths=lengths, max_norm=max_norm)
            optimizer.compiled = compiled
            n_steps.append(1)
            return results

        optimizer.compiled = compiled

    n_steps = []
    monkeypatch.setattr(PPO, "compile", take_long)
    settings = quick()
    settings = replace(settings, torch_settings=replace(settings.torch_settings, compile=True))
    seconds = train_in(Corridor(n_agents=4), settings, sinks=[recorder]).seconds
    assert seconds["compile"] == 100.0 * len(n_steps) > 0
    assert 0 < seconds["update"] + seconds["compile"] < seconds["total"]
    reported = sum(values.get("Time/compile", 0.0) for _, _, values in recorder.rows)
    assert 0 < reported <= seconds["compile"]


def test_summaries_are_written_at_multiples_of_summary_freq_and_at_most_once_at_each_step(
    quick, recorder, train_in, tmp_path
):
    train_in(Corridor(n_agents=4), quick(), sinks=[recorder])
    assert recorder.steps("Toy") == [100, 200, 300, 400, 500]
    assert all("Policy/Entropy" in values for _, _, values in recorder.rows)
    assert any("Losses/Policy Loss" in values for _, _, values in recorder.rows)
    assert recorder.n_closed == 1
    recorder.rows.clear()
    settings = quick(summary_freq=10)
    train_in(Chase(n_agents=16), settings, sinks=[recorder], run_dir=tmp_path / "other")
    steps = recorder.steps("Toy")
    assert steps == sorted(set(steps))
    assert all(step % 10 == 0 for step in steps)
    assert len(steps) < 50


def test_resumed_run_continues_at_the_saved_step(quick, recorder, train_in):
    first = train_in(Corridor(n_agents=4), quick()).behaviors["Toy"]
    second = train_in(
        Corridor(n_agents=4), quick(max_steps=1000), resume=True, sinks=[recorder]
    ).behaviors["Toy"]
    assert recorder.steps("Toy") == [600, 700, 800, 900, 1000]
    assert 1000 <= second.steps < 1032
    assert second.n_updates > first.n_updates
    assert second.n_episodes > first.n_episodes


def test_without_resume_old_checkpoints_are_not_read(quick, tmp_path, in_process):
    results = []
    for _ in range(2):
        toy = in_process(Corridor(n_agents=4))
        results.append(trainer.train(JobSpec(toy, quick(), seed=1, run_dir=tmp_path)))
    assert results[0].behaviors == results[1].behaviors


@pytest.fixture
def begun(quick, tmp_path, train_in):
    """Start a run from the weights of another; return the new result, and both algorithm states."""

    def train(**changes):
        trained = train_in(Corridor(n_agents=4), quick(), run_dir=tmp_path / "a").behaviors["Toy"]
        settings, first = quick(max_steps=1, **changes), {"Toy": trained.checkpoint}
        options = {"seed": 2, "run_dir": tmp_path / "b", "init_from": first}
        result = train_in(Corridor(n_agents=4), settings, **options).behaviors["Toy"]
        files = (trained.checkpoint, result.checkpoint)
        return result, *(load_checkpoint(file)["learner"]["algorithm"] for file in files)

    return train


def test_init_from_loads_only_the_weights(begun):
    result, old, new = begun()
    assert result.steps < 100
    assert result.n_updates == 0
    for part in ("policy", "critic"):
        assert all(torch.equal(old[part][key], new[part][key]) for key in old[part])
    assert not new["optimizer"]["state"]


def test_checkpoint_tensors_of_other_shapes_are_named_in_a_warning_and_all_others_are_loaded(
    begun, caplog
):
    _, old, new = begun(network_settings={"hidden_units": 16, "num_layers": 1})
    (warning,) = [r.getMessage() for r in caplog.records if "were not loaded" in r.getMessage()]
    for part in ("policy", "critic"):
        for name, values in old[part].items():
            fits = values.shape == new[part][name].shape
            assert (f"{part}.{name} (" in warning) is not fits
            assert not fits or torch.equal(values, new[part][name])
    assert "policy.actor.body.dense.layers.0.weight (8x6 saved, 16x6 in this run)" in warning


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"learner": {"algorithm": {"policy": {"other": torch.zeros(3)}}}},
            r"c\.pt: none of its tensors fits",
        ),
        ({"behavior": "Toy"}, r"c\.pt: .*learner"),
    ],
)
def test_a_checkpoint_without_matching_tensors_is_refused(state, told, quick, tmp_path, train_in):
    save_checkpoint(tmp_path / "c.pt", state)
    with pytest.raises(CheckpointError, match=told):
        train_in(Corridor(), quick(), init_from={"Toy": tmp_path / "c.pt"})


class Failing(Corridor):
    """An environment that fails at its 100th step."""

    n_steps = 0

    def step(self, actions):
        self.n_steps += 1
        if self.n_steps >= 100:
            raise UnityException("gone")
        return super().step(actions)


def test_failing_environment_leaves_a_checkpoint_and_an_exported_policy(quick, tmp_path, train_in):
    toy = Failing(n_agents=4)
    with pytest.raises(UnityException, match="gone"):
        train_in(toy, quick(max_steps=5000), export=True)
    state = load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")
    assert 300 < state["learner"]["step"] <= 400
    assert state["environments"] is None
    assert (tmp_path / "Toy.onnx").is_file()
    assert toy.is_closed


@pytest.fixture
def looped(quick, tmp_path, in_process, make_loop):
    """Train in a corridor until a request to stop; return the loop."""

    def export(path, folder, *, label):
        (folder / f"{folder.name}{label}.onnx").touch()

    def run(folder, stop, *, resume=False, **changes):
        with WorkerSet([in_process(Corridor(n_agents=4))]) as workers:
            run_dir = tmp_path / folder
            options = {"run_dir": run_dir, "resume": resume, "exporter": export}
            loop = make_loop(workers, quick(**changes), **options)
            with contextlib.suppress(Interrupted):
                loop.run(stop)
        return loop

    return run


@pytest.mark.parametrize("n", [1, 5, 20, 33, 47])
def test_resumed_run_writes_the_checkpoints_of_an_uninterrupted_run(n, looped, tmp_path):
    """A run that is stopped at any step and resumed keeps the checkpoints of a whole run."""
    frequent = {"checkpoint_interval": 100, "keep_checkpoints": 99}
    looped("whole", StopRequest(), **frequent)
    looped("halves", StopsAfter(n), **frequent)
    saved = load_checkpoint(tmp_path / "halves" / "Toy" / "checkpoint.pt")["learner"]["step"]
    assert (saved > 0) == (n > 5)
    looped("halves", StopRequest(), resume=True, **frequent)
    kept = []
    for folder in (tmp_path / "whole", tmp_path / "halves"):
        status = json.loads((folder / "run_logs" / "training_status.json").read_text())
        listed = [entry["steps"] for entry in status["Toy"]["checkpoints"]]
        kept.append((sorted(path.name for path in folder.glob("Toy/Toy-*")), listed))
    assert len(kept[0][1]) > 3
    assert kept[0] == kept[1]


def test_behavior_that_is_absent_after_a_resume_keeps_its_step_in_new_checkpoints(looped, tmp_path):
    """Otherwise an older file would count as the newest, and earlier lessons would begin again."""
    looped("run", StopsAfter(40))
    state = load_checkpoint(tmp_path / "run" / "Toy" / "checkpoint.pt")
    n_steps = state["learner"]["step"]
    other = {**state, "behavior": "Other", "run": {**state["run"], "steps": {"Other": 5 * n_steps}}}
    other["learner"] = {**state["learner"], "step": 5 * n_steps}
    save_checkpoint(tmp_path / "run" / "Other" / "checkpoint.pt", other)
    looped("run", StopsAfter(20), resume=True)
    steps = load_checkpoint(tmp_path / "run" / "Toy" / "checkpoint.pt")["run"]["steps"]
    assert steps["Toy"] > n_steps
    assert steps["Other"] == 5 * n_steps


class Undecided(Corridor):
    """An environment with agents that never ask for a decision."""

    def reset(self):
        steps = super().reset()
        nobody = DecisionSteps.empty(self.spec)
        return {name: (nobody, terminal_steps(self.observe())) for name in steps}

    def step(self, _actions):
        return self.reset()


def test_request_to_stop_before_the_first_decision_saves_step_0(
    quick, tmp_path, in_process, make_loop
):
    with WorkerSet([in_process(Undecided(n_agents=4))]) as workers:
        loop = make_loop(workers, quick(), exporter=publish)
        with pytest.raises(Interrupted, match="at step 0 of Toy") as caught:
            loop.run(StopsAfter(9))
    assert caught.value.exit_code == 143
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] == 0
    assert not list(tmp_path.rglob("*.onnx"))


@pytest.mark.parametrize("is_agreed", [True, False])
def test_environment_ended_by_the_signal_that_stops_the_run_counts_as_an_interruption(
    is_agreed, quick, tmp_path, in_process, make_loop
):
    stop = StopRequest()

    class Ended(Corridor):
        def step(self, actions):
            if stop.signal_number is None and loop.learners["Toy"].step > 200:
                stop.signal_number = 15
                raise UnityException("the environment was ended by SIGTERM")
            return super().step(actions)

    with WorkerSet([in_process(Ended(n_agents=4))]) as workers:
        loop = make_loop(workers, quick())
        if not is_agreed:  # several processes stop only after a synchronisation
            loop.synchronizer.listen(stop)
            loop.synchronizer.listen = lambda _: StopRequest()
        with pytest.raises(Interrupted, match="the state is saved") as caught:
            loop.run(stop)
    assert caught.value.exit_code == 143
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] > 200


def test_sinks_are_closed_when_no_environment_can_be_opened(quick, tmp_path, recorder):
    with pytest.raises(UnityException, match="missing"):
        pipeline.train(tmp_path / "missing", quick(), seed=1, run_dir=tmp_path, sinks=[recorder])
    assert recorder.n_closed == 1


def test_training_in_this_process_leaves_no_thread_and_no_process(quick, train_in):
    threads, process = set(threading.enumerate()), psutil.Process()
    children = set(process.children(recursive=True))
    train_in(Corridor(n_agents=4), quick())
    assert set(threading.enumerate()) <= threads
    assert set(process.children(recursive=True)) <= children


def choice_steps(n, masks=None):
    return decision_steps([np.ones((n, 2))], masks=masks), TerminalSteps.empty(CHOICE)


def test_action_masks_of_one_worker_do_not_affect_a_worker_without_masks(make_learner):
    only_two = [np.tile([True, True, False], (200, 1))]
    learner = make_learner(CHOICE)
    before = learner.recorded["obs"][0]
    assert (before.shape, before.dtype) == ((0, 2), torch.float32)
    decided = take_turn(learner, [choice_steps(0), choice_steps(3)])
    assert learner.recorded["allowed"] is None
    assert len(learner.recorded["obs"][0]) == 3
    assert [len(action.discrete) for action in decided.actions] == [0, 3]
    free, masked = take_turn(learner, [choice_steps(200), choice_steps(200, only_two)]).actions
    assert set(masked.discrete[:, 0]) == {2}
    assert set(free.discrete[:, 0]) == {0, 1, 2}


def test_resume_point_is_completed_before_lessons_change_and_the_next_point_begins_afterwards(
    make_loop, quick
):
    noted = Mock()
    with WorkerSet([InProcessEnvironment(Corridor())]) as workers:
        loop = make_loop(workers, quick())
        flags = dict.fromkeys(("is_exact", "is_pending", "is_due"), True)
        loop.resume_points = Mock(**flags, **{"state_dict.return_value": {}})
        noted.attach_mock(loop.resume_points.complete, "complete")
        noted.attach_mock(loop.resume_points.begin, "begin")
        loop._step, loop._receive = noted.step, noted.receive
        loop._apply_lessons, loop._note_start = noted.lessons, lambda: None
        loop._finished = lambda: noted.step.call_count > 1
        loop._step_until_finished(StopRequest())
    calls = [name for name, _, _ in noted.mock_calls]
    assert calls == ["step", "receive", "complete", "lessons", "begin", "step"]


def test_behavior_without_settings_gets_the_built_in_ones_with_one_warning(
    tmp_path, in_process, caplog
):
    run = load_run_settings(None)
    ends = EndsAfter(3)
    env = in_process(Corridor(n_agents=4))
    trainer.train(JobSpec(env, run, seed=1, run_dir=tmp_path), callbacks=[ends])
    said = [x.getMessage() for x in caplog.records if "built-in" in x.getMessage()]
    assert said == ["Toy: no settings are given for it, so it has the built-in ones."]


@pytest.mark.parametrize("n_others", [[0], [3], [1, 2]])
def test_only_processes_that_work_for_simulators_of_this_process_are_busy(
    n_others, quick, tmp_path, in_process, monkeypatch
):
    asked = Mock(return_value=1)
    monkeypatch.setattr("pipeline.trainer.loop.fastest_threads", asked)
    envs = [in_process(Corridor(n_agents=2)) for _ in n_others]
    for env, n in zip(envs, n_others, strict=True):
        env.n_other_processes = n
    job = JobSpec(envs, quick(), seed=1, run_dir=tmp_path, torch_threads=None)
    trainer.train(job, callbacks=[EndsAfter(2)])
    assert [call.kwargs["n_busy"] for call in asked.call_args_list] == [sum(n_others)]
