"""Mistakes that people make in a configuration: one line each, with place, key and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from pathlib import Path

FILE = """\
behaviors:
  Walker:
    trainer_type: ppo
    hyperparameters:
      batch_size: 64
      buffer_size: 640
      learning_rate: 3e-4
      learning_rate_schedule: linear
      lambd: 0.95
    network_settings:
      hidden_units: 128
      vis_encode_type: simple
      memory:
        memory_size: 128
        sequence_length: 64
    reward_signals:
      extrinsic:
        gamma: 0.99
      gail:
        demo_path: a.demo
        strength: 0.1
    max_steps: 1e6
    threaded: false
    self_play:
      window: 10
    behavioral_cloning:
      demo_path: a.demo
env_settings:
  base_port: 5005
  env_args: [--x]
engine_settings:
  time_scale: 20
environment_parameters:
  mass:
    sampler_type: uniform
    sampler_parameters:
      min_value: 0.5
      max_value: 2
  gap:
    curriculum:
      - name: one
        completion_criteria:
          behavior: Walker
          measure: progress
          threshold: 0.5
        value: 1
      - name: two
        value: 2
checkpoint_settings:
  run_id: a
torch_settings:
  device: cpu
debug: false
"""

W = "behaviors.Walker"
H = f"{W}.hyperparameters"
N = f"{W}.network_settings"
P = "environment_parameters"

# What is replaced by what, the line of the mistake, its key path, and words of the message.
MISTAKES = [
    ("env_settings:", "env_setings:", 28, "", "unknown key 'env_setings'", "'env_settings'"),
    ("max_steps: 1e6", "max_step: 1e6", 22, W, "unknown key 'max_step'", "'max_steps'"),
    ("max_steps: 1e6", "batch_size: 64", 22, W, "belongs under 'hyperparameters'", "Allowed: tr"),
    ("max_steps: 1e6", "hidden_units: 64", 22, W, "belongs under 'network_settings'", "Allowed"),
    ("buffer_size", "bufer_size", 6, H, "unknown key 'bufer_size' (value 640)", "'buffer_size'"),
    ("lambd: 0.95", "tau: 0.95", 9, f"{H}.tau", "is a setting of sac, not of ppo", "leave it out"),
    ("extrinsic", "extrinsik", 17, f"{W}.reward_signals", "unknown key", "'extrinsic'"),
    ("        demo_path: a.demo\n", "", 19, f"{W}.reward_signals.gail", "'demo_path'", "required"),
    ("trainer_type: ppo", "trainer_type: pop", 3, f"{W}.trainer_type", "'pop'", "'ppo'?"),
    (
        "    trainer_type: ppo\n",
        "",
        3,
        H,
        "no trainer_type was given",
        "Add one of: ppo, sac, poca",
    ),
    ("simple", "simpl", 12, f"{N}.vis_encode_type", "'simpl' is not allowed", "nature_cnn, resnet"),
    ("linear", "Linear", 8, f"{H}.learning_rate_schedule", "'Linear'", "did you mean 'linear'?"),
    ("batch_size: 64", "batch_size: 64.5", 5, f"{H}.batch_size", "whole number", "got 64.5"),
    ("batch_size: 64", "batch_size: true", 5, f"{H}.batch_size", "whole number", "got True"),
    ("batch_size: 64", "batch_size: many", 5, f"{H}.batch_size", "whole number", "got 'many'"),
    ("batch_size: 64", "batch_size: 0", 5, f"{H}.batch_size", "must be at least 1", "got 0"),
    ("batch_size: 64", "batch_size: 1e30", 5, f"{H}.batch_size", "is too large", "got 1e+30"),
    ("batch_size: 64", "batch_size:", 5, f"{H}.batch_size", "whole number", "got nothing (null)"),
    ("3e-4", "fast", 7, f"{H}.learning_rate", "needs a number", "got 'fast'"),
    ("3e-4", "-1e-3", 7, f"{H}.learning_rate", "must be greater than 0", "got -0.001"),
    ("3e-4", ".nan", 7, f"{H}.learning_rate", "needs a number", "got nan"),
    ("3e-4", "false", 7, f"{H}.learning_rate", "needs a number", "got False"),
    ("0.95", "1.5", 9, f"{H}.lambd", "must be at most 1", "got 1.5"),
    ("gamma: 0.99", "gamma: 99", 18, f"{W}.reward_signals.extrinsic.gamma", "at most 1", "99"),
    ("size: 128", "size: 3", 14, f"{N}.memory.memory_size", "must be divisible by 2", "got 3"),
    ("length: 64", "length: 65", 15, f"{N}.memory.sequence_length", "batch_size", "got 65"),
    ("threaded: false", "threaded: n", 23, f"{W}.threaded", "needs true or false", "got 'n'"),
    ("threaded: false", 'threaded: "no"', 23, f"{W}.threaded", "needs true or false", "got 'no'"),
    ("5005", "70000", 29, "env_settings.base_port", "must be at most 65535", "got 70000"),
    ("[--x]", "--x", 30, "env_settings.env_args", "got '--x'", "; write [--x]"),
    ("[--x]", "[{a: 1}]", 30, "env_settings.env_args[0]", "needs text", "got {'a': 1}"),
    ("  time_scale: 20", "  - 20", 31, "engine_settings", "needs a map", "got [20]"),
    ("uniform", "unifrom", 35, f"{P}.mass.sampler_type", "'unifrom'", "'uniform'?"),
    ("0.5\n      max", "5\n      max", 37, f"{P}.mass.sampler_parameters.min_value", "exceed", "5"),
    ("    sampler_type: uniform\n", "", 34, f"{P}.mass", "does not contain sampler_type", "both"),
    ("sampler_type: uniform", "sampler-type: uniform", 35, f"{P}.mass", "unknown", "sampler_type"),
    (
        "progress",
        "speed",
        44,
        f"{P}.gap.curriculum[0].completion_criteria.measure",
        "'speed'",
        "reward",
    ),
    (
        "threshold: 0.5",
        "threshold: 5",
        45,
        f"{P}.gap.curriculum[0].completion_criteria.threshold",
        "must be in [0, 1]",
        "got 5",
    ),
    ("        value: 1\n", "", 41, f"{P}.gap.curriculum[0]", "the key 'value' is", "required"),
    ("value: 1\n", "value: one\n", 46, f"{P}.gap.curriculum[0].value", "needs a number", "'one'"),
    ("run_id: a", "run_id: [a]", 50, "checkpoint_settings.run_id", "needs text", "got ['a']"),
    (
        "max_steps: 1e6",
        "even_checkpoints: true\n    keep_checkpoints: 0",
        23,
        f"{W}.keep_checkpoints",
        "between 1 and max_steps",
        "got 0",
    ),
]


def message_of(text: str, folder: Path) -> str:
    file = folder / "x.yaml"
    file.write_text(text)
    message = refusal(SettingsError, load_run_settings, file)
    assert message.startswith(f"{folder}/")
    return message.removeprefix(f"{folder}/")


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "what", "remedy"), MISTAKES, ids=[str(m[1]) for m in MISTAKES]
)
def test_a_mistake_is_told_in_one_line_with_place_and_remedy(
    old: str, new: str, line: int, path: str, what: str, remedy: str, tmp_path: Path
) -> None:
    assert old in FILE
    message = message_of(FILE.replace(old, new, 1), tmp_path)
    assert message.startswith(f"x.yaml:{line}: {path}: " if path else f"x.yaml:{line}: ")
    assert what in message
    assert remedy in message


@pytest.mark.parametrize("section", ["", "hyperparameters"])
@pytest.mark.parametrize(
    ("trainer", "word", "meant"),
    [
        ("ppo", "n_steps", "of Stable-Baselines3 is hyperparameters.buffer_size here (n_steps x"),
        ("ppo", "ent_coef", "of Stable-Baselines3 is hyperparameters.beta here"),
        ("poca", "entropy_coef", "is hyperparameters.beta here"),
        ("sac", "entropy_coef", "is hyperparameters.init_entcoef here"),
        ("ppo", "clip_range", "of Stable-Baselines3 is hyperparameters.epsilon here"),
        ("ppo", "gae_lambda", "of Stable-Baselines3 is hyperparameters.lambd here"),
        ("ppo", "n_epochs", "of Stable-Baselines3 is hyperparameters.num_epoch here"),
        ("sac", "n_epochs", "num_epoch here, a setting of ppo and poca, not of sac; leave it out"),
        ("sac", "learning_starts", "is hyperparameters.buffer_init_steps here"),
        ("sac", "gradient_steps", "is hyperparameters.steps_per_update here (agent steps for"),
        ("sac", "train_freq", "is hyperparameters.steps_per_update here (agent steps for"),
        ("ppo", "train_freq", "steps_per_update here, a setting of sac, not of ppo; leave it out"),
        ("ppo", "gamma", "of Stable-Baselines3 is reward_signals.extrinsic.gamma here"),
        ("ppo", "n_layers", "is network_settings.num_layers here"),
        ("ppo", "total_timesteps", "of Stable-Baselines3 is max_steps here"),
        ("ppo", "algo", "of Stable-Baselines3 is trainer_type here"),
        ("sac", "num_epoch", "num_epoch: is a setting of ppo and poca, not of sac; leave it out"),
        ("poca", "shared_critic", "shared_critic: is a setting of ppo, not of poca; leave it out"),
        ("ppo", "save_replay_buffer", "is a setting of sac, not of ppo; leave it out"),
    ],
)
def test_a_word_of_another_trainer_is_answered_with_the_key_or_its_trainers(
    trainer: str, word: str, meant: str, section: str, tmp_path: Path
) -> None:
    key = f"{word}: 1" if not section else f"{section}: {{{word}: 1}}"
    text = f"behaviors: {{A: {{trainer_type: {trainer}, {key}}}}}"
    message = message_of(text, tmp_path)
    assert message.startswith(f"x.yaml:1: behaviors.A{section and '.'}{section}")
    assert word in message
    assert meant in message
    assert "did you mean" not in message


def test_the_file_without_a_mistake_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(FILE)
    assert load_run_settings(file).behaviors["Walker"].max_steps == 1_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("behaviors: {A: }", "x.yaml:1: behaviors.A: needs a map of keys to values, got nothing"),
        ("behaviors: [A]", "x.yaml:1: behaviors: needs a map of keys to values, got ['A']"),
        (
            "default_settings: {}\nbehaviors: {A: {trainer_type: [ppo]}}",
            "x.yaml:2: behaviors.A.trainer_type: ['ppo'] is not allowed. Allowed: ppo, sac, poca",
        ),
        ("- a", "x.yaml:1: needs a map of keys to values, got ['a']"),
        (
            "behaviors: {A: {reward_signals: {}}}",
            "x.yaml:1: behaviors.A.reward_signals: needs at least one reward signal",
        ),
        (
            "default_settings: {}\nbehaviors:\n  A:\n    reward_signals: {extrinsic: null}\n",
            "x.yaml:4: behaviors.A.reward_signals: needs at least one reward signal",
        ),
        (
            "behaviors: {A: {network_settings: {memory: yes}}}",
            "x.yaml:1: behaviors.A.network_settings.memory: needs a map of keys to values, got "
            "'yes'; write {sequence_length: 64, memory_size: 128}, or leave it out",
        ),
        (
            "behaviors: {A: {self_play: true}}",
            "x.yaml:1: behaviors.A.self_play: needs a map of keys to values, got True; write {} "
            "for the defaults, or leave it out",
        ),
        (
            "torch_settings: true",
            "x.yaml:1: torch_settings: needs a map of keys to values, got True; write {} for",
        ),
        (
            "behaviors: {A: {behavioral_cloning: true}}",
            "x.yaml:1: behaviors.A.behavioral_cloning: needs a map of keys to values, got True",
        ),
        ("debug: true\nbehaviors: {}\n", "x.yaml:2: behaviors: lists no behavior"),
        (
            "environment_parameters: {a: {curriculum: []}}",
            "x.yaml:1: environment_parameters.a.curriculum: needs at least one lesson",
        ),
        (
            "environment_parameters: {a: {curriculum: [{name: x, value: 1}, {name: y, value: 2}]}}",
            "x.yaml:1: environment_parameters.a.curriculum[0]: A non-terminal lesson does not have "
            "a completion_criteria for a.",
        ),
        (
            "environment_parameters: {a: high}",
            "x.yaml:1: environment_parameters.a: needs a number, a sampler or a curriculum, "
            "got 'high'",
        ),
        (
            "environment_parameters: {a: {sampler_type: multirangeuniform, "
            "sampler_parameters: {intervals: [[1, 2, 3]]}}}",
            "x.yaml:1: environment_parameters.a.sampler_parameters.intervals[0]: needs 2 values, "
            "got 3",
        ),
        (
            "environment_parameters: {a: {sampler_type: multirangeuniform, "
            "sampler_parameters: {intervals: [[2, 1]]}}}",
            "x.yaml:1: environment_parameters.a.sampler_parameters.intervals: the minimum of "
            "[2.0, 1.0] exceeds its maximum",
        ),
    ],
)
def test_values_of_the_wrong_shape_are_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message_of(text, tmp_path).startswith(message)


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    assert "..." in message_of(f"behaviours: {{A: {'x' * 500}}}", tmp_path)


# A file that says nothing is a slip, whatever is left in it.


@pytest.mark.parametrize("text", ["", "\n\n", "# comment\n# more\n", "---\n", "{}\n", "null\n"])
def test_a_file_without_settings_is_refused(tmp_path, text):
    assert message_of(text, tmp_path).startswith("x.yaml:1: holds no settings")


def test_behaviors_may_be_none_beside_default_settings(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("behaviors: {}\ndefault_settings: {}\n")
    assert load_run_settings(path).behaviors == {}


def test_a_signal_set_to_null_is_not_inherited(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "default_settings: {}\nbehaviors:\n  A:\n    reward_signals: {extrinsic: null, rnd: {}}\n"
    )
    assert list(load_run_settings(path).behaviors["A"].reward_signals) == ["rnd"]
