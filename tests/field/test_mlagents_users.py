"""Reports of ML-Agents users: recordings with teams, configurations of other versions."""

import io
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from refusals import refusal

from pipeline.cli import main as cli
from pipeline.cli import timers
from pipeline.core.simulator import no_state
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import (
    BRAIN_OFFSET,
    delimited_message,
    describe,
    parse_demo,
    read_demo,
    writing_demo,
)
from pipeline.demos.demonstrations import merge_demos, trim_demo
from pipeline.demos.tables import read_table
from pipeline.envs import launch
from pipeline.envs.launch import EnvironmentProcess
from pipeline.envs.named_env import executable_of
from pipeline.envs.registry import RemoteRegistryEntry
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import (
    DemonstrationError,
    PipelineError,
    SettingsError,
    UnityEnvironmentException,
)
from pipeline.export.layout import load as load_model
from pipeline.settings import load_run_settings, read_yaml
from pipeline.simulators.bridges.spaces import Actions
from pipeline.trainer.api import read_settings
from pipeline.trainer.checkpoints.file import load_checkpoint

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))


def recorded(path: Path, behavior: str) -> Path:
    """Two episodes, with the behavior's name in the file as Unity's recorder writes it."""
    with writing_demo(path, behavior, SPEC) as writer:
        writer.append(
            obs=[np.zeros((4, 2), np.float32)],
            actions=ActionTuple(np.zeros((4, 1), np.float32), np.zeros((4, 0), np.int32)),
            reward=np.arange(4, dtype=np.float32),
            done=np.array([False, True, False, True]),
        )
    content = parse_demo(path)
    content.brain.brain_name = behavior
    data = path.read_bytes()
    (length, *_), start = data[BRAIN_OFFSET:], BRAIN_OFFSET + 1
    path.write_bytes(
        data[:BRAIN_OFFSET] + delimited_message(content.brain) + data[start + length :]
    )
    assert behavior.encode() in path.read_bytes()
    return path


def test_trimmed_and_merged_recordings_have_a_behavior_name_without_the_team(tmp_path: Path):
    """Each recording of Unity has a team in its name."""
    whole = recorded(tmp_path / "whole.demo", "Soccer?team=1")
    part, both = tmp_path / "part.demo", tmp_path / "both.demo"
    for target, printed in (
        (part, trim_demo(whole, part, episodes=[2])),
        (both, merge_demos([whole, part], both)),
        (both, merge_demos([part, whole, recorded(tmp_path / "c.demo", "Soccer?team=0")], both)),
        (both, merge_demos([whole], both, behavior="Soccer?team=1")),
    ):
        assert printed[-1] == f"wrote     {target}: behavior Soccer"
        assert parse_demo(target).brain.brain_name == "Soccer"
        assert "behavior      Soccer\n" in describe(read_demo(target))
    assert len(read_demo(both)) == 4


def test_recordings_of_two_behaviors_are_not_merged(tmp_path: Path):
    files = [
        recorded(tmp_path / "a.demo", "Soccer?team=0"),
        recorded(tmp_path / "b.demo", "Goalie?team=0"),
    ]
    with pytest.raises(DemonstrationError, match=r"has the behavior 'Goalie', but .* has 'Soccer'"):
        merge_demos(files, tmp_path / "c.demo")


def test_trainer_file_with_more_than_1024_behaviors_is_refused(tmp_path):
    """Regression: 20,000 short behaviors took four seconds, below the limit of values."""
    path = tmp_path / "trainer.yaml"
    path.write_text("behaviors:\n" + "".join(f"  B{i}: {{}}\n" for i in range(1025)))
    with pytest.raises(SettingsError, match=r"behaviors: has 1,025 behaviors; .* at most 1,024"):
        load_run_settings(path)
    path.write_text(path.read_text().replace("  B1024: {}\n", ""))
    assert len(load_run_settings(path).behaviors) == 1024


OBJECT = "!!python/object/apply:mlagents.trainers.settings.DefaultTrainerDict"
CLASS = "!!python/name:mlagents.trainers.settings.TrainerSettings ''"
WRITTEN = f"""\
default_settings: null
behaviors: {OBJECT}
  args:
  - {CLASS}
  dictitems:
    Ball:
      trainer_type: sac
      hyperparameters:
        learning_rate: 0.0002
        learning_rate_schedule: constant
        batch_size: 32
      network_settings:
        hidden_units: 17
        conditioning_type: hyper
      max_steps: 1234
      threaded: true
      framework: pytorch
    Goalie:
      max_steps: 7
env_settings:
  env_path: null
  num_envs: 2
checkpoint_settings:
  run_id: ball
debug: false
"""


