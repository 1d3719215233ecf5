"""Reports of Optuna users: unusable values of a sweep, which were found only after hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import check_settings

TRAINER = """\
behaviors:
  Ball:
    trainer_type: ppo
    max_steps: 100
    hyperparameters: {batch_size: 64, buffer_size: 640}
"""
PARAMS = """\
environments:
  ball: {{source: builtin, name: balance_ball}}
experiments:
  base:
    environment: ball
    trainer: trainer.yaml
    overrides: {{}}
    seeds: [1]
    stages: [train, export, evaluate]
    evaluation: {{episodes: 1, seed: 1}}
sweeps:
  search:
    experiment: base
    method: optuna
    runs: 4
    seed: 0
    parameters:
      behaviors.Ball.{key}: {values}
      behaviors.Ball.{other}
    seeds: [2]
"""


def searched(tmp_path: Path, key: str, values: str, *, other="max_steps: [50, 60]") -> Params:
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    (tmp_path / "params.yaml").write_text(PARAMS.format(key=key, values=values, other=other))
    return load_params(tmp_path / "params.yaml")


UNUSABLE = {
    "a value of a list": ("network_settings.normalize", "[true, maybe]", "got 'maybe'"),
    "a misspelt value": ("network_settings.vis_encode_type", "[simple, natur]", "'natur' is not"),
    "a range from below": ("hyperparameters.beta", "{min: -0.001, max: 0.01}", "got -0.001"),
    "a range to above": ("hyperparameters.lambd", "{min: 0.9, max: 1.2}", "at most 1, got 1.2"),
    "fractions of whole numbers": (
        "network_settings.hidden_units",
        "{min: 32, max: 256}",
        "whole number, got 170.432",
    ),
    "a key that is not there": ("hyperparameters.batch", "[1, 2]", "unknown key 'batch'"),
}


@pytest.mark.parametrize("wrong", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_sweep_value_is_refused_before_the_first_trial(tmp_path: Path, wrong):
    key, values, said = wrong
    params = searched(tmp_path, key, values)
    message = refusal(SettingsError, check_settings, params)
    assert message.startswith(f"{params.path}:18: behaviors.Ball"), message
    assert key.rpartition(".")[2] in message
    assert said in message


def test_sweep_values_of_two_keys_that_contradict_each_other_are_refused(tmp_path: Path):
    """Each value is allowed together with another value of the other key."""

    def search(lengths: str, sizes: str) -> Params:
        other = f"hyperparameters.batch_size: {sizes}"
        return searched(tmp_path, "network_settings.memory.sequence_length", lengths, other=other)

    check_settings(search("[16, 32]", "[32, 512]"))
    check_settings(search("[16, 256]", "[256, 512]"))
    message = refusal(SettingsError, check_settings, search("[16, 256]", "[32, 512]"))
    assert "batch_size when using memory, got 256 with batch_size 32" in message


def test_sweep_with_only_allowed_values_is_accepted(tmp_path: Path):
    for key, values in (
        ("hyperparameters.learning_rate", "{min: 1e-5, max: 1e-2, scale: log}"),
        ("network_settings.hidden_units", "{min: 32, max: 256, integer: true}"),
        ("network_settings.normalize", "[true, false]"),
        ("network_settings", "[{hidden_units: 4}, {num_layers: 3}]"),
    ):
        check_settings(searched(tmp_path, key, values))
