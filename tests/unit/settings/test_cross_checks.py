"""The checks that ML-Agents' format asks of whoever reads it, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.schema import PPOSettings, TrainerSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def behavior(tmp_path: Path) -> Callable[[str], TrainerSettings]:
    def load(text: str) -> TrainerSettings:
        path = tmp_path / "config.yaml"
        path.write_text(f"behaviors:\n  B: {text}\n")
        return load_run_settings(path).behaviors["B"]

    return load


def test_an_empty_behavior_is_ppo_with_all_defaults(behavior):
    assert behavior("{}") == TrainerSettings()
    assert behavior("{}").hyperparameters == PPOSettings()


def test_one_constant_schedule_makes_all_three_constant(behavior):
    text = "{trainer_type: ppo, hyperparameters: {learning_rate_schedule: constant}}"
    got = behavior(text).hyperparameters
    schedules = {got.learning_rate_schedule, got.beta_schedule, got.epsilon_schedule}
    assert schedules == {"constant"}


def test_reward_signals_of_sac_are_updated_like_its_policy(behavior):
    text = "{trainer_type: sac, hyperparameters: {steps_per_update: 10}}"
    assert behavior(text).hyperparameters.reward_signal_steps_per_update == 10


def test_even_checkpoints_come_five_times(behavior):
    assert behavior("{even_checkpoints: true, max_steps: 1000}").checkpoint_interval == 200


def test_an_encoding_size_is_taken_as_hidden_units(behavior, caplog):
    got = behavior("{reward_signals: {curiosity: {encoding_size: 32}}}")
    assert got.reward_signals["curiosity"].network_settings.hidden_units == 32
    assert "'encoding_size' was deprecated" in caplog.text


@pytest.mark.parametrize("key", ["max_steps", "summary_freq"])
def test_exponents_are_whole_numbers(behavior, key):
    assert getattr(behavior(f"{{{key}: 1e4}}"), key) == 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network_settings: {memory: {memory_size: 3}}", "must be divisible by 2, got 3"),
        ("network_settings: {memory: {memory_size: 0}}", "must be greater than 0, got 0"),
        (
            "trainer_type: ppo, hyperparameters: {batch_size: 32}, "
            "network_settings: {memory: {sequence_length: 64}}",
            "must be less than or equal to batch_size when using memory, got 64",
        ),
    ],
)
def test_memories_that_cannot_be_are_refused(behavior, text, message):
    with pytest.raises(SettingsError) as caught:
        behavior(f"{{{text}}}")
    assert message in str(caught.value)


def test_a_documented_misnomer_is_ignored_with_a_warning(behavior, caplog):
    got = behavior("{network_settings: {conditioning_type: none}}")
    assert got.network_settings.goal_conditioning_type == "hyper"
    assert "conditioning_type: is ignored" in caplog.text


SAMPLER = "{sampler_type: uniform, sampler_parameters: {min_value: 0, max_value: 1}}"
LESSON = "completion_criteria: {behavior: B}"


def seeds(settings: Any) -> dict[str, list[int]]:
    return {
        name: [lesson.value.seed for lesson in item.curriculum]
        for name, item in settings.environment_parameters.items()
    }


def test_samplers_without_a_seed_count_up(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "behaviors: {B: {}}\nenv_settings: {seed: 5}\nenvironment_parameters:\n"
        f"  a: {{curriculum: [{{name: x, value: {SAMPLER}, {LESSON}}}, {{name: y, value: 1}}]}}\n"
        f"  b: {SAMPLER}\n"
    )
    assert seeds(load_run_settings(path).with_seed(5)) == {"a": [5, 6], "b": [7]}


EXAMPLE = """\
default_settings:
  trainer_type: ppo
  max_steps: 200000
behaviors:
  Rover:
    hyperparameters:
      batch_size: 256
      buffer_size: 4096
      learning_rate_schedule: constant
      beta_schedule: constant
    network_settings:
      {normalize: true, hidden_units: 64, memory: {sequence_length: 32, memory_size: 64}}
    reward_signals:
      extrinsic: {gamma: 0.995, strength: 1.0}
      curiosity: {gamma: 0.99, strength: 0.02, network_settings: {hidden_units: 64}}
environment_parameters:
  slope: 0.1
  mass: {sampler_type: uniform, sampler_parameters: {min_value: 0.5, max_value: 2.0, seed: 11}}
  gap:
    curriculum:
      - name: narrow
        completion_criteria:
          {measure: reward, behavior: Rover, threshold: 0.6, min_lesson_length: 50}
        value: 0.5
      - name: wide
        value: {sampler_type: gaussian, sampler_parameters: {mean: 2.0, st_dev: 0.3}}
env_settings: {num_envs: 1, seed: 7}
engine_settings: {time_scale: 10, no_graphics: true}
checkpoint_settings: {run_id: rover-1}
torch_settings: {device: cpu}
debug: false
"""


def test_a_file_of_most_sections_means_what_it_should(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(EXAMPLE)
    settings = load_run_settings(path).with_seed(7)
    rover = settings.behaviors["Rover"]
    assert rover.hyperparameters.epsilon_schedule == "linear"
    assert rover.hyperparameters.beta_schedule == "constant"
    assert rover.max_steps == 200_000
    assert seeds(settings) == {"slope": [7], "mass": [11], "gap": [8, 9]}
    assert settings.checkpoint_settings.run_id == "rover-1"
