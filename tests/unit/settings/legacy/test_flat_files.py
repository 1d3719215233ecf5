"""Flat files of ML-Agents 0.3 to 0.16 are converted to settings with the same meaning."""

import json
import logging
from textwrap import indent

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.trainer.schema import (
    CuriositySettings,
    DemoPath,
    DemoSource,
    ExtrinsicSettings,
    GAILSettings,
    NetworkSettings,
    PPOSettings,
    SACSettings,
    SelfPlaySettings,
)

PPO = """\
default:
  trainer: ppo
  batch_size: 1000
  beta: 4.0e-3
  buffer_size: 10000
  epsilon: 0.3
  hidden_units: 100
  lambd: 0.9
  learning_rate: 2.0e-4
  learning_rate_schedule: linear
  max_steps: 5.0e4
  memory_size: 256
  normalize: true
  num_epoch: 4
  num_layers: 3
  time_horizon: 60
  sequence_length: 32
  summary_freq: 1000
  use_recurrent: false
  vis_encode_type: resnet
  reward_signals:
    extrinsic:
      strength: 2.0
      gamma: 0.98
"""
SAC = """\
Agent:
  trainer: sac
  batch_size: 100
  buffer_size: 5000
  buffer_init_steps: 10
  hidden_units: 64
  init_entcoef: 0.5
  learning_rate: 1.0e-3
  max_steps: 5e3
  normalize: false
  num_layers: 1
  time_horizon: 32
  summary_freq: 500
  tau: 0.01
  use_recurrent: no
"""
EARLY = """\
Brain:
  trainer: ppo
  beta: 1.0e-2
  gamma: 0.97
"""


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_loading_an_old_file_logs_its_format_in_one_line(loaded, caplog):
    caplog.set_level(logging.INFO)
    loaded(PPO)
    assert len(caplog.messages) == 1
    assert "old.yaml: has the format of ML-Agents 0.3 to 0.16" in caplog.messages[0]
    assert "`pipeline config upgrade " in caplog.messages[0]


def test_section_whose_value_is_a_section_name_gets_the_settings_of_the_named_section(loaded):
    settings = loaded(PPO + "A: B\nB: C\nC: {batch_size: 20}\nD: default\n")
    assert settings.behaviors["A"] == settings.behaviors["C"]
    assert settings.behaviors["B"].hyperparameters.batch_size == 20
    assert settings.behaviors["D"] == settings.default_settings


LONG = f"{PPO}Agent: {{use_recurrent: true, batch_size: 20}}\n"
LENGTH = "old.yaml:17: behaviors.Agent.network_settings.memory.sequence_length: must be less than "
LENGTH += "or equal to batch_size"
OFTEN = f"{PPO}Agent:\n  batch_size: 20\n  time_horizon: often\n"
NEW_KEY = "behaviors: {A: {trainer: ppo, network_settings: {num_layers: 1}}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PPO + "A: B\nB: A\n", "A -> B -> A is a circular reference"),
        (PPO + "A: Bee\nBees: {batch_size: 1}\n", "no section 'Bee'; did you mean 'Bees'?"),
        (PPO + "A: 5\n", "needs a map of settings, or the name of another section, got 5"),
        ("A: {batch_size: 20, hidden_units: 7}\n", "old.yaml:1: A: the 'trainer' key must be set"),
        ("A: {trainer: poo}\n", "old.yaml:1: A.trainer: 'poo' is not allowed"),
        (OFTEN, "old.yaml:27: behaviors.Agent.time_horizon: needs a whole number, got 'often'"),
        (LONG, LENGTH),
        (NEW_KEY, "did you mean 'trainer_type'"),
        ("behaviors: {A: {batch_size: 5}}\n", "it belongs under 'hyperparameters'"),
        ("behaviors: {B: {max_steps: 5, max_steps: 5}}\n", "is written twice, first in line 1"),
        ("seed: 1\nseed: 1\n", "is written twice, first in line 1"),
    ],
)
def test_error_about_a_flat_file_names_the_keys_of_the_flat_file(loaded, text, message):
    assert message in refusal(SettingsError, loaded, text)


