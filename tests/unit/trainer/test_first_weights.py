"""Where the weights of a new run come from."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer.checkpoints.restore import first_weights


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in ("old/A/checkpoint.pt", "old/A/A-500.pt", "old/B/checkpoint.pt", "mine.pt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def settings(results: Path, behaviors, **checkpoint):
    overrides = {
        "behaviors": behaviors,
        "checkpoint_settings": {"results_dir": str(results), **checkpoint},
    }
    return load_run_settings(None, overrides=overrides)


def test_nothing_is_taken_unless_asked_for(results):
    assert first_weights(settings(results, {"A": {}})) == {}


def test_listed_behaviors_begin_with_the_newest_checkpoint_of_the_other_run(results):
    asked = settings(results, {"A": {}, "B": {}}, initialize_from="old")
    assert first_weights(asked) == {
        "A": results / "old/A/checkpoint.pt",
        "B": results / "old/B/checkpoint.pt",
    }


def test_a_bare_name_is_another_checkpoint_of_that_run_and_a_path_is_itself(results):
    mine = str(results / "mine.pt")
    behaviors = {"A": {"init_path": "A-500.pt"}, "B": {"init_path": mine}}
    asked = settings(results, behaviors, initialize_from="old")
    assert first_weights(asked) == {"A": results / "old/A/A-500.pt", "B": results / "mine.pt"}


def test_init_path_counts_without_another_run_and_may_name_a_folder(results, monkeypatch):
    monkeypatch.chdir(results)
    behaviors = {"A": {"init_path": "mine.pt"}, "B": {"init_path": "old/B"}, "C": {}}
    assert first_weights(settings(results, behaviors)) == {
        "A": Path("mine.pt"),
        "B": Path("old/B/checkpoint.pt"),
    }


def test_a_resumed_run_has_its_own_weights(results, caplog):
    asked = settings(results, {"A": {"init_path": "gone.pt"}}, resume=True)
    with caplog.at_level(logging.INFO):
        assert first_weights(asked) == {}
    assert "init_path of A is not used" in caplog.text


@pytest.mark.parametrize("name", ["gone", ""])
def test_a_run_that_is_not_there_is_named(results, name):
    with pytest.raises(SettingsError, match=r"Could not initialize from .*\. Make sure models"):
        first_weights(settings(results, {"A": {}}, initialize_from=name))


@pytest.mark.parametrize("file", ["A-900.pt", "notes.txt"])
def test_a_checkpoint_that_is_not_there_or_is_none_is_named(results, file):
    (results / "old/A/notes.txt").touch()
    asked = settings(results, {"A": {"init_path": file}}, initialize_from="old")
    with pytest.raises(SettingsError, match=rf"old/A/{file}.*behaviors\.A\.init_path"):
        first_weights(asked)


def test_a_run_without_listed_behaviors_is_told_that_none_begins_with_weights(results, caplog):
    assert first_weights(settings(results, {}, initialize_from="old")) == {}
    assert "No behavior begins with the weights" in caplog.text
