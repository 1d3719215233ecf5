"""Old trainers that only imitated become behavioral cloning if there is a demonstration."""

import pytest
from refusals import refusal
from test_flat_files import PPO, warnings

from pipeline.errors import SettingsError
from pipeline.settings.trainer.schema import (
    BehavioralCloningSettings,
    DemoPath,
    DemoSource,
    PPOSettings,
)


@pytest.mark.parametrize("trainer", ["offline_bc", "online_bc", "imitation"])
def test_imitation_trainer_becomes_ppo_with_behavioral_cloning(loaded, caplog, trainer):
    text = (
        f"Student:\n  trainer: {trainer}\n  batch_size: 48\n  batches_per_epoch: 5\n"
        "  demo_path: a.demo\n  hidden_units: 96\n  learning_rate: 1.0e-3\n  max_steps: 5e4\n"
        "  brain_to_imitate: Teacher\n"
    )
    student = loaded(text).behaviors["Student"]
    assert student.trainer_type == "ppo"
    assert student.behavioral_cloning == BehavioralCloningSettings(
        demo_path=DemoPath((DemoSource(path="a.demo"),)), batch_size=48
    )
    assert student.hyperparameters == PPOSettings(learning_rate=1e-3)
    assert student.network_settings.hidden_units == 96
    assert any("the environment's reward as well" in line for line in warnings(caplog))


IMITATION = "Student:\n  trainer: online_bc\n  brain_to_imitate: Teacher\n  batch_size: 16\n"


def test_section_of_an_imitation_trainer_without_a_demonstration_is_skipped_with_a_warning(
    loaded, caplog
):
    settings = loaded(PPO + IMITATION + "Agent: {batch_size: 20}\n")
    assert list(settings.behaviors) == ["Agent"]
    (line,) = warnings(caplog)
    assert "old.yaml:26: Student.trainer: the trainer 'online_bc' was removed" in line
    with pytest.raises(SettingsError, match=r"old.yaml:26: Student.trainer: .*Record one"):
        settings.for_behavior("Student?team=0")
    assert settings.for_behavior("Other") == settings.default_settings


def test_file_with_only_an_imitation_trainer_and_without_a_demonstration_is_refused(loaded):
    message = refusal(SettingsError, loaded, IMITATION)
    assert "old.yaml:2: Student.trainer: the trainer 'online_bc' was removed" in message
    assert "behavioral_cloning: {demo_path: ...}; or remove this section." in message


def test_default_section_of_an_imitation_trainer_applies_to_sections_with_a_demonstration(
    loaded, caplog
):
    text = "default: {trainer: offline_bc, hidden_units: 96}\nA: {demo_path: a.demo}\n"
    settings = loaded(text)
    assert settings.default_settings is None
    assert settings.behaviors["A"].network_settings.hidden_units == 96
    said = "behaviors that are not listed cannot be trained"
    assert any(said in line for line in warnings(caplog))