def test_sac_section_inherits_only_sac_keys_from_ppo_defaults(loaded, caplog):
    own = {"tau": 0.02, "buffer_init_steps": 5, "init_entcoef": 1}
    settings = loaded(f"{PPO}Agent: {json.dumps({'trainer': 'sac'} | own)}\n")
    inherited = {"batch_size": 1000, "buffer_size": 10000, "learning_rate": 2e-4}
    expected = SACSettings(**inherited, **own, learning_rate_schedule="linear")
    assert settings.behaviors["Agent"].hyperparameters == expected
    assert warnings(caplog) == []


def test_sac_keys_num_update_and_train_interval_become_steps_per_update(loaded, caplog):
    text = SAC + "  num_update: 4\n  train_interval: 2\n"
    text += "  reward_signals: {extrinsic: {gamma: 0.9}, reward_signal_num_update: 8}\n"
    hyperparameters = loaded(text).behaviors["Agent"].hyperparameters
    assert hyperparameters.steps_per_update == 0.5
    assert hyperparameters.reward_signal_steps_per_update == 0.25
    assert any("multiply this by the number of agents" in line for line in warnings(caplog))


def test_steps_per_update_in_a_flat_file_of_release_0_16_has_precedence_over_num_update(
    loaded, caplog
):
    text = SAC + "  steps_per_update: 10\n  num_update: 3\n"
    text += "  reward_signals: {extrinsic: {}, reward_signal_steps_per_update: 5}\n"
    hyperparameters = loaded(text).behaviors["Agent"].hyperparameters
    assert hyperparameters.steps_per_update == 10
    assert hyperparameters.reward_signal_steps_per_update == 5
    assert warnings(caplog) == []
    steps_only = loaded(SAC + "  steps_per_update: 10\n").behaviors["Agent"].hyperparameters
    assert steps_only.reward_signal_steps_per_update == 10


def test_old_key_use_curiosity_becomes_a_curiosity_reward_signal(loaded):
    def signals(text: str) -> dict:
        return loaded(text).behaviors["Brain"].reward_signals

    more = "  use_curiosity: true\n  curiosity_strength: 0.01\n  curiosity_enc_size: 48\n"
    network, extrinsic = NetworkSettings(hidden_units=48), ExtrinsicSettings(gamma=0.97)
    curiosity = CuriositySettings(strength=0.01, gamma=0.97, network_settings=network)
    assert signals(EARLY + more) == {"extrinsic": extrinsic, "curiosity": curiosity}
    assert signals(EARLY + more.replace("true", "false")) == {"extrinsic": extrinsic}
    bare = EARLY.replace("  gamma: 0.97\n", "") + "  use_curiosity: on\n"
    assert signals(bare) == {"extrinsic": ExtrinsicSettings(), "curiosity": CuriositySettings()}


def test_gail_signal_without_encoding_size_keeps_the_old_default_of_64_hidden_units(loaded):
    signals = "  reward_signals: {extrinsic: {}, gail: {demo_path: a.demo, use_vail: yes}}\n"
    demo, network = DemoPath((DemoSource(path="a.demo"),)), NetworkSettings(hidden_units=64)
    gail = loaded(SAC + signals).behaviors["Agent"].reward_signals["gail"]
    assert gail == GAILSettings(demo_path=demo, use_vail=True, network_settings=network)


def test_old_file_with_a_constant_learning_rate_keeps_linear_beta_and_epsilon_schedules(loaded):
    text = PPO.replace("learning_rate_schedule: linear", "learning_rate_schedule: constant")
    h = loaded(text).default_settings.hyperparameters
    assert h.learning_rate_schedule == "constant"
    assert h.beta_schedule == h.epsilon_schedule == "linear"


