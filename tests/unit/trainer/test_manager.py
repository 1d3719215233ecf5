"""Checkpoint files of a run: their behavior, number, content and the time of writing."""

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toys import Corridor

from pipeline.data.columns import Columns, Field
from pipeline.data.replay import Replay
from pipeline.envs.workers import WorkerSet
from pipeline.errors import CheckpointError
from pipeline.trainer import loop as loop_module
from pipeline.trainer.checkpoints import manager as manager_module
from pipeline.trainer.checkpoints import replay_files
from pipeline.trainer.checkpoints.manager import CheckpointManager, numbered
from pipeline.trainer.checkpoints.replay_files import delete_older_replays, load_replay, save_replay
from pipeline.trainer.checkpoints.status import StatusFile
from pipeline.trainer.stopping import StopRequest


class Behavior:
    """Replaces a learner."""

    spec = replay_to_keep = sync = None

    def __init__(self, name, *, keep, rating=None) -> None:
        self.name, self.step = name, 10
        self.settings = SimpleNamespace(keep_checkpoints=keep)
        self.statistics = SimpleNamespace(recent=[])
        self.snapshot_pool = None if rating is None else SimpleNamespace(rating=rating)

    def state_dict(self):
        return {"step": self.step}

    def weights_dict(self):
        return {"weights at": self.step}

    def experience(self, *, with_open):
        return {"of": self.name, "open": with_open}


@pytest.fixture
def learners():
    """Two behaviors, the second one in self-play."""
    return Behavior("A", keep=1), Behavior("B", keep=2, rating=1200.0)


@pytest.fixture
def written(monkeypatch):
    """Return the written states by file, in the order of writing; the files are empty."""
    files: dict[str, dict] = {}

    def save(path, state):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        files[f"{path.parent.name}/{path.name}"] = state

    monkeypatch.setattr(manager_module, "save_checkpoint", save)
    monkeypatch.setattr(manager_module, "description", lambda name, *_: {"behavior": name})
    return files


def test_each_behavior_keeps_and_lists_its_own_number_of_checkpoints(written, learners, tmp_path):
    exported, told = [], []

    def export(path, folder, *, label):
        (folder / f"{folder.name}{label}.onnx").write_text(path.name)
        exported.append((path.name, label))

    def noted(name, path, step):
        told.append((name, path.name, step))

    keeper = CheckpointManager(tmp_path, None, exporter=export, on_checkpoint=noted)
    one, two = learners
    one.statistics.recent, two.statistics.recent = [1.0, 2.0], [30.0]
    for step in (10, 20, 30):
        one.step = two.step = step
        two.snapshot_pool.rating += 1.0
        keeper.milestone(one, {"moment": step})
        assert (keeper.has_numbered(one), keeper.has_numbered(two)) == (True, False)
        keeper.milestone(two, {"moment": step})
    left = sorted(path.name for path in tmp_path.glob("*/*-*"))
    names = ("A-30", "B-20", "B-30")
    assert left == [f"{name}.{suffix}" for name in names for suffix in ("onnx", "pt")]
    assert written["B/B-20.pt"] == {
        "behavior": "B",
        "learner": {"step": 20},
        "best": None,
        "run": {"moment": 20},
    }
    steps = [(name, step) for step in (10, 20, 30) for name in "AB"]
    assert exported == [(f"{name}-{step}.pt", f"-{step}") for name, step in steps]
    assert told == [(name, f"{name}-{step}.pt", step) for name, step in steps]
    status = keeper.status.read()
    assert [status[name]["final_checkpoint"]["reward"] for name in "AB"] == [1.5, 30.0]
    assert [status[name].get("elo") for name in "AB"] == [None, 1203.0]
    assert [[c["steps"] for c in status[name]["checkpoints"]] for name in "AB"] == [[30], [20, 30]]
    keeper.export_final([one, two])
    assert [(tmp_path / f"{name}.onnx").read_text() for name in "AB"] == ["A-30.pt", "B-30.pt"]


