"""`pipeline config`: what it shows, what it writes, and what it says about changes."""

import json
import logging
import re
from functools import partial

import pytest

from pipeline.cli import main as cli
from pipeline.settings import load_run_settings, parse_yaml, read_yaml
from pipeline.settings.nodes import to_plain

FLAT = """\
default:
  trainer: ppo
  batch_size: 64
  buffer_size: 640
  max_steps: 5.0e4
  memory_size: 256
  use_recurrent: false
  reward_signals:
    extrinsic: {strength: 1.0, gamma: 0.99}
Walker:
  batch_size: 128
  burn_in_ratio: 0.5
"""
CURRICULUM = {"measure": "reward", "thresholds": [1.5], "parameters": {"gap": [1, 2]}}
SAMPLER = "resampling-interval: 10\nmass: {sampler-type: uniform, min_value: 1, max_value: 2}\n"


@pytest.fixture
def here(here):
    (here / "old.yaml").write_text(FLAT)
    (here / "Walker.json").write_text(json.dumps(CURRICULUM))
    (here / "sampler.yaml").write_text(SAMPLER)
    return here


@pytest.fixture
def run(printed):
    return partial(printed, "config")


def test_config_check_with_option_full_prints_every_setting(here, run):
    settings = to_plain(parse_yaml(run("check", "old.yaml", "--full"), source="shown"))
    assert settings["behaviors"]["Walker"]["hyperparameters"]["batch_size"] == 128
    assert settings["behaviors"]["Walker"]["hyperparameters"]["num_epoch"] == 3
    assert settings["engine_settings"]["time_scale"] == 20
    (here / "many.yaml").write_text("behaviors: {A: {}}\nenv_settings: {num_envs: 4}\n")
    assert "num_envs: 4" in run("check", "many.yaml", "--full"), "without an executable"
    assert settings["environment_parameters"] is None


def test_config_check_without_option_full_prints_a_short_verdict(here, run):
    files = ["--curriculum", "Walker.json", "--sampler", "sampler.yaml"]
    assert run("check", "old.yaml", *files).splitlines() == [
        "old.yaml: can be used.",
        "  format: ML-Agents 0.3 to 0.16 (a section with all keys for each behavior)",
        "  behaviors: Walker (ppo, 50,000 steps), any other (ppo, 50,000 steps)",
        "  environment parameters (number of lessons): gap (2), mass (1)",
        "  converted to today's format: 12 keys have moved; 3 warnings name settings with another "
        "meaning (`pipeline config upgrade old.yaml Walker.json sampler.yaml -o old.new.yaml "
        "--verbose` lists each)",
        "`--full` prints every setting.",
    ]


def test_upgrade_command_that_config_check_prints_works(here, run, caplog):
    """Regression: the printed command lacked the file and `-o`."""
    with caplog.at_level(logging.INFO):
        said = run("check", "old.yaml")
    (logged,) = [one for one in caplog.messages if "converts it to the present format" in one]
    for text in (said, logged):
        command = re.search("`pipeline config (upgrade .*?)`", text)[1]
        assert run(*command.split()).endswith("settings as old.yaml.\n")
        (here / "old.new.yaml").unlink()


def test_config_check_names_behaviors_and_missing_demonstrations(here, run):
    (here / "new.yaml").write_text(
        "behaviors:\n  Walker:\n    behavioral_cloning: {demo_path: no.demo}\n  Ball: {}\n"
    )
    lines = run("check", "new.yaml").splitlines()
    assert lines[2] == "  behaviors: Walker (ppo, 500,000 steps), Ball (ppo, 500,000 steps)"
    place = "new.yaml:3: behaviors.Walker.behavioral_cloning.demo_path"
    assert lines[3].startswith(f"  not here: {place}: no.demo does not exist; ")


def test_config_check_and_learn_refuse_missing_demonstrations_in_the_same_words(here, run, refused):
    """Regression: `check` reported "can be used", and `learn` refused the file."""
    (here / "new.yaml").write_text("behaviors: {A: {behavioral_cloning: {demo_path: no.demo}}}\n")
    error = refused("learn", "new.yaml")
    valid = "the configuration is valid, but cannot be used yet: "
    assert refused("config", "check", "new.yaml") == f"{valid}{error}"
    assert "demo_path: no.demo" in run("check", "new.yaml", "--full")


