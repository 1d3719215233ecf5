"""Files that settings name are looked for before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_files
from pipeline.settings.run_file import refuse_missing_demonstrations

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "behaviors:\n  A:\n    reward_signals:\n      gail:\n        demo_path: no.demo\n",
            "one.yaml:5: behaviors.A.reward_signals.gail.demo_path: no.demo is not there; `pipe",
        ),
        (
            "behaviors:\n  A:\n    behavioral_cloning:\n      demo_path:\n        - here.demo\n"
            "        - no.demo\n",
            "one.yaml:6: behaviors.A.behavioral_cloning.demo_path[1]: no.demo is not there; ",
        ),
        (
            f"default_settings:\n  {CLONED}\nbehaviors:\n  A: {{}}\n",
            "one.yaml:2: behaviors.A.behavioral_cloning.demo_path: no.demo is not there; ",
        ),
        (
            f"default_settings:\n  {CLONED}\n",
            "one.yaml:2: default_settings.behavioral_cloning.demo_path: no.demo is not there; ",
        ),
        (
            "behaviors:\n  A:\n    behavioral_cloning: {demo_path: empty}\n",
            "one.yaml:3: behaviors.A.behavioral_cloning.demo_path: empty is a folder without '.de",
        ),
        (
            "behaviors:\n  A:\n    behavioral_cloning: {demo_path: hree.demo}\n",
            "one.yaml:3: behaviors.A.behavioral_cloning.demo_path: hree.demo is not there; did you "
            "mean 'here.demo'?",
        ),
    ],
)
def test_a_demonstration_that_is_not_there_is_told_with_its_place_and_a_remedy(text, expected):
    Path("here.demo").touch()
    Path("empty").mkdir()
    assert refusal(SettingsError, refuse_missing_demonstrations, run(text)).startswith(expected)


def test_demonstrations_that_are_there_are_no_mistake():
    Path("here.demo").touch()
    Path("some").mkdir()
    Path("some/a.demo").touch()
    refuse_missing_demonstrations(
        run("behaviors: {A: {behavioral_cloning: {demo_path: [here.demo, some]}}}")
    )


@pytest.mark.parametrize(
    ("trainer", "change", "expected"),
    [
        (f"A: {{{CLONED}}}", ("", ""), "one.yaml:2: behaviors.A.behavioral_cloning.demo_path: "),
        ("A: {init_path: no.pt}", ("", ""), "one.yaml:2: behaviors.A.init_path: no.pt is not th"),
        (
            "A: {}",
            ("environment: ball, episodes: 2, seed: 1", "file: mine.demo"),
            "params.yaml:2: demonstrations.played.file: mine.demo is not there; ",
        ),
    ],
)
def test_what_params_yaml_names_is_looked_for(trainer, change, expected):
    run(f"behaviors:\n  {trainer}\n")
    Path("params.yaml").write_text(PARAMS.replace(*change) if change[0] else PARAMS)
    assert refusal(SettingsError, check_files, load_params()).startswith(expected)


@pytest.mark.parametrize(
    "trainer",
    [
        "A: {behavioral_cloning: {demo_path: data/demos/played.demo}}",
        "A: {init_path: results/train/other/seed1/policy.pt}",
    ],
)
def test_what_a_stage_makes_need_not_be_there(trainer):
    run(f"behaviors:\n  {trainer}\n")
    Path("params.yaml").write_text(PARAMS)
    check_files(load_params())
