"""The list of a run's checkpoints and lessons, as ML-Agents keeps it."""

from __future__ import annotations

import json

import pytest

from pipeline.trainer.checkpoints.restore import latest_run
from pipeline.trainer.checkpoints.status import StatusFile


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


def test_a_checkpoint_that_is_written_again_or_gone_is_listed_once_or_not_at_all(status):
    entered(status, 100, 200)
    assert [checkpoint["steps"] for checkpoint in entered(status, 200)["checkpoints"]] == [100, 200]
    (status.run_dir / "Toy" / "Toy-100.pt").unlink()
    assert [checkpoint["steps"] for checkpoint in entered(status, 300)["checkpoints"]] == [200, 300]


def test_lessons_and_behaviors_are_entered_beside_each_other(status):
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


def test_the_run_that_came_furthest_is_the_one_that_all_share():
    early, late = {"steps": {"A": 5, "B": 1}}, {"steps": {"A": 5, "B": 4}}
    states = {
        "A": {"run": early},
        "B": {"run": late},
        "C": {"run": None},
        "D": {},
        "E": {"run": {}},
    }
    assert latest_run(states) is late
    assert latest_run({"D": {}}) == {}
    assert latest_run({}) == {}