def test_best_checkpoint_is_selected_by_reward_or_rating_and_kept_after_resuming(
    written, learners, tmp_path
):
    keeper, (one, two) = CheckpointManager(tmp_path, None), learners
    for step, reward, rating, n_episodes in (
        (5, 9.0, 1290.0, 19),  # too few episodes to be the best
        (10, 3.0, 1250.0, 20),
        (20, 5.0, 1240.0, 20),
        (30, 4.0, 1260.0, 20),
    ):
        for learner in learners:
            learner.step, learner.statistics.recent = step, [reward] * n_episodes
            if learner.snapshot_pool is not None:
                learner.snapshot_pool.rating = rating
            keeper.consider(learner)
    best = {"A": {"reward": 5.0, "step": 20}, "B": {"reward": 4.0, "step": 30, "elo": 1260.0}}
    assert keeper.best == best
    one.step = 40
    states = keeper.snapshot([one, two], {"moment": 4}, with_open=True)
    assert [written[f"{n}/best.pt"]["learner"] for n in "AB"] == [
        {"weights at": 20},
        {"weights at": 30},
    ]
    assert [written[f"{n}/best.pt"]["best"] for n in "AB"] == [best["A"], best["B"]]
    assert [states[n]["experience"] for n in "AB"] == [{"of": n, "open": True} for n in "AB"]
    keeper.write(states, workers=["environments"])
    for name, state in states.items():
        kept = state | {"environments": ["environments"]}
        assert written[f"{name}/checkpoint.pt"] == kept
        assert (kept["best"], kept["run"]) == (best[name], {"moment": 4})
    assert keeper.saved_steps == {"A": 40, "B": 30}
    written.clear()
    one.step = 50
    keeper.refresh([one], {})
    assert list(written) == ["A/checkpoint.pt"], "the best policy is the same"
    assert written["A/checkpoint.pt"]["experience"]["open"] is False
    assert written["A/checkpoint.pt"]["environments"] is None
    assert keeper.saved_steps == {"A": 50, "B": 30}
    # A resumed run restores the best policy and the step of each behavior.
    resumed = CheckpointManager(tmp_path, None)
    for name, state in states.items():
        resumed.restore(name, state, exact=False)
    resumed.consider(one)  # its mean reward of 4 is below 5
    assert (resumed.best, resumed.saved_steps) == (best, {"A": 40, "B": 30})
    resumed.finish([one, two], {"moment": 5})
    assert [name for name in written if "-" in name] == ["A/A-50.pt", "B/B-30.pt"]
    assert [written[f"{n}/checkpoint.pt"]["best"] for n in "AB"] == [best["A"], best["B"]]


@pytest.mark.parametrize(
    ("keep", "gone"), [(5, []), (3, []), (0, []), (-1, []), (2, [1]), (1, [1, 2])]
)
def test_oldest_checkpoints_beyond_keep_checkpoints_are_selected_for_deletion(tmp_path, keep, gone):
    """The newest checkpoint, of step 3, is written again and counts once."""
    for name in ("B-3.pt", "B-1.pt", "B-2.pt", "B-x.pt", "Bee-1.pt", "checkpoint.pt", "B-0.onnx"):
        (tmp_path / name).touch()
    path, surplus = numbered(tmp_path, "B", keep, 3)
    assert path == tmp_path / "B-3.pt"
    assert surplus == [tmp_path / f"B-{step}.pt" for step in gone]


@pytest.mark.parametrize(
    ("saved", "reward", "kept"), [({"reward": 2.0, "step": 7}, 1.0, 2.0), (None, -3.0, -3.0)]
)
def test_resumed_run_replaces_the_best_policy_only_by_a_higher_reward(
    saved, reward, kept, quick, make_learner, tmp_path
):
    learner = make_learner(Corridor.spec)
    learner.statistics.add_episodes([reward] * 20, [5] * 20)
    manager = CheckpointManager(tmp_path, quick(), exporter=lambda *_, **__: None)
    manager.restore("Toy", {"best": saved, "learner": {"step": 0}}, exact=True)
    manager.consider(learner)
    assert manager.best["Toy"]["reward"] == kept
    manager.milestone(learner, {})
    (entry,) = manager.status.read()["Toy"]["checkpoints"]
    assert entry["reward"] == reward, "entries have the recent mean reward"