def test_configuration_written_by_mlagents_025_is_read(tmp_path: Path):
    path = tmp_path / "configuration.yaml"
    path.write_text(WRITTEN)
    settings = load_run_settings(path)
    ball = settings.behaviors["Ball"]
    assert (ball.trainer_type, ball.max_steps, ball.hyperparameters.batch_size) == ("sac", 1234, 32)
    assert (ball.network_settings.hidden_units, settings.behaviors["Goalie"].max_steps) == (17, 7)
    assert (settings.env_settings.num_envs, settings.checkpoint_settings.run_id) == (2, "ball")
    assert read_yaml(path).value["behaviors"].value["Goalie"].line == 18


def test_configuration_of_mlagents_025_without_behaviors_is_read(tmp_path: Path):
    text = f"default_settings: {{max_steps: 5}}\nbehaviors: {OBJECT}\n- {CLASS}\ndebug: true\n"
    path = tmp_path / "configuration.yaml"
    path.write_text(text)
    settings = load_run_settings(path)
    assert (settings.behaviors, settings.debug) == ({}, True)
    assert settings.for_behavior("Any").max_steps == 5


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (OBJECT, "!!python/object/apply:os.system", 2),
        (OBJECT, "!!python/object/apply:collections.OrderedDict", 2),
        (CLASS, "!!python/name:os.system ''", 4),
        (CLASS, "!!python/object/apply:os.system [ls]", 4),
        ("trainer_type: sac", f"trainer_type: {CLASS}", 7),
        ("max_steps: 7", f"max_steps: [{CLASS}]", 19),
        ("num_envs: 2", "num_envs: !!int 2", 22),
        ("  args:\n", "  state: {a: 1}\n  args:\n", 2),
    ],
)
def test_configuration_with_yaml_tags_that_mlagents_025_does_not_write_is_refused(
    tmp_path: Path, old: str, new: str, line: int
):
    path = tmp_path / "configuration.yaml"
    path.write_text(WRITTEN.replace(old, new, 1))
    with pytest.raises(SettingsError, match=rf"\.yaml:{line}: .*(allowed|has only)"):
        load_run_settings(path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
TORCH = io.BytesIO()
torch.save({"a": torch.zeros(1)}, TORCH)
KINDS = {
    "empty": (b"", "is empty; copy or download it again"),
    "pointer": (POINTER, "is a pointer of Git LFS; `git lfs pull` fetches the file itself"),
    "elf": (b"\x7fELF\2\1\1" + bytes(9) + b"\xd0", "is a program for Linux; give it with --env"),
    "exe": (b"MZ\x90\0\3" + b"\xff" * 9, "is a program for Windows; give it with --env"),
    "mac": (b"\xcf\xfa\xed\xfe\7", "is a program for macOS; give it with --env"),
    "packed": (
        b"#!/bin/sh\n# an environment\nPK\3\4\0\0\xff",
        "is an executable of `pipeline env build`; give it with --env",
    ),
    "page": (b"<!DOCTYPE html>\n<html>", "is a web page; download the file itself instead of its"),
    "onnx": (b"\x08\x07\x12\x07pytorch\xff", "is an ONNX model, which `pipeline evaluate` plays"),
    "torch": (TORCH.getvalue(), "is a checkpoint; Unity and `pipeline evaluate` take the .onnx"),
    "zip": (b"PK\3\4\x0a\0\xff", "is an archive; unpack it first"),
    "gz": (b"\x1f\x8b\x08\0\xff", "is an archive; unpack it first"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "read", "own"),
    [
        ("a.yaml", load_run_settings, "empty"),
        ("a.demo", read_demo, ""),
        ("a.onnx", load_model, "onnx"),
        ("a.pt", load_checkpoint, "zip torch"),
        ("a.csv", read_table, ""),
        ("a.parquet", read_table, ""),
        ("timers.json", timers.read, ""),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_error_about_a_file_of_a_wrong_type_names_the_type(name, read, own, kind, tmp_path: Path):
    """ml-agents#1960, netron#463: "save it as UTF-8", "export the policy again"."""
    content, said = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    if kind in own.split():
        return
    message = refusal(PipelineError, read, path)
    assert message.startswith(f"{path}: ")
    assert said in message


@pytest.mark.parametrize("mode", [0o755, 0o644])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"packed"}))
def test_error_about_an_environment_that_is_no_program_of_this_system_names_the_file_type(
    kind, mode, tmp_path: Path
):
    """Regression: the advice for a pointer of Git LFS was to make it executable."""
    content, said = KINDS[kind]
    path = tmp_path / "Game.x86_64"
    path.write_bytes(content)
    path.chmod(mode)
    message = refusal(UnityEnvironmentException, EnvironmentProcess, [str(path)])
    said = said.replace("give it with --env", "name a build for this system")
    if (kind, mode) == ("elf", 0o644):
        said = "chmod"
    assert f"{path}: the file" in message
    assert said in message


