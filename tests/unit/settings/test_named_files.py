"""Files named in settings are checked before anything is built."""

from pathlib import Path

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_files, check_settings
from pipeline.settings.trainer.run_file import (
    missing_demonstrations,
    refuse_missing_demonstrations,
    refuse_missing_weights,
)

PARAMS = """\
environments: {ball: {source: builtin, name: balance_ball}}
demonstrations: {played: {environment: ball, episodes: 2, seed: 1}}
experiments:
  one: {environment: ball, trainer: one.yaml, stages: [train], seeds: [1], overrides: {}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text: str):
    Path("one.yaml").write_text(text)
    return load_run_settings("one.yaml")


CLONED = "behavioral_cloning: {demo_path: no.demo}"


A = "behaviors:\n  A:\n    "
DEFAULTS = f"default_settings:\n  {CLONED}\n"
GAIL = f"{A}reward_signals:\n      gail:\n        demo_path: no.demo\n"
LIST = f"{A}behavioral_cloning:\n      demo_path:\n        - here.demo\n        - no.demo\n"
HERE = f"{A}behavioral_cloning: {{{{demo_path: {{}}}}}}"
KEY, GONE = "behavioral_cloning.demo_path", "no.demo does not exist; "
NEAR = f"behaviors.A.{KEY}: hree.demo does not exist"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GAIL, f"5: behaviors.A.reward_signals.gail.demo_path: {GONE}record"),
        (LIST, f"6: behaviors.A.{KEY}[1]: {GONE}"),
        (f"{DEFAULTS}behaviors:\n  A: {{}}\n", f"2: behaviors.A.{KEY}: {GONE}"),
        (DEFAULTS, f"2: default_settings.{KEY}: {GONE}"),
        (HERE.format("empty"), f"3: behaviors.A.{KEY}: empty has no '.demo' files"),
        (HERE.format("hree.demo"), f"3: {NEAR}; did you mean 'here.demo'?"),
    ],
)
def test_missing_demonstration_is_reported_with_line_and_remedy(text, expected):
    Path("here.demo").touch()
    Path("empty").mkdir()
    said = refusal(SettingsError, refuse_missing_demonstrations, run(text))
    assert said.startswith(f"one.yaml:{expected}")


def test_existing_demonstrations_are_accepted():
    Path("here.demo").touch()
    Path("some").mkdir()
    Path("some/a.demo").touch()
    both = "behavioral_cloning: {demo_path: [here.demo, some]}"
    refuse_missing_demonstrations(run(f"behaviors: {{A: {{{both}}}}}"))


MINE = PARAMS.replace("environment: ball, episodes: 2, seed: 1", "file: mine.demo")


@pytest.mark.parametrize(
    ("trainer", "params", "expected"),
    [
        (f"A: {{{CLONED}}}", PARAMS, f"one.yaml:2: behaviors.A.{KEY}: "),
        ("A: {init_path: no.pt}", PARAMS, "one.yaml:2: behaviors.A.init_path: no.pt does not e"),
        ("A: {}", MINE, "params.yaml:2: demonstrations.played.file: mine.demo does not exist; "),
    ],
)
def test_missing_files_named_in_params_yaml_are_reported(trainer, params, expected):
    run(f"behaviors:\n  {trainer}\n")
    Path("params.yaml").write_text(params)
    assert refusal(SettingsError, check_files, load_params()).startswith(expected)


def test_file_that_another_stage_writes_may_be_missing():
    run("behaviors:\n  A: {init_path: results/train/other/seed1/policy.pt}\n")
    Path("params.yaml").write_text(PARAMS)
    check_files(load_params())


def cloning(*behaviors):
    """Return settings of behaviors A, B and C that clone demonstrations at these paths."""
    sections = [{"demo_path": paths.split()} if paths else None for paths in behaviors]
    listed = {name: {"behavioral_cloning": c} for name, c in zip("ABC", sections, strict=False)}
    return load_run_settings(None, overrides={"behaviors": listed})


def told(messages) -> list[str]:
    """Return the path that each message is about."""
    return [text.split(" does not exist")[0].split(": ")[-1] for text in messages]


def test_first_missing_demonstration_of_each_behavior_is_reported(folder, caplog):
    place = folder / "elsewhere"
    place.mkdir()
    (place / "there.demo").touch()
    paths = ("there.demo a1.demo a2.demo", "b1.demo")
    missing = missing_demonstrations(cloning(*paths), folder=place)
    assert told(missing.values()) == ["a1.demo", "b1.demo"]
    said = refusal(SettingsError, refuse_missing_demonstrations, cloning(*paths), folder=place)
    assert said == missing["behaviors.A"]
    refuse_missing_demonstrations(cloning(*paths, ""), folder=place)  # C needs none
    assert told(caplog.messages) == ["a1.demo", "b1.demo"]


def test_demonstration_may_be_missing_if_training_waits_for_the_stage_that_records_it(folder):
    (folder / "own.demo").touch()
    run("behaviors: {A: {behavioral_cloning: {demo_path: [own.demo, data/demos/two.demo]}}}")
    two = "  two: {environment: ball, episodes: 2, seed: 1}\nexperiments:"
    text = PARAMS.replace("demonstrations: {", "demonstrations:\n  ").replace("1}}\n", "1}\n")
    text = text.replace("experiments:", two)
    Path("params.yaml").write_text(text)
    said = refusal(SettingsError, check_settings, load_params())
    assert "experiments.one: behaviors.A.behavioral_cloning.demo_path reads data/demos/two" in said
    assert "which the stage demos writes; set 'demonstrations: two'" in said
    waits = "pretrain: {epochs: 1, batch_size: 2, learning_rate: 0.1}, demonstrations: two"
    text = text.replace("stages: [train]", f"stages: [pretrain, train], {waits}")
    Path("params.yaml").write_text(text)
    check_settings(load_params())
    check_files(load_params())  # the demonstration may be missing


@pytest.mark.parametrize("first", [None, "there.pt", "results/other/checkpoint.pt"])
def test_missing_initial_weights_of_any_behavior_are_reported_with_source_and_key(first, folder):
    place = folder / "elsewhere"
    place.mkdir()
    (place / "there.pt").touch()
    (folder / "t.yaml").write_text("behaviors: {A: {max_steps: 5}, B: {max_steps: 5}}\n")
    overrides = {"behaviors.A.init_path": first, "behaviors.B.init_path": "gone.pt"}
    loaded = load_run_settings(folder / "t.yaml", overrides=overrides, overrides_from="mine")
    said = refusal(SettingsError, refuse_missing_weights, loaded, folder=place)
    assert said.startswith("mine: behaviors.B.init_path: gone.pt does not exist")