def test_numbered_checkpoint_of_the_current_step_counts_only_if_this_run_wrote_the_file(
    quick, make_learner, tmp_path
):
    settings, learner = quick(), make_learner(Corridor.spec)
    CheckpointManager(tmp_path, settings).milestone(learner, {})
    manager = CheckpointManager(tmp_path, settings)
    assert not manager.has_numbered(learner), "another run may have written the file"
    at = {"learner": {"step": learner.step}}
    manager.restore("Toy", {**at, "run": {"added": []}}, exact=True)
    assert manager.has_numbered(learner)
    manager = CheckpointManager(tmp_path, settings)
    manager.restore("Toy", {**at, "run": {"added": ["Toy"]}}, exact=True)
    assert not manager.has_numbered(learner)
    manager.milestone(learner, {})
    assert manager.has_numbered(learner)


class KilledError(Exception):
    """Simulates a kill."""


def test_run_killed_repeatedly_while_writing_keeps_checkpoints_of_all_behaviors_from_one_step(
    tmp_path, quick, monkeypatch
):
    settings = quick("A", "B")
    save, left = manager_module.save_checkpoint, []

    def killed(path, state):
        if not left or left.pop():
            save(path, state)
            return
        raise KilledError

    monkeypatch.setattr(manager_module, "save_checkpoint", killed)

    def moment(number):
        run = {"steps": {"A": number, "B": number}}
        return {
            name: {"behavior": name, "run": run, "learner": {"step": number}} for name in ("A", "B")
        }

    def saved():
        manager = CheckpointManager(tmp_path, settings)
        states = manager.saved()
        assert states["A"]["run"] == states["B"]["run"], "both were saved together"
        return manager, states["A"]["run"]["steps"]["A"]

    CheckpointManager(tmp_path, settings).write(moment(1), workers=None)
    for number in (2, 3, 4):  # each run resumes from moment 1 and is killed after one file
        manager, resumed_at = saved()
        assert resumed_at == 1
        left[:] = [False, True]
        with pytest.raises(KilledError):
            manager.write(moment(number), workers=None)
    manager, resumed_at = saved()
    assert resumed_at == 1
    manager.write(moment(5), workers=None)
    assert saved()[1] == 5
    # A kill after a complete write leaves the files of that write.
    left[:] = [False, True]
    with pytest.raises(KilledError):
        manager.write(moment(6), workers=None)
    assert saved()[1] == 5


def test_resumed_run_deletes_later_checkpoints_and_their_onnx_files(tmp_path, quick):
    keeper = CheckpointManager(tmp_path, quick("A", "B"))
    for name in "AB":
        (tmp_path / name).mkdir()
        for step in (5, 20, 100):
            for suffix in ("pt", "onnx"):
                (tmp_path / name / f"{name}-{step}.{suffix}").touch()
        # Only A had no checkpoint of this step when the resume file was written.
        keeper.restore(name, {"learner": {"step": 20}, "run": {"added": ["A"]}}, exact=True)
    kept = {path.name for path in tmp_path.glob("*/*-*")}
    assert kept == {f"{x}.{suffix}" for x in ("A-5", "B-5", "B-20") for suffix in ("pt", "onnx")}
    at = [SimpleNamespace(name=name, step=step) for name in "AB" for step in (5, 20)]
    assert [keeper.has_numbered(learner) for learner in at] == [True, False, False, True]
    other = CheckpointManager(tmp_path, quick("A", "B"))  # another run has written the files
    assert not any(map(other.has_numbered, at))


def test_checkpoint_is_complete_when_it_is_listed_and_when_older_checkpoints_are_deleted(
    tmp_path, quick, make_learner, monkeypatch
):
    learner, seen = make_learner(Corridor.spec, keep_checkpoints=1), []

    def export(path, folder, *, label):
        assert path.exists()
        (folder / f"{folder.name}{label}.onnx").touch()

    def told(name, path, step):
        steps = [entry["steps"] for entry in keeper.status.read()[name]["checkpoints"]]
        seen.append((path.with_suffix(".onnx").exists(), step, steps))

    keeper = CheckpointManager(tmp_path, quick(), exporter=export, on_checkpoint=told)
    learner.step = 10
    keeper.milestone(learner, {})
    learner.step = 20
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "save_checkpoint", None)
        with pytest.raises(TypeError):
            keeper.milestone(learner, {})
    assert (tmp_path / "Toy/Toy-10.pt").exists()
    assert not keeper.has_numbered(learner)
    keeper.milestone(learner, {})
    assert [path.name for path in tmp_path.glob("Toy/*.pt")] == ["Toy-20.pt"]
    assert seen == [(True, 10, [10]), (True, 20, [20])]


