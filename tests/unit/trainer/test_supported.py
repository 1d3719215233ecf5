"""What is refused before an environment is started."""

from __future__ import annotations

import pytest

from pipeline import machine
from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer.supported import refuse_untrainable

UNTRAINABLE = {"trainer_type": "ppo", "reward_signals": {"gail": {"demo_path": "nowhere.demo"}}}


def run(**behaviors):
    return load_run_settings(None, overrides={"behaviors": behaviors})


def test_a_run_of_which_nothing_can_be_trained_is_refused_with_the_first_reason():
    message = r"behaviors\.A\.reward_signals\.gail\.demo_path: .*nowhere\.demo"
    with pytest.raises(SettingsError, match=message):
        refuse_untrainable(run(A=UNTRAINABLE, B=UNTRAINABLE))


def test_one_behavior_that_can_be_trained_is_enough():
    refuse_untrainable(run(A=UNTRAINABLE, B={"trainer_type": "ppo"}))


def test_a_portable_run_is_not_compiled(monkeypatch):
    overrides = {"behaviors": {"A": {"trainer_type": "ppo"}}, "torch_settings": {"compile": True}}
    settings = load_run_settings(None, overrides=overrides)
    refuse_untrainable(settings)
    monkeypatch.setattr(machine, "is_portable", lambda: True)
    with pytest.raises(
        SettingsError,
        match=r"torch_settings\.compile: compiled programs are for this processor alone",
    ):
        refuse_untrainable(settings)