def test_self_play_of_a_flat_file_keeps_the_old_default_of_swap_steps_and_gets_current_keys(loaded):
    more = "  self_play: {window: 5, play_against_current_self_ratio: 0.25, save_steps: 1000}\n"
    numbers = {"window": 5, "save_steps": 1000, "team_change": 5000, "swap_steps": 20000}
    expected = SelfPlaySettings(**numbers, play_against_latest_model_ratio=0.25)
    assert loaded(SAC + more).behaviors["Agent"].self_play == expected


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [
        ("Brain:\n  gamma: 0.5\n" + EARLY[7:], 5, "gamma", 2),
        ("Brain: {trainer: sac}\n" + EARLY, 2, "Brain", 1),
        ("behaviors:\n" + indent("Brain:\n  gamma: 1\n" + EARLY[7:], " "), 6, "gamma", 3),
        ("curriculum: 3\ncurriculum: {}\nbehaviors: {Brain: {}}\n", 2, "curriculum", 1),
    ],
    ids=["a value", "a section", "below behaviors", "a section of 0.17"],
)
def test_repeated_key_of_an_old_file_takes_its_last_value_with_a_warning(
    loaded, caplog, text, line, key, first
):
    with caplog.at_level(logging.WARNING):
        settings = loaded(text).behaviors["Brain"]
    said = f"old.yaml:{line}: {key}: written twice, first in line {first}; the last value is used"
    assert [said in warning for warning in warnings(caplog)].count(True) == 1
    if key != "curriculum":
        assert settings == loaded(EARLY).behaviors["Brain"]


def test_repeated_yaml_merge_keys_of_an_old_file_merge_both_maps(loaded):
    merged = "  <<: {gamma: 0.5, beta: 1.0e-2}\n  <<: {gamma: 0.97}\n"
    text = EARLY.replace("  gamma: 0.97\n", merged).replace("  beta: 1.0e-2\n", "")
    assert loaded(text) == loaded(EARLY)


def test_warning_about_an_unknown_key_of_an_old_file_names_the_line_and_a_similar_key(
    loaded, caplog
):
    loaded(PPO + "Agent:\n  bufer_size: 5\n")
    (line,) = warnings(caplog)
    said = "unknown key 'bufer_size' is ignored, as in ML-Agents; did you mean 'buffer_size'?"
    assert line.endswith(f"old.yaml:26: Agent.bufer_size: {said}")


def test_missing_keys_that_old_releases_required_get_current_defaults_and_a_warning(loaded, caplog):
    settings = loaded("Agent: {trainer: ppo, batch_size: 20, hidden_units: 7, max_steps: 5}\n")
    assert settings.behaviors["Agent"].hyperparameters == PPOSettings(batch_size=20)
    (line,) = warnings(caplog)
    assert "keys that the ppo trainer needed are missing: buffer_size, learning_rate" in line


def test_overrides_apply_to_behaviors_of_a_flat_file(written):
    path = written(PPO + "Agent: {batch_size: 20}\n")
    overrides = {"behaviors.Agent.max_steps": 7, "default_settings.time_horizon": 9}
    settings = load_run_settings(path, overrides=overrides)
    assert settings.behaviors["Agent"].max_steps == 7
    assert settings.behaviors["Agent"].time_horizon == 9
    with pytest.raises(SettingsError, match="has no behavior 'Agemt'"):
        load_run_settings(path, overrides={"behaviors.Agemt.max_steps": 7})


def test_sections_of_an_old_file_may_be_at_the_top_level_or_below_behaviors(loaded, caplog):
    text = PPO + "Agent: {batch_size: 20}\n"
    caplog.set_level(logging.INFO)
    settings = loaded(f"behaviors:\n{indent(text, '  ')}env_settings: {{seed: 3}}\n")
    assert "ML-Agents 0.16 to 0.17" in caplog.messages[0]
    assert settings.env_settings.seed == 3
    assert settings.sections == loaded(text).sections


def test_behavior_in_the_current_format_among_flat_sections_is_unchanged(loaded):
    old, new = "{trainer: ppo, batch_size: 20}", "{trainer_type: sac, hyperparameters: {tau: 0.5}}"
    settings = loaded(f"behaviors: {{Old: {old}, New: {new}}}\n")
    assert settings.behaviors["Old"].hyperparameters.batch_size == 20
    assert settings.behaviors["New"].hyperparameters == SACSettings(tau=0.5)