def test_replay_files_stay_until_no_checkpoint_of_any_behavior_needs_them(
    tmp_path, quick, monkeypatch
):
    def killed(path, _state):
        if path.parent.name == "B":
            raise InterruptedError
        path.touch()

    older, newer = ("replay-4-1.npz", "replay-6-2.npz"), ("replay-6-2.npz", "replay-9-3.npz")
    kept = {"A": newer, "B": newer[1:]}
    for name in kept:
        (tmp_path / name).mkdir()
        for file in {*older, *newer}:
            (tmp_path / name / file).touch()
    keeper = CheckpointManager(tmp_path, quick("A", "B"))
    states = {
        name: {
            "behavior": name,
            "learner": {"step": 9},
            "replay": [[file, "digest", 1] for file in files],
        }
        for name, files in kept.items()
    }

    def left():
        return {name: {path.name for path in (tmp_path / name).glob("*.npz")} for name in kept}

    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "save_checkpoint", killed)
        with pytest.raises(InterruptedError):
            keeper.write(states, workers=None)
    assert left() == {name: {*older, *newer} for name in kept}
    keeper.write(states, workers=None)
    assert left() == {name: set(files) for name, files in kept.items()}


def test_file_of_new_replay_rows_gets_a_name_that_no_earlier_file_has(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_files, "_write", lambda *_: None)
    made = []
    for names_kept in ([], ["replay-8.npz"], ["replay-8-4.npz", "replay-8-5.npz"]):
        replay = SimpleNamespace(
            kept=[(name, "digest", 1) for name in names_kept],
            new_rows=lambda: {"place": np.zeros(2)},
            note_kept=lambda name, *_: made.append(name),
        )
        replay_files.save_new_rows(tmp_path, SimpleNamespace(replay_to_keep=replay, step=8))
    assert made == ["replay-8-1.npz", "replay-8-1.npz", "replay-8-6.npz"]


def with_replay(*, keeps=True, step=30):
    replay = Replay(Columns({"reward": Field(shape=())}, [Field(shape=(2,))]), capacity=8)
    return SimpleNamespace(step=step, replay_to_keep=replay if keeps else None)


def test_replay_files_that_the_checkpoint_does_not_name_are_deleted(tmp_path, caplog, monkeypatch):
    for step in (10, 20, 30):
        saved = save_replay(tmp_path, with_replay(step=step))
        assert saved["replay"] == f"replay-{step}.npz"
    (tmp_path / "resume.pt").touch()
    delete_older_replays(tmp_path, {})
    assert len(list(tmp_path.glob("*.npz"))) == 3
    delete_older_replays(tmp_path, {"replay": "replay-30.npz"})
    assert {path.name for path in tmp_path.iterdir()} == {"replay-30.npz", "resume.pt"}
    with monkeypatch.context() as patch:  # another process has deleted the file already
        patch.setattr(Path, "glob", lambda self, _: [self / "replay-7.npz"])
        delete_older_replays(tmp_path, {"replay": "replay-30.npz"})
    load_replay(tmp_path, saved, with_replay())
    load_replay(
        tmp_path, {"replay": "replay-30.npz"}, with_replay()
    )  # as written by a version without digests
    load_replay(tmp_path, {}, with_replay(keeps=False))
    assert not caplog.records
    assert save_replay(tmp_path, with_replay(keeps=False)) == {}
    with pytest.raises(CheckpointError, match="replay-30"):
        save_replay(tmp_path / "resume.pt", with_replay())


@pytest.mark.parametrize("damage", ["nothing named", "gone", "objects", "cut", "changed", "header"])
def test_unreadable_replay_is_replaced_by_an_empty_replay_with_a_warning(tmp_path, caplog, damage):
    saved = save_replay(tmp_path, with_replay())
    path = tmp_path / saved["replay"]
    if damage == "gone":
        path.unlink()
    elif damage == "objects":  # reading objects would run code of the file
        state = with_replay().replay_to_keep.state_dict()
        first = next(iter(state))
        np.savez(path, **{**state, first: np.array([{"a": 1}], dtype=object)})
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "header":
        with zipfile.ZipFile(path, "w") as archive:  # with valid checksums
            archive.writestr("place.npy", b"\x93NUMPY\x01\x00\x06\x00('a',\n")
    elif damage == "changed":
        state = with_replay().replay_to_keep.state_dict()
        np.savez(path, **{**state, "place": np.full(3, 99)})
    load_replay(tmp_path, {} if damage == "nothing named" else saved, with_replay())
    (record,) = caplog.records
    assert "was unable to load, starting from scratch" in record.getMessage()
    assert ("save_replay_buffer: true" in record.getMessage()) == (damage == "nothing named")