def test_error_about_a_binary_configuration_file_does_not_advise_another_encoding(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\x1c\x08\1\x10\0\xff")
    said = "has binary data; name a YAML file"
    assert refusal(SettingsError, load_run_settings, path).endswith(said)
    path.write_text("BZh: 1\n")
    said = f"{path}:1: unknown key 'BZh'"
    assert refusal(SettingsError, load_run_settings, path).startswith(said)


H, P = "hyperparameters", "environment_parameters"
TEAM = "the teams of a behavior share its settings; write 'Pong'"
BELOW = "is at the top level of the file; indent it below"
ABOVE = "belongs to the top level of the file; indent it as 'behaviors:' is"
INSIDE = "of a behavior; it belongs below 'behaviors:' and the behavior's name"
BESIDE = "is a setting of a behavior; indent it below the behavior's name"
CALLED = "is called 'default_settings' in a file with 'behaviors'"
EMPTY = "behaviors: {B: {}}\n"
MISPLACED = {
    "behaviors:\n  Pong?team=0: {max_steps: 5}\n": f"2: behaviors.Pong?team=0: {TEAM}",
    "Pong?team=1: {trainer: ppo, batch_size: 8}\n": f"1: behaviors.Pong?team=1: {TEAM}",
    "behaviors:\nBall:\n  trainer_type: ppo\n": f"2: Ball: {BELOW} 'behaviors:'",
    "Ball:\n  trainer_type: ppo\n": f"1: Ball: {BELOW} 'behaviors:'",
    f"{EMPTY}Ball: {{hyperparameters: {{beta: 5}}}}\n": f"2: Ball: {BELOW} 'behaviors:'",
    f"{EMPTY}{P}:\ngravity: 9.8\n": f"3: gravity: {BELOW} '{P}:'",
    "behaviors:\n  Ball:\n  trainer_type: ppo\n": f"3: behaviors.trainer_type: {BESIDE}",
    f"max_steps: 5\n{EMPTY}": f"1: max_steps: is a setting {INSIDE}",
    f"n_steps: 5\n{EMPTY}": f"1: n_steps: is {H}.buffer_size (n_steps x n_envs) {INSIDE}",
    f"{EMPTY}hidden_units: 5\n": f"2: hidden_units: is network_settings.hidden_units {INSIDE}",
    "behaviors:\n  default_settings: {max_steps: 5}\n": f"2: behaviors.default_settings: {ABOVE}",
    "behaviors:\n  env_settings: {num_envs: 5}\n": f"2: behaviors.env_settings: {ABOVE}",
    f"{EMPTY}default: {{max_steps: 5}}\n": f"2: default: {CALLED}",
}


@pytest.mark.parametrize(("text", "said"), MISPLACED.items())
def test_configuration_key_at_a_wrong_nesting_level_is_refused_when_the_file_is_read(
    text, said, tmp_path: Path
):
    """ml-agents#4140, #4200, #6090: "can be used", and "has not been specified" much later."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert refusal(SettingsError, load_run_settings, path) == f"{path}:{said}"


def test_behavior_called_default_logs_a_warning(tmp_path: Path, caplog):
    """Before 0.18, `default` had the settings of all behaviors without a section."""
    path = tmp_path / "c.yaml"
    path.write_text("behaviors:\n  default: {max_steps: 5}\n  B: {max_steps: 6}\n")
    assert load_run_settings(path).behaviors["default"].max_steps == 5
    (line,) = caplog.messages
    assert line.startswith(f"{path}:2: behaviors.default: only a behavior called 'default' has ")
    assert "'default_settings', at the top level of the file" in line


@pytest.fixture
def games(tmp_path: Path, monkeypatch) -> Path:
    players = ("my games/Tennis", "build/Tennis", "two/A", "two/B")
    for name in ("Game", *(f"{player}.x86_64" for player in players)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (tmp_path / "build/Tennis_Data").mkdir()
    (tmp_path / "c.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "my games"))
    return tmp_path


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ("Game --n 2", "There is Game; write its arguments as in `--env Game --env-args --n 2`."),
        (
            "./my games/Tennis --n 2",
            "There is 'my games/Tennis.x86_64'; write its arguments as in `--env "
            "'my games/Tennis.x86_64' --env-args --n 2`.",
        ),
        (r".\build\Tennis.exe", "There is build/Tennis.x86_64; give this path."),
        (r"build\Tennis", "There is build/Tennis.x86_64; give this path."),
        ("Build/tennis.app", "There is build/Tennis.x86_64; give this path."),
        ("game", "There is Game; give this path."),
        ("two/", "The folder has two/A.x86_64, two/B.x86_64; name one of them."),
        ("'./Game'", "There is Game; give this path."),
        ("~/Tennis", "There is '{home}/Tennis.x86_64'; give this path."),
        ("$HOME/Tennis", "There is '{home}/Tennis.x86_64'; give this path."),
        (
            r"C:\Users\me\Game.exe",
            "This is a path of Windows; give the path of the executable on this system.",
        ),
        ("./build/Tenis", "Did you mean 'build/Tennis.x86_64'?"),
        ("build/Tennis_Data", "Did you mean 'build/Tennis.x86_64'?"),
    ],
)
def test_error_about_a_wrong_env_path_says_which_path_to_give(env, hint, games: Path):
    """ml-agents#2697, #3442; regression: the advice was `pipeline env build NAME -o ...`."""
    message = refusal(UnityEnvironmentException, executable_of, env)
    assert message.endswith(f"from the folder {games}. {hint.format(home=games / 'my games')}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["c.yaml", "--env", "my", "games/Tennis"], "a path with a blank needs quotes: 'my games"),
        (["--env", "my", "games/Tennis.x86_64"], "a path with a blank needs quotes: 'my games"),
        (["c.yaml", "--resume=True"], "--resume takes no value; give --resume alone; `"),
        (["c.yaml", "--resume", "true"], "--resume takes no value; give --resume alone; `"),
        (["c.yaml", "--no-graphics=False"], "--no-graphics takes no value; leave it out; `"),
    ],
)
def test_error_about_an_unquoted_path_or_a_flag_with_a_value_gives_the_correction(
    words, said, games: Path, capsys
):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["learn", *words])
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_words_after_the_option_env_args_are_not_checked_as_paths(games: Path):
    rest = ["my", "games/Tennis", "--resume=True"]
    words = ["learn", "c.yaml", "--env", "Game", "--env-args", *rest]
    assert cli.parser_for(words).parse_args(words).env_args == rest


