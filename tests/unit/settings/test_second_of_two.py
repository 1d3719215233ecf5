"""Files and trials that come second are looked at as the first are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings, to_mapping
from pipeline.settings.params import Params, load_params
from pipeline.settings.plan import check_files, check_settings
from pipeline.settings.run_file import (
    missing_demonstrations,
    refuse_missing_demonstrations,
    refuse_missing_weights,
)

if TYPE_CHECKING:
    from pipeline.settings.schema import RunSettings

FILE = """
environments: {ball: {source: builtin, name: balance_ball}}
demonstrations:
  first: {environment: ball, episodes: 5, seed: 1}
  second: {environment: ball, episodes: 5, seed: 1}
experiments:
  base:
    environment: ball
    trainer: t.yaml
    overrides: {}
    seeds: [1]
    stages: [train, export, evaluate]
    evaluation: {episodes: 2, seed: 9}
sweeps:
  rates:
    experiment: base
    method: list
    configurations: [{behaviors.Ball.max_steps: 5}, {behaviors.Ball.max_steps: STEPS}]
    seeds: [1]
"""


WAITS = """demonstrations: second
    pretrain: {epochs: 1, batch_size: 2, learning_rate: 0.1}
    stages: [pretrain, train,"""


def project(folder: Path, *, paths: str = "", steps: str = "6", waits: bool = False) -> Params:
    cloning = f", behavioral_cloning: {{demo_path: [{paths}]}}" if paths else ""
    (folder / "t.yaml").write_text(f"behaviors: {{Ball: {{trainer_type: ppo{cloning}}}}}\n")
    text = FILE.replace("STEPS", steps)
    if waits:  # a sweep has no such stage
        text = text.partition("sweeps:")[0].replace("stages: [train,", WAITS)
    (folder / "params.yaml").write_text(text)
    return load_params(folder / "params.yaml")


def test_the_second_trial_of_a_list_is_read_before_anything_runs(tmp_path: Path) -> None:
    check_settings(project(tmp_path))
    said = refusal(SettingsError, check_settings, project(tmp_path, steps="many"))
    assert said == (
        f"{tmp_path}/params.yaml:18: behaviors.Ball.max_steps: needs a whole number, got 'many'"
    )


@pytest.mark.parametrize("method", ["grid", "random, runs: 9, seed: 1", "optuna, runs: 3, seed: 1"])
def test_a_value_of_a_sweep_is_named_by_its_own_line(method: str, tmp_path: Path) -> None:
    project(tmp_path)
    file = tmp_path / "params.yaml"
    head = file.read_text().partition("sweeps:")[0]
    method = method.replace(", ", "\n    ")
    swept = f"sweeps:\n  rates:\n    experiment: base\n    seeds: [1]\n    method: {method}\n"
    swept += "    parameters:\n      behaviors.Ball.max_steps:\n      - 5\n      - many\n"
    file.write_text(head + swept)
    line = (head + swept).count("\n")
    assert refusal(SettingsError, check_settings, load_params(file)) == (
        f"{file}:{line}: behaviors.Ball.max_steps: needs a whole number, got 'many'"
    )


def test_the_second_path_may_be_what_a_stage_records_if_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "own.demo").touch()
    paths = "own.demo, data/demos/second.demo"
    said = refusal(SettingsError, check_settings, project(tmp_path, paths=paths))
    assert "reads data/demos/second.demo, which the stage demos makes" in said
    waits = project(tmp_path, paths=paths, waits=True)
    check_settings(waits)
    check_files(waits)  # it need not be there yet


def settings(*behaviors: str) -> RunSettings:
    """Behaviors A, B and C, which clone these paths."""
    cloning = [{"demo_path": paths.split()} if paths else None for paths in behaviors]
    listed = {name: {"behavioral_cloning": c} for name, c in zip("ABC", cloning, strict=False)}
    return load_run_settings(None, overrides={"behaviors": listed})


def test_of_several_paths_and_behaviors_the_first_that_is_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "there.demo").touch()
    both = settings("there.demo a1.demo a2.demo", "b1.demo")
    missing = missing_demonstrations(both, folder=tmp_path)
    assert [text.split(" is not there")[0].split(": ")[-1] for text in missing.values()] == [
        "a1.demo",
        "b1.demo",
    ]
    said = refusal(SettingsError, refuse_missing_demonstrations, both, folder=tmp_path)
    assert said == missing["behaviors.A"]


def test_every_behavior_without_its_demonstrations_is_warned_of(tmp_path: Path, caplog) -> None:
    refuse_missing_demonstrations(settings("a.demo", "b.demo", ""), folder=tmp_path)
    assert [text.split(" is not there")[0].split(": ")[-1] for text in caplog.messages] == [
        "a.demo",
        "b.demo",
    ]


@pytest.mark.parametrize("first", [None, "there.pt", "results/other/checkpoint.pt"])
def test_weights_of_the_second_behavior_are_looked_for_and_told_with_their_place(
    first: str | None, tmp_path: Path
) -> None:
    (tmp_path / "there.pt").touch()
    (tmp_path / "t.yaml").write_text("behaviors: {A: {max_steps: 5}, B: {max_steps: 5}}\n")
    overrides = {"behaviors.A.init_path": first, "behaviors.B.init_path": "gone.pt"}
    loaded = load_run_settings(tmp_path / "t.yaml", overrides=overrides, overrides_from="mine")
    said = refusal(SettingsError, refuse_missing_weights, loaded, folder=tmp_path)
    assert said.startswith("mine: behaviors.B.init_path: gone.pt is not there")


def test_what_only_the_defaults_have_is_taken_from_every_behavior_that_is_written() -> None:
    signals = {"extrinsic": {}, "rnd": {}}
    loaded = load_run_settings(
        None,
        overrides={
            "default_settings": {"trainer_type": "ppo", "reward_signals": signals},
            "behaviors": {name: {"reward_signals": {"rnd": None}} for name in "ABC"},
        },
    )
    written = to_mapping(loaded)
    for name in "ABC":
        assert list(written["behaviors"][name]["reward_signals"]) == ["extrinsic", "rnd"]
        assert written["behaviors"][name]["reward_signals"]["rnd"] is None
    assert load_run_settings(None, overrides=written) == loaded


def test_a_key_of_the_past_in_the_defaults_is_no_key_of_a_behavior(caplog) -> None:
    defaults = {"trainer_type": "ppo", "framework": "tensorflow", "max_steps": 7}
    overrides = {"default_settings": defaults, "behaviors": {"A": {}, "B": {}}}
    loaded = load_run_settings(None, overrides=overrides)
    assert [loaded.behaviors[name].max_steps for name in "AB"] == [7, 7]
    assert len(caplog.messages) == 1, "once, where it is written"
