import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import Chase, Corridor, Crowd

from pipeline.errors import Interrupted, SettingsError
from pipeline.export.policy import OnnxPolicy
from pipeline.stages.export import publish
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.checkpoints.restore import load_policy


class StopsAt(Corridor):
    """Sends this process a signal at a step of its own."""

    def __init__(self, n_steps, **options) -> None:
        super().__init__(**options)
        self.left = n_steps

    def step(self, actions):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(actions)


def status_of(folder):
    return json.loads((folder / "run_logs" / "training_status.json").read_text())


def names(folder, pattern):
    return sorted(path.name for path in folder.glob(pattern))


def test_every_numbered_checkpoint_has_its_onnx_and_the_list_names_both(quick, tmp_path, train_in):
    train_in(
        Corridor(n_agents=4),
        quick(keep_checkpoints=2, checkpoint_interval=150, max_steps=700),
        exporter=publish,
    )
    models = names(tmp_path / "Toy", "Toy-[0-9]*.onnx")
    assert len(models) == 2
    weights = names(tmp_path / "Toy", "Toy-[0-9]*.pt")
    assert [name.replace(".pt", ".onnx") for name in weights] == models
    status = status_of(tmp_path)
    listed = status["Toy"]["checkpoints"]
    assert [entry["file_path"] for entry in listed] == [str(tmp_path / "Toy" / m) for m in models]
    assert [entry["auxillary_file_paths"] for entry in listed] == [
        [str(tmp_path / "Toy" / w)] for w in weights
    ]
    final = status["Toy"]["final_checkpoint"]
    assert final["file_path"] == str(tmp_path / "Toy.onnx")
    assert final["steps"] == listed[-1]["steps"]
    last = (tmp_path / "Toy" / f"Toy-{final['steps']}.onnx").read_bytes()
    assert (tmp_path / "Toy.onnx").read_bytes() == last
    assert set(status["metadata"]) == {"stats_format_version", "pipeline_version", "torch_version"}


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_of_it_for_ever(
    quick, tmp_path, train_in, monkeypatch
):
    settings = quick(keep_checkpoints=2, checkpoint_interval=150, max_steps=700)
    unlink, deleted = Path.unlink, []

    def killed_after_the_first(path, **options):
        unlink(path, **options)
        if path.name.startswith("Toy-"):
            deleted.append(path)
            monkeypatch.setattr(Path, "unlink", unlink)
            raise KeyboardInterrupt

    def train(*, resume=False):
        train_in(Corridor(n_agents=4), settings, exporter=publish, resume=resume)

    monkeypatch.setattr(Path, "unlink", killed_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert len(deleted) == 1
    train(resume=True)
    weights = names(tmp_path / "Toy", "Toy-[0-9]*.pt")
    assert names(tmp_path / "Toy", "Toy-[0-9]*.onnx") == [
        name.replace(".pt", ".onnx") for name in weights
    ]


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_a_finished_run_that_is_resumed_keeps_its_checkpoints(trainer, quick, tmp_path, train_in):
    replay = {"batch_size": 16, "buffer_init_steps": 32, "save_replay_buffer": True}
    changes = {} if trainer == "ppo" else {"hyperparameters": replay}
    settings = quick(trainer_type=trainer, **changes)
    first = train_in(Chase(n_agents=4), settings)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert len(before) > 2
    resumed = train_in(Chase(n_agents=4), settings, resume=True)
    after = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert after.keys() == before.keys()
    assert [path.name for path in before if before[path] != after[path]] == []
    assert resumed.behaviors == first.behaviors


def test_a_finished_run_that_is_resumed_gets_the_policies_that_it_lacks(quick, tmp_path, train_in):
    train_in(Corridor(n_agents=4), quick())
    assert names(tmp_path, "**/*.onnx") == names(tmp_path, "**/*.json") == []
    train_in(Corridor(n_agents=4), quick(), resume=True, exporter=publish)
    assert names(tmp_path, "*.onnx") == ["Toy.onnx"]


def test_what_a_killed_run_was_writing_is_gone_when_the_next_starts(quick, tmp_path, train_in):
    train_in(Corridor(n_agents=4), quick())
    before = sorted(tmp_path.rglob("*"))
    for name in (".checkpoint.pt.abcd1234.tmp", ".replay-128.npz.zz_zzzz9.tmp"):
        (tmp_path / "Toy" / name).write_bytes(b"half")
    train_in(Corridor(n_agents=4), quick(), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_run_in_the_same_folder_is_refused(quick, tmp_path, train_in):
    class Nested(Corridor):
        """In the middle of its run another one begins."""

        refused = None

        def step(self, actions):
            if self.refused is None:
                self.refused = ThreadPoolExecutor(1).submit(train).exception()
            return super().step(actions)

    def train():
        train_in(Corridor(), quick(), run_dir=tmp_path / "run")

    toy = Nested(n_agents=4)
    train_in(toy, quick(), run_dir=tmp_path / "run")
    assert isinstance(toy.refused, SettingsError)
    assert "another process" in str(toy.refused)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_damaged_list_is_written_anew(quick, tmp_path, caplog, train_in):
    (tmp_path / "run_logs").mkdir()
    (tmp_path / "run_logs" / "training_status.json").write_text("{")
    train_in(Corridor(n_agents=4), quick(max_steps=50), exporter=publish)
    assert "training_status.json: not all of it" in caplog.text
    assert len(status_of(tmp_path)["Toy"]["checkpoints"]) == 1


def test_best_policy_is_that_of_the_best_summary(quick, tmp_path, recorder, train_in):
    """Corridor's reward is turned round late in the run, so that the end is not the best."""

    class Spoiled(Corridor):
        n_steps = 0

        def advance(self, action):
            self.n_steps += 1
            reward, ended = super().advance(action)
            return (reward if self.n_steps < 600 else reward - 5.0), ended

    train_in(Spoiled(n_agents=4), quick(max_steps=6000), sinks=[recorder], exporter=publish)
    best = load_checkpoint(tmp_path / "Toy" / "best.pt")
    last = load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")
    assert last["best"] == best["best"]
    assert best["best"]["step"] == best["learner"]["step"] < 3000 < last["learner"]["step"]
    assert best["best"]["reward"] > 0
    assert np.mean(last["learner"]["statistics"]["recent"]) < -4
    keys = best["learner"]["algorithm"]["policy"]
    assert not all(torch.equal(keys[k], last["learner"]["algorithm"]["policy"][k]) for k in keys)
    assert load_policy(tmp_path / "Toy" / "best.pt").step == best["best"]["step"]
    assert OnnxPolicy(tmp_path / "Toy" / "Toy-best.onnx") is not None


@pytest.mark.parametrize(("n_episodes", "best"), [(19, []), (20, ["Toy"])])
def test_twenty_episodes_are_enough_for_a_best(n_episodes, best, quick, make_learner, tmp_path):
    settings, learner = quick(), make_learner(Corridor.spec)
    learner.statistics.add_episodes([1.0] * n_episodes, [5] * n_episodes)
    manager = CheckpointManager(tmp_path, settings)
    manager.consider(learner)
    assert list(manager.best) == best


@pytest.mark.parametrize(
    ("saved", "reward", "kept"), [({"reward": 2.0, "step": 7}, 1.0, 2.0), (None, -3.0, -3.0)]
)
def test_resumed_run_has_to_beat_the_best_that_it_knows(
    saved, reward, kept, quick, make_learner, tmp_path
):
    settings, learner = quick(), make_learner(Corridor.spec)
    learner.statistics.add_episodes([reward] * 20, [5] * 20)
    manager = CheckpointManager(tmp_path, settings, exporter=lambda *_, **__: None)
    manager.restore("Toy", {"best": saved, "learner": {"step": 0}}, exact=True)
    manager.consider(learner)
    assert manager.best["Toy"]["reward"] == kept
    manager.milestone(learner, {})
    (entry,) = manager.status.read()["Toy"]["checkpoints"]
    assert entry["reward"] == reward, "the list has the mean of recent episodes, best or not"


def test_a_stopped_run_that_goes_on_has_the_checkpoints_of_one_that_was_not(
    quick, tmp_path, train_in
):
    listed = {}
    for name, simulators in {
        "whole": [Corridor(n_agents=4)],
        "stopped": [StopsAt(130, n_agents=4), Corridor(n_agents=4)],
    }.items():
        for simulator in simulators:
            stops = isinstance(simulator, StopsAt)
            with pytest.raises(Interrupted) if stops else nullcontext():
                train_in(
                    simulator,
                    quick(max_steps=1000, checkpoint_interval=300),
                    run_dir=tmp_path / name,
                    resume=not stops,
                    exporter=publish,
                )
            steps = [entry["steps"] for entry in status_of(tmp_path / name)["Toy"]["checkpoints"]]
            listed[name, stops] = names(tmp_path / name / "Toy", "*.onnx"), steps
    assert listed["stopped", False] == listed["whole", False]
    assert not set(listed["stopped", True][1]) < set(listed["whole", False][1])


def test_a_checkpoint_of_this_step_is_known_by_who_wrote_it(quick, make_learner, tmp_path):
    settings, learner = quick(), make_learner(Corridor.spec)
    CheckpointManager(tmp_path, settings).milestone(learner, {})
    manager = CheckpointManager(tmp_path, settings)
    assert not manager.has_numbered(learner), "it may be of a run that went another way"
    at = {"learner": {"step": learner.step}}
    manager.restore("Toy", {**at, "run": {"added": []}}, exact=True)
    assert manager.has_numbered(learner)
    manager = CheckpointManager(tmp_path, settings)
    manager.restore("Toy", {**at, "run": {"added": ["Toy"]}}, exact=True)
    assert not manager.has_numbered(learner)
    manager.milestone(learner, {})
    assert manager.has_numbered(learner)


def test_a_checkpoint_that_was_due_stays_as_it_is_when_the_run_is_stopped_there(
    quick, tmp_path, monkeypatch, train_in
):
    written, milestone = [], CheckpointManager.milestone

    def stops(self, learner, run):
        written.append(learner.step)
        milestone(self, learner, run)
        if len(written) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CheckpointManager, "milestone", stops)
    with pytest.raises(Interrupted):
        train_in(
            Corridor(n_agents=4), quick(max_steps=10_000, checkpoint_interval=300), exporter=publish
        )
    (step,) = written
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] == step


def test_inference_acts_counts_and_neither_learns_nor_saves(quick, tmp_path, recorder, train_in):
    trained = train_in(Corridor(n_agents=4), quick()).behaviors["Toy"]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    result = train_in(
        StopsAt(200, n_agents=4), quick(), resume=True, inference=True, sinks=[recorder]
    ).behaviors["Toy"]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert result.steps > trained.steps + 300  # far beyond max_steps
    assert result.n_updates == trained.n_updates
    assert len(recorder.steps("Toy")) >= 3
    assert not any("Losses/Policy Loss" in values for _, _, values in recorder.rows)


def test_all_behaviors_are_saved_at_the_same_moment(quick, tmp_path, train_in):
    train_in(Crowd(seed=1), quick("Mood", "Choice"), run_dir=tmp_path / "a")
    states = [
        load_checkpoint(tmp_path / "a" / name / "checkpoint.pt") for name in ("Mood", "Choice")
    ]
    assert states[0]["run"] == states[1]["run"]
    assert states[0]["run"]["steps"] == {
        state["behavior"]: state["learner"]["step"] for state in states
    }
