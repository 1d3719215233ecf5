"""Which behavior, limit and moment each file of a run belongs to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeline.trainer.checkpoints import manager as manager_module
from pipeline.trainer.checkpoints.manager import CheckpointManager


class Behavior:
    """A stand-in for a learner."""

    spec = replay_to_keep = None

    def __init__(self, name, *, keep, rating=None) -> None:
        self.name, self.step = name, 10
        self.settings = SimpleNamespace(keep_checkpoints=keep)
        self.statistics = SimpleNamespace(recent=[])
        self.past = None if rating is None else SimpleNamespace(rating=rating)

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
    """What was written, by file, in its order; the files are empty."""
    files: dict[str, dict] = {}

    def save(path, state):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        files[f"{path.parent.name}/{path.name}"] = state

    monkeypatch.setattr(manager_module, "save_checkpoint", save)
    monkeypatch.setattr(manager_module, "description", lambda name, *_: {"behavior": name})
    return files


def test_each_behavior_keeps_as_many_checkpoints_as_it_says_and_lists_its_own_numbers(
    written, learners, tmp_path
):
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
        two.past.rating += 1.0
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
    keeper.give_onnx([one, two])
    assert [(tmp_path / f"{name}.onnx").read_text() for name in "AB"] == ["A-30.pt", "B-30.pt"]


def test_the_best_is_by_reward_or_rating_of_its_own_moment_and_in_every_later_file(
    written, learners, tmp_path
):
    keeper, (one, two) = CheckpointManager(tmp_path, None), learners
    for step, reward, rating in ((10, 3.0, 1250.0), (20, 5.0, 1240.0), (30, 4.0, 1260.0)):
        for learner in learners:
            learner.step, learner.statistics.recent = step, [reward] * 20
            if learner.past is not None:
                learner.past.rating = rating
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
    assert list(written) == ["A/checkpoint.pt"], "no best has come since"
    assert written["A/checkpoint.pt"]["experience"]["open"] is False
    assert written["A/checkpoint.pt"]["environments"] is None
    assert keeper.saved_steps == {"A": 50, "B": 30}
    # a resumed run knows each behavior's best and step
    resumed = CheckpointManager(tmp_path, None)
    for name, state in states.items():
        resumed.restore(name, state, exact=False)
    assert (resumed.best, resumed.saved_steps) == (best, {"A": 40, "B": 30})
    resumed.finish([one, two], {"moment": 5})
    assert list(written)[1:] == [
        "A/A-50.pt",
        "B/B-30.pt",
        "A/checkpoint.pt",
        "B/checkpoint.pt",
    ] or ([name for name in written if "-" in name] == ["A/A-50.pt", "B/B-30.pt"])
    assert [written[f"{n}/checkpoint.pt"]["best"] for n in "AB"] == [best["A"], best["B"]]