@pytest.mark.parametrize("command", ["config check", "learn"])
def test_missing_demonstrations_are_reported_together_with_other_mistakes(here, capsys, command):
    signals = "reward_signals: {gail: {demo_path: [here.demo, no.demo]}}"
    (here / "here.demo").touch()
    (here / "t.yaml").write_text(f"behaviors:\n  A:\n    max_stesp: 5\n    {signals}\n")
    rest = ["--env", "balance_ball"] if command == "learn" else []
    assert cli.main([*command.split(), "t.yaml", *rest]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: t.yaml:3: behaviors.A: unknown key 'max_stesp'")
    at = "t.yaml:4: behaviors.A.reward_signals.gail.demo_path: no.demo does not exist; "
    assert second.startswith(f"error: {at}")


def test_config_check_of_only_a_curriculum_file_lists_its_parameters(here, run):
    assert run("check", "Walker.json").splitlines()[:2] == [
        "Walker.json: can be used.",
        "  environment parameters (number of lessons): gap (2)",
    ]


@pytest.mark.parametrize(("file", "name"), [("Walker.json", "gap"), ("sampler.yaml", "mass")])
def test_config_check_full_converts_a_curriculum_or_sampler_file_given_alone(here, run, file, name):
    settings = to_plain(parse_yaml(run("check", file, "--full"), source="shown"))
    assert list(settings) == ["environment_parameters"]
    assert list(settings["environment_parameters"]) == [name]


@pytest.mark.parametrize("turned", [False, True])
def test_upgrade_accepts_trainer_curriculum_and_sampler_files_in_any_order(here, run, turned):
    olds = ["old.yaml", "Walker.json", "sampler.yaml"]
    run("upgrade", *(reversed(olds) if turned else olds), "-o", "new.yaml")
    expected = load_run_settings("old.yaml", curriculum="Walker.json", sampler="sampler.yaml")
    assert load_run_settings("new.yaml") == expected


def test_upgrade_writes_only_settings_of_the_old_files(here, run):
    run("upgrade", "old.yaml", "Walker.json", "sampler.yaml", "-o", "new.yaml")
    lesson = {"measure": "reward", "behavior": "Walker", "threshold": 1.5, "require_reset": True}
    lesson |= {"min_lesson_length": 1, "signal_smoothing": False}
    mass = {"min_value": 1.0, "max_value": 2.0}
    assert to_plain(read_yaml("new.yaml")) == {
        "default_settings": {
            "trainer_type": "ppo",
            "hyperparameters": {"batch_size": 64, "buffer_size": 640},
            "max_steps": 50000,
            "reward_signals": {"extrinsic": {"strength": 1.0, "gamma": 0.99}},
        },
        "behaviors": {"Walker": {"hyperparameters": {"batch_size": 128}}},
        "environment_parameters": {
            "gap": {
                "curriculum": [
                    {"name": "Lesson0", "completion_criteria": lesson, "value": 1.0},
                    {"name": "Lesson1", "value": 2.0},
                ]
            },
            "mass": {"sampler_type": "uniform", "sampler_parameters": mass},
        },
    }


def test_upgrade_with_option_verbose_lists_every_change_with_its_line(here, run):
    words = ("upgrade", "old.yaml", "sampler.yaml", "-o", "new.yaml", "--verbose")
    lines = run(*words).splitlines()
    moved, gone = lines.index("Moved:"), lines.index("Removed:")
    assert "  old.yaml:2: default.trainer -> default_settings.trainer_type" in lines[moved:gone]
    place = "behaviors.Walker.hyperparameters.batch_size"
    assert f"  old.yaml:11: Walker.batch_size -> {place}" in lines[moved:gone]
    assert any(line.startswith("  old.yaml:6: default.memory_size: ") for line in lines[gone:])
    assert any(line.startswith("  old.yaml:12: Walker.burn_in_ratio: ") for line in lines[gone:])
    assert any(line.startswith("  sampler.yaml:1: resampling-interval: ") for line in lines[gone:])
    assert lines[-1].startswith("Wrote new.yaml; read again, it gives the same settings")


def test_comments_of_an_upgraded_file_name_the_old_file_and_list_warnings(here, run):
    run("upgrade", "old.yaml", "-o", "new.yaml")
    header = [line for line in (here / "new.yaml").read_text().splitlines() if line[0] == "#"]
    assert header[0] == "# Written by `pipeline config upgrade` from old.yaml."
    assert "ML-Agents 0.3 to 0.16" in header[1]
    assert any("Walker.burn_in_ratio: no equivalent" in line for line in header)


def test_comments_of_an_upgraded_file_list_repeated_keys_of_the_old_file(here, run):
    (here / "old.yaml").write_text(FLAT + "  batch_size: 256\n")
    note = "old.yaml:13: batch_size: written twice, first in line 11; the last value is used"
    assert note in run("upgrade", "old.yaml", "-o", "new.yaml", "--verbose")
    assert f"#   {note}" in (here / "new.yaml").read_text()
    walker = load_run_settings("new.yaml").behaviors["Walker"]
    assert walker.hyperparameters.batch_size == 256


def test_upgrade_overwrites_a_file_only_with_option_force(here, run, refused):
    (here / "new.yaml").write_text("precious: 1\n")
    error = refused("config", "upgrade", "old.yaml", "-o", "new.yaml")
    assert error.startswith("new.yaml exists already.")
    assert (here / "new.yaml").read_text() == "precious: 1\n"
    run("upgrade", "old.yaml", "-o", "new.yaml", "--force")
    assert load_run_settings("new.yaml") == load_run_settings("old.yaml")


def test_upgrade_with_option_force_may_overwrite_its_input_file(here, run):
    before = load_run_settings("old.yaml")
    run("upgrade", "old.yaml", "-o", "old.yaml", "--force")
    assert load_run_settings("old.yaml") == before
    output = run("upgrade", "old.yaml", "-o", "again.yaml")
    assert output.startswith("Wrote again.yaml. old.yaml has today's format already")
    assert to_plain(read_yaml("again.yaml")) == to_plain(read_yaml("old.yaml"))


def test_upgrade_leaves_out_defaults_that_mlagents_cannot_read(here, run):
    text = FLAT + "  reward_signals: {curiosity: {strength: 0.5}}\n"
    (here / "old.yaml").write_text(text)
    output = run("upgrade", "old.yaml", "-o", "new.yaml")
    assert "default_settings are left out, since behavior 'Walker'" in output
    new, old = load_run_settings("new.yaml"), load_run_settings("old.yaml")
    assert new.default_settings is None
    assert new.behaviors == old.behaviors
    assert "null" not in (here / "new.yaml").read_text()


def test_upgrade_keeps_text_that_looks_like_a_number(here, run):
    (here / "new.yaml").write_text("behaviors: {A: {}}\ncheckpoint_settings: {run_id: 007}\n")
    run("upgrade", "new.yaml", "-o", "newer.yaml")
    assert load_run_settings("newer.yaml").checkpoint_settings.run_id == "007"


def test_upgrade_replaces_deprecated_keys_by_their_successors(here, run):
    text = (
        "behaviors:\n  A:\n    framework: pytorch\n    reward_signals:\n"
        "      curiosity: {encoding_size: 32}\n"
        "environment_parameters:\n  mass:\n    sampler_type: multirange_uniform\n"
        "    sampler_parameters: {intervals: [[1, 2]]}\n"
    )
    (here / "a.yaml").write_text(text)
    run("upgrade", "a.yaml", "-o", "b.yaml")
    written = to_plain(read_yaml("b.yaml"))
    signal = {"curiosity": {"network_settings": {"hidden_units": 32}}}
    assert written["behaviors"] == {"A": {"reward_signals": signal}}
    assert written["environment_parameters"]["mass"]["sampler_type"] == "multirangeuniform"


BROKEN = """\
behaviors:
  A:
    trainer_type: pppo
    hyperparameters: {batch_size: -1}
    max_stesp: 5
    time_horizon: 0
  B:
    trainer_type: ppo
    hyperparameters:
      learning_rate: fast
      tau: 0.1
    self_play:
      save_steps: -1
  C: 5
env_settings: {num_envs: none}
max_steps: 3
A2:
  trainer_type: ppo
"""


@pytest.mark.parametrize("command", ["config check", "learn"])
def test_all_mistakes_of_a_file_are_reported_together(here, capsys, command):
    (here / "t.yaml").write_text(BROKEN)
    rest = ["--env", "balance_ball"] if command == "learn" else []
    assert cli.main([*command.split(), "t.yaml", *rest]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [re.split(r" \(value|, got|;", line)[0] for line in lines] == [
        "error: t.yaml:3: behaviors.A.trainer_type: 'pppo' is not allowed",
        "error: t.yaml:5: behaviors.A: unknown key 'max_stesp'",
        "error: t.yaml:6: behaviors.A.time_horizon: must be at least 1",
        "error: t.yaml:10: behaviors.B.hyperparameters.learning_rate: needs a number",
        "error: t.yaml:11: behaviors.B.hyperparameters.tau: is a setting of sac and xqc, not of "
        "ppo",
        "error: t.yaml:13: behaviors.B.self_play.save_steps: must be at least 1",
        "error: t.yaml:14: behaviors.C: needs a map of keys to values",
        "error: t.yaml:15: env_settings.num_envs: needs a whole number",
        "error: t.yaml:16: max_steps: is a setting of a behavior",
        "error: t.yaml:17: A2: is at the top level of the file",
    ]


@pytest.mark.parametrize(
    ("text", "starts", "n_lines"),
    [
        # a wrong indent of several keys is one mistake
        (
            "behaviors:\n  trainer_type: ppo\n  max_steps: 5\n",
            "2: behaviors.trainer_type: is a ",
            1,
        ),
        ("behaviors:\nA: {max_steps: 5}\nB: {max_steps: 5}\n", "2: A: is at the top level", 1),
        ("env_settings:\nseed: 5\nnum_envs: 5\n", "2: seed: is at the top level of the file", 1),
        # a mistake that behaviors inherit is printed once
        (
            "default_settings: {max_steps: 0}\nbehaviors: {A: {}, B: {}}\ndebug: 3\n",
            "1: default_settings.max_steps: must be at least 1, got 0\n"
            "error: t.yaml:3: debug: needs true or false, got 3",
            2,
        ),
        # of very many mistakes only the first are printed
        (
            "behaviors:\n" + "".join(f"  B{number}: {{max_steps: 0}}\n" for number in range(25)),
            "2: behaviors.B0.max_steps: must be at least 1",
            21,
        ),
    ],
)
def test_mistakes_with_the_same_cause_are_reported_once_and_at_most_20_are_printed(
    here, capsys, text, starts, n_lines
):
    (here / "t.yaml").write_text(text)
    assert cli.main(["config", "check", "t.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: t.yaml:{starts}")
    assert told.count("\n") == n_lines
    assert told.endswith("error: 5 more mistakes\n") == (n_lines == 21)
