"""Initial weights of a new run, and settings that are refused before it begins."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import machine
from pipeline.errors import SettingsError
from pipeline.settings import TrainerSettings, load_run_settings
from pipeline.trainer.checkpoints.file import warn_of_unused, weights_of
from pipeline.trainer.checkpoints.restore import first_weights
from pipeline.trainer.supported import refuse_untrainable


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


def test_listed_behaviors_start_from_the_checkpoints_that_the_settings_name(results, monkeypatch):
    """The newest checkpoint of another run, a file name in that run, a path, or a folder."""
    monkeypatch.chdir(results)
    mine, old = results / "mine.pt", results / "old"
    newest = {name: old / name / "checkpoint.pt" for name in "AB"}
    for behaviors, run, expected in (
        ({"A": {}}, {}, {}),
        ({"A": {}, "B": {}}, {"initialize_from": "old"}, newest),
        (
            {"A": {"init_path": "A-500.pt"}, "B": {"init_path": str(mine)}},
            {"initialize_from": "old"},
            {"A": old / "A/A-500.pt", "B": mine},
        ),
        (
            {"A": {"init_path": "mine.pt"}, "B": {"init_path": "old/B"}, "C": {}},
            {},
            {"A": Path("mine.pt"), "B": Path("old/B/checkpoint.pt")},
        ),
    ):
        assert first_weights(settings(results, behaviors, **run)) == expected


def test_resumed_run_ignores_init_path(results, caplog):
    run = settings(results, {"A": {"init_path": "gone.pt"}}, resume=True)
    with caplog.at_level(logging.INFO):
        assert first_weights(run) == {}
    assert "init_path of A is ignored" in caplog.text


@pytest.mark.parametrize("name", ["gone", ""])
def test_initialize_from_that_names_a_missing_run_is_refused(results, name):
    with pytest.raises(SettingsError, match=r"Could not initialize from .*\. Make sure models"):
        first_weights(settings(results, {"A": {}}, initialize_from=name))


@pytest.mark.parametrize("file", ["A-900.pt", "notes.txt"])
def test_init_path_that_names_a_missing_or_wrong_file_is_refused(results, file):
    (results / "old/A/notes.txt").touch()
    run = settings(results, {"A": {"init_path": file}}, initialize_from="old")
    with pytest.raises(SettingsError, match=rf"old/A/{file}.*behaviors\.A\.init_path"):
        first_weights(run)


@pytest.mark.parametrize("default", [{}, {"default_settings": {"max_steps": 9}}])
def test_unlisted_behaviors_start_from_the_weights_of_the_behaviors_of_the_same_name(
    results, default
):
    run = settings(results, {}, initialize_from="old")
    run = replace(run, default_settings=TrainerSettings() if default else None)
    weights = first_weights(run)
    assert weights == {
        "A": results / "old/A/checkpoint.pt",
        "B": results / "old/B/checkpoint.pt",
    }
    assert weights_of("A", weights, run) == results / "old/A/checkpoint.pt"


def test_unlisted_behavior_without_weights_in_the_named_run_is_refused(results):
    run = settings(results, {}, initialize_from="old")
    weights = first_weights(run)
    with pytest.raises(SettingsError, match=r"initialize C from the run 'old', which has .* A, B;"):
        weights_of("C", weights, run)
    resumed = settings(results, {}, initialize_from="old", resume=True)
    assert weights_of("C", first_weights(resumed), resumed) is None


def test_only_listed_behaviors_get_weights_if_the_configuration_file_has_no_default_settings(
    results,
):
    run = replace(settings(results, {"A": {}}, initialize_from="old"), from_file=True)
    assert first_weights(run) == {"A": results / "old/A/checkpoint.pt"}


def test_init_path_of_default_settings_applies_to_unlisted_behaviors(results):
    mine = str(results / "mine.pt")
    run = settings(results, {"A": {}})
    run = replace(run, default_settings=TrainerSettings(init_path=mine))
    assert weights_of("C", first_weights(run), run) == results / "mine.pt"
    gone = replace(run, default_settings=TrainerSettings(init_path="gone.pt"))
    with pytest.raises(SettingsError, match=r"gone\.pt.*default_settings\.init_path"):
        first_weights(gone)


def test_error_about_a_missing_checkpoint_names_the_settings_line_and_a_similar_path(results):
    config = results / "config.yaml"
    config.write_text(f"behaviors:\n  A:\n    init_path: {results}/mien.pt\n")
    with pytest.raises(SettingsError, match=r"^\S+config\.yaml:3: .*; did you mean '\S+mine\.pt'"):
        first_weights(load_run_settings(config))


def test_settings_of_an_absent_behavior_give_one_warning_with_a_suggestion(caplog, results):
    run = replace(settings(results, {"A": {}}), default_settings=TrainerSettings())
    warn_of_unused({}, {"A": None, "Other": None}, run)
    warn_of_unused({}, {"A": None}, replace(settings(results, {"A": {}, "B": {}})))
    assert not caplog.messages
    run = replace(settings(results, {"Walkr": {}}), default_settings=TrainerSettings())
    warn_of_unused({}, {"Walker": None, "Ball": None}, run)
    (line,) = caplog.messages
    assert "lists Walkr under behaviors, but the environment has shown Walker, Ball so far" in line
    assert line.endswith("; did you mean 'Walker'?")


UNTRAINABLE = {"trainer_type": "ppo", "reward_signals": {"gail": {"demo_path": "nowhere.demo"}}}


def run(**behaviors):
    return load_run_settings(None, overrides={"behaviors": behaviors})


def test_error_of_the_first_behavior_is_raised_if_no_behavior_of_a_run_can_be_trained():
    message = r"behaviors\.A\.reward_signals\.gail\.demo_path: .*nowhere\.demo"
    with pytest.raises(SettingsError, match=message):
        refuse_untrainable(run(A=UNTRAINABLE, B=UNTRAINABLE))
    refuse_untrainable(run(A=UNTRAINABLE, B={"trainer_type": "ppo"}))  # B can be trained


def test_compile_is_refused_in_a_portable_run(monkeypatch):
    settings = run(A={"trainer_type": "ppo"})
    settings = replace(settings, torch_settings=replace(settings.torch_settings, compile=True))
    refuse_untrainable(settings)
    monkeypatch.setattr(machine, "is_portable", lambda: True)
    with pytest.raises(SettingsError, match=r"torch_settings\.compile: true cannot be combined"):
        refuse_untrainable(settings)
