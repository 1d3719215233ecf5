"""Files that a run writes: checkpoints, exported policies, and the list of checkpoints."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from remembering import Cue
from toys import Both, Chase, Corridor, Crowd, Quadrant, Wish

from pipeline.core.specs import ObservationSpec
from pipeline.errors import CheckpointError, Interrupted, SettingsError
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import record
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.checkpoints.restore import load_policy
from pipeline.trainer.learner import Learner


class StopsAt(Corridor):
    """An environment that sends this process a signal at its step `n_steps`."""

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


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_numbered_checkpoint_has_an_onnx_file_and_a_list_entry(quick, tmp_path, train_in):
    result = train_in(
        Corridor(n_agents=4),
        quick(keep_checkpoints=2, checkpoint_interval=150, max_steps=700),
        export=True,
    ).behaviors["Toy"]
    folder = tmp_path / "Toy"
    models, weights = names(folder, "Toy-[0-9]*.onnx"), names(folder, "Toy-[0-9]*.pt")
    assert [name.replace(".pt", ".onnx") for name in weights] == models
    steps = [int(name[len("Toy-") : -len(".pt")]) for name in weights]
    assert 550 <= steps[0] < 700 <= steps[1] == result.steps
    assert len(steps) == 2
    assert (folder / weights[1]).read_bytes() == result.checkpoint.read_bytes()
    assert load_checkpoint(result.checkpoint)["learner"]["step"] == steps[1]
    status = status_of(tmp_path)
    listed, final = status["Toy"]["checkpoints"], status["Toy"]["final_checkpoint"]
    assert [entry["steps"] for entry in listed] == steps
    assert [entry["file_path"] for entry in listed] == [str(folder / m) for m in models]
    assert [entry["auxillary_file_paths"] for entry in listed] == [
        [str(folder / w)] for w in weights
    ]
    assert final["file_path"] == str(tmp_path / "Toy.onnx")
    assert final["steps"] == steps[1]
    assert (tmp_path / "Toy.onnx").read_bytes() == (folder / models[1]).read_bytes()
    assert set(status["metadata"]) == {"stats_format_version", "pipeline_version", "torch_version"}


def test_resumed_run_completes_the_interrupted_deletion_of_a_checkpoint(
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

    monkeypatch.setattr(Path, "unlink", killed_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        train_in(Corridor(n_agents=4), settings, export=True)
    assert len(deleted) == 1
    train_in(Corridor(n_agents=4), settings, export=True, resume=True)
    stems = [
        {path.stem for path in (tmp_path / "Toy").glob(f"Toy-[0-9]*.{x}")} for x in ("pt", "onnx")
    ]
    assert stems[0] == stems[1]


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_resumed_finished_run_keeps_its_files_and_adds_a_missing_export(
    trainer, quick, tmp_path, train_in
):
    replay = {"batch_size": 16, "buffer_init_steps": 32, "save_replay_buffer": True}
    changes = {} if trainer == "ppo" else {"hyperparameters": replay}
    settings = quick(trainer_type=trainer, **changes)
    first = train_in(Chase(n_agents=4), settings)
    before = files(tmp_path)
    assert len(before) > 2
    # Temporary files of a killed run are deleted when the next run starts.
    for name in (".checkpoint.pt.abcd1234.tmp", ".replay-128.npz.zz_zzzz9.tmp"):
        (tmp_path / "Toy" / name).write_bytes(b"half")
    resumed = train_in(Chase(n_agents=4), settings, resume=True)
    after = files(tmp_path)
    assert after.keys() == before.keys()
    assert [path.name for path in before if before[path] != after[path]] == []
    assert resumed.behaviors == first.behaviors
    assert names(tmp_path, "**/*.onnx") == names(tmp_path, "**/*.json") == []
    train_in(Chase(n_agents=4), settings, resume=True, export=True)
    assert names(tmp_path, "*.onnx") == ["Toy.onnx"]


def test_second_run_in_the_same_folder_is_refused(quick, tmp_path, train_in):
    class Nested(Corridor):
        """An environment that starts a second run in its first step."""

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


def test_best_policy_is_the_policy_with_the_highest_mean_reward_in_a_summary(
    quick, tmp_path, recorder, train_in
):
    """The reward falls late in the run, so the last policy is not the best."""

    class Spoiled(Corridor):
        n_steps = 0

        def advance(self, action):
            self.n_steps += 1
            reward, ended = super().advance(action)
            return (reward if self.n_steps < 600 else reward - 5.0), ended

    train_in(Spoiled(n_agents=4), quick(max_steps=6000), sinks=[recorder], export=True)
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


def test_due_checkpoint_is_written_once_if_the_run_is_stopped_at_the_same_step(
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
            Corridor(n_agents=4), quick(max_steps=10_000, checkpoint_interval=300), export=True
        )
    (step,) = written
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] == step


def test_inference_counts_steps_but_neither_learns_nor_saves(quick, tmp_path, recorder, train_in):
    trained = train_in(Corridor(n_agents=4), quick()).behaviors["Toy"]
    before = files(tmp_path)
    result = train_in(
        StopsAt(200, n_agents=4), quick(), resume=True, inference=True, sinks=[recorder]
    ).behaviors["Toy"]
    assert files(tmp_path) == before
    assert result.steps > trained.steps + 300  # far beyond max_steps
    assert result.n_updates == trained.n_updates
    assert len(recorder.steps("Toy")) >= 3
    assert not any("Losses/Policy Loss" in values for _, _, values in recorder.rows)


def test_all_behaviors_are_saved_at_the_same_moment(quick, tmp_path, train_in):
    train_in(Crowd(seed=1), quick("Mood", "Choice"))
    states = [load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("Mood", "Choice")]
    assert states[0]["run"] == states[1]["run"]
    steps = {state["behavior"]: state["learner"]["step"] for state in states}
    assert states[0]["run"]["steps"] == steps


NETWORK = {"hidden_units": 8, "num_layers": 2, "normalize": True}
MEMORY = {"memory": {"sequence_length": 4, "memory_size": 6}}


@pytest.mark.parametrize(
    ("toy", "network"),
    [*((toy, {}) for toy in (Chase, Corridor, Both, Quadrant, Wish)), (Cue, MEMORY)],
)
def test_saved_policy_acts_as_the_trained_policy(toy, network, quick, monkeypatch, train_in):
    learners = []
    monkeypatch.setattr(
        "pipeline.trainer.loop.Learner",
        lambda *args, **named: learners.append(Learner(*args, **named)) or learners[0],
    )

    result = train_in(
        toy(n_agents=4), quick(network_settings=NETWORK | network, max_steps=300)
    ).behaviors["Toy"]
    saved = load_policy(result.checkpoint)
    assert (saved.behavior, saved.step) == ("Toy", result.steps)
    assert saved.spec == toy.spec
    assert saved.settings.network_settings.hidden_units == 8
    assert len(saved.recorded_obs[0]) == 32
    trained = record(learners[0].algorithm.policy, saved.recorded_obs, saved.recorded_masks)
    loaded = record(saved.policy, saved.recorded_obs, saved.recorded_masks)
    assert ("recurrent_out" in loaded.expected) == bool(network)
    assert trained.expected.keys() == loaded.expected.keys()
    for name, values in trained.expected.items():
        np.testing.assert_array_equal(values, loaded.expected[name])
    assert (saved.recorded_masks is None) == (not toy.spec.action_spec.discrete_size)


def test_policy_of_a_run_without_updates_has_recorded_observations(quick, train_in):
    result = train_in(Corridor(n_agents=4), quick(max_steps=10)).behaviors["Toy"]
    assert result.n_updates == 0
    saved = load_policy(result.checkpoint)
    assert saved.recorded_obs[0].shape == (4, 6)
    np.testing.assert_array_equal(saved.recorded_masks, np.ones((4, 3), np.float32))


class Renamed(Chase):
    """An environment with two sensors of the given names."""

    def __init__(self, *names):
        super().__init__(n_agents=4)
        vectors = [ObservationSpec.vector(4, name) for name in names]
        self.spec = Chase.spec._replace(observation_specs=vectors)

    def observe(self):
        (seen,) = super().observe()
        return [seen, np.zeros_like(seen)]


def test_resume_with_sensors_in_another_order_is_refused(quick, train_in):
    train_in(Renamed("ball", "paddle"), quick(max_steps=200))
    for first in ("paddle", "apddle"):  # Unity sorts sensors by name
        with pytest.raises(CheckpointError, match=rf"\['ball', 'paddle'\].*\['{first}', 'ball'\]"):
            train_in(Renamed(first, "ball"), quick(), resume=True)


def test_renamed_sensors_cause_a_warning_on_resume_and_initialization(
    quick, tmp_path, train_in, caplog
):
    train_in(Renamed("ball", "paddle"), quick(max_steps=200))
    other = {"run_dir": tmp_path / "new", "init_from": {"Toy": tmp_path / "Toy/checkpoint.pt"}}
    train_in(Renamed("paddle", "ball"), quick(max_steps=200), **other)
    train_in(Renamed("ball", "padle"), quick(), resume=True)
    lines = [line for line in caplog.messages if "observations" in line]
    assert len(lines) == 2
    assert "has ['paddle', 'ball']" in lines[0]
    assert "has ['ball', 'padle']" in lines[1]
    caplog.clear()
    train_in(Renamed("ball", "padle"), quick(max_steps=700), resume=True)
    assert not [line for line in caplog.messages if "observations" in line]