@pytest.fixture
def status(tmp_path):
    return StatusFile(tmp_path)


def entered(status, *steps):
    for step in steps:
        path = status.run_dir / "Toy" / f"Toy-{step}.pt"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        status.add("Toy", path, step=step, reward=step / 100)
    return status.read()["Toy"]


def test_list_of_checkpoints_has_each_existing_checkpoint_once(status):
    entered(status, 100, 200)
    assert [checkpoint["steps"] for checkpoint in entered(status, 200)["checkpoints"]] == [100, 200]
    (status.run_dir / "Toy" / "Toy-100.pt").unlink()
    assert [checkpoint["steps"] for checkpoint in entered(status, 300)["checkpoints"]] == [200, 300]


def test_status_file_has_lessons_behaviors_and_metadata(status):
    entered(status, 100)
    status.set_lessons({"gravity": 2})
    path = status.run_dir / "Other" / "Other-5.pt"
    path.parent.mkdir()
    path.touch()
    status.add("Other", path, step=5, reward=None)
    content = json.loads(status.path.read_text())
    assert content["gravity"] == {"lesson_num": 2}
    assert content["Other"]["checkpoints"][0]["reward"] is None
    assert {"Toy", "Other", "gravity", "metadata"} == set(content)
    assert set(content["metadata"]) >= {"stats_format_version", "torch_version"}


@pytest.fixture
def run(quick, make_loop, in_process, recorder, monkeypatch):
    """Train with a saving time of `save_s`; return the writes with their steps, and `n_updates`."""

    def train(save_s, **options):
        written = []

        class Noted(loop_module.CheckpointManager):
            def snapshot(self, learners, run, *, with_open):
                written.append(("moment", learners[0].step))
                return super().snapshot(learners, run, with_open=with_open)

            def write(self, states, *, workers):
                super().write(states, workers=workers)
                self.save_s = save_s

            def milestone(self, learner, run):
                written.append(("milestone", learner.step))
                return super().milestone(learner, run)

        monkeypatch.setattr(loop_module, "CheckpointManager", Noted)
        with WorkerSet([in_process(Corridor(n_agents=4))]) as workers:
            settings = quick(checkpoint_interval=300, max_steps=700)
            loop = make_loop(workers, settings, sinks=[recorder], **options)
            loop.checkpoints.save_s = save_s
            result = loop.run(StopRequest()).behaviors["Toy"]
        return written, result.n_updates

    return train


def test_resume_point_is_written_after_every_update_if_resume_interval_s_is_0(run):
    written, n_updates = run(0.0, resume_interval_s=0.0)
    moments = [step for event, step in written if event == "moment"]
    assert len(moments) >= n_updates - 1 > 3


def test_slow_saving_reduces_resume_points_but_not_numbered_checkpoints(run):
    written, _ = run(1e12, resume_interval_s=1e-6)
    milestones = [step for event, step in written if event == "milestone" and step < 700]
    moments = [step for event, step in written if event == "moment" and step < 700]
    assert len(milestones) == 2
    assert moments == milestones


def test_saving_time_includes_snapshot_and_write(make_loop, quick, in_process, monkeypatch):
    with WorkerSet([in_process(Corridor(n_agents=4))]) as workers:
        keeper = make_loop(workers, quick()).checkpoints
    clock = iter([100.0, 103.0, 200.0, 205.0])
    monkeypatch.setattr("pipeline.trainer.checkpoints.manager.time.monotonic", lambda: next(clock))
    states = keeper.snapshot([], {}, with_open=True)
    assert keeper.save_s == 3.0
    keeper.write(states, workers=None)
    assert keeper.save_s == 8.0
    assert keeper.saved_at == 205.0