def test_error_about_a_misspelt_trainer_file_names_the_existing_file(games: Path):
    for text in (r".\c.yaml", "C.YAML", "$HOME/../c.yaml"):
        assert refusal(SettingsError, load_run_settings, text).endswith("c.yaml'?")
    (games / "d.onnx").touch()
    assert "did you mean" not in refusal(SettingsError, load_run_settings, "d.yaml")


@pytest.mark.parametrize(
    ("section", "kind"),
    [("behaviors.B", "ppo"), ("behaviors.B", "poca"), ("default_settings", "ppo")],
)
def test_config_check_reports_values_that_would_rise_because_their_linear_schedule_ends_higher(
    section, kind, tmp_path, capsys
):
    """The linear schedules end at 0.1 and 1e-5, as in ML-Agents: smaller values rise."""
    path = tmp_path / "c.yaml"
    values = "epsilon: 0.05, beta: 0, learning_rate: 1.0e-11"
    trainer = f"{{trainer_type: {kind}, hyperparameters: {{{values}}}}}"
    name, _, behavior = section.partition(".")
    path.write_text(f"{name}: {f'{{B: {trainer}}}' if behavior else trainer}\n")
    assert cli.main(["config", "check", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "rises" in line]
    at, end = f"  rises:    {section}.hyperparameters", "where a linear schedule ends"
    assert lines == [
        f"{at}.learning_rate goes from 1e-11 up to 1e-10, {end}; learning_rate_schedule: constant "
        "keeps 1e-11",
        f"{at}.epsilon goes from 0.05 up to 0.1, {end}; epsilon_schedule: constant keeps 0.05",
        f"{at}.beta goes from 0 up to 1e-05, {end}; beta_schedule: constant keeps 0",
    ]
    path.write_text(path.read_text().replace("beta: 0,", "learning_rate_schedule: constant,"))
    assert cli.main(["config", "check", str(path)]) == 0
    assert "rises" not in capsys.readouterr().out


def test_config_check_accepts_values_equal_to_the_end_of_their_linear_schedule(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(
        "behaviors:\n  A: {trainer_type: ppo, hyperparameters: {epsilon: 0.1, beta: 1.0e-5}}\n"
        "  B: {trainer_type: sac, hyperparameters: {learning_rate: 3.0e-4}}\n"
    )
    assert cli.main(["config", "check", str(path)]) == 0
    assert "rises" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [2, "2", np.int64(2)])
def test_numeric_environment_arguments_become_text(number):
    given = ["--num-agents", number]
    line = launch.command_line(Path("game"), port=1, log=Path("l"), additional_args=given)
    assert line[-2:] == ["--num-agents", "2"]


def test_environment_arguments_given_as_one_string_are_refused(games: Path):
    """Regression: each letter of the text became an argument."""
    for start in (
        lambda args: UnityEnvironment("Game", additional_args=args),
        lambda args: RemoteRegistryEntry("a", 0.0, "", linux_url="x").make(additional_args=args),
    ):
        message = refusal(UnityEnvironmentException, start, "--num-agents 2")
        assert message == (
            "additional_args (or env_args): '--num-agents 2' is one text; give a list, as in "
            "['--num-agents', '2']"
        )
    message = refusal(UnityEnvironmentException, UnityEnvironment, "Game", additional_args=[None])
    assert message.startswith("additional_args (or env_args): None is not a text; give a list")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_port": 70_000}, "base_port: 70000 and the worker 0 give no port"),
        ({"base_port": 65_535, "worker_id": 1}, "base_port: 65535 and the worker 1 give no port"),
        ({"base_port": -1}, "base_port: -1 and the worker 0 give no port"),
        ({"base_port": "5005"}, "base_port: '5005' and the worker 0 give no port"),
        ({"base_port": 5005, "worker_id": -9999}, "base_port: 5005 and the worker -9999 give no"),
    ],
)
def test_invalid_port_number_is_refused(options, said, games: Path):
    """Regression: the error said that the port was still in use."""
    message = refusal(UnityEnvironmentException, UnityEnvironment, "Game", **options)
    assert message.startswith(said)
    assert message.endswith("must be a number from 0 to 65535")


def test_dotted_keys_of_overrides_are_split_except_in_names_of_behaviors_and_parameters():
    dotted = {"hyperparameters.batch_size": 8, "reward_signals.extrinsic.gamma": 0.5}
    overrides = {"behaviors": {"My.Behavior": {"trainer_type": "ppo", **dotted}}}
    overrides |= {"environment_parameters": {"wind.x": 3}}
    settings = load_run_settings(None, overrides=overrides)
    behavior = settings.behaviors["My.Behavior"]
    assert behavior.hyperparameters.batch_size == 8
    assert behavior.reward_signals["extrinsic"].gamma == 0.5
    assert list(settings.environment_parameters) == ["wind.x"]
    both = {"network_settings.hidden_units": 3, "network_settings": {"hidden_units": 4}}
    twice = {"behaviors.B": both}
    message = refusal(SettingsError, load_run_settings, None, overrides=twice)
    assert "network_settings.hidden_units: is written twice" in message


def test_error_about_settings_given_in_python_begins_with_the_argument_name_settings():
    """Regression: the error began with "overrides:", which is not an argument of `train`."""
    message = refusal(SettingsError, read_settings, {"behaviors": {"B": {"max_step": 1}}})
    assert message.startswith("settings: behaviors.B: unknown key 'max_step'")


def test_error_about_an_unbounded_action_space_gives_the_command_that_sets_action_scale():
    """`pipeline learn` has no option action_scale."""
    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    message = refusal(SettingsError, Actions, box, where="Mine")
    assert "`pipeline env build NAME --option action_scale=1 -o FILE`" in message


def test_error_about_an_environment_that_cannot_save_its_state_names_the_missing_methods():
    message = no_state(object())
    assert message.endswith("; give the environment get_state() and set_state(state)")
