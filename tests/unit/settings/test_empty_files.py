"""A file that says nothing is a slip, whatever is left in it."""

from __future__ import annotations

import pytest

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings


@pytest.mark.parametrize("text", ["", "\n\n", "# comment\n# more\n", "---\n", "{}\n", "null\n"])
def test_a_file_without_settings_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"config.yaml:1: holds no settings"):
        load_run_settings(path)


def test_a_list_of_no_behaviors_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("debug: true\nbehaviors: {}\n")
    with pytest.raises(SettingsError, match=r"config.yaml:2: behaviors: lists no behavior"):
        load_run_settings(path)
    path.write_text("behaviors: {}\ndefault_settings: {}\n")
    assert load_run_settings(path).behaviors == {}


def test_a_signal_set_to_null_is_not_inherited(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "default_settings: {}\nbehaviors:\n  A:\n    reward_signals: {extrinsic: null, rnd: {}}\n"
    )
    assert list(load_run_settings(path).behaviors["A"].reward_signals) == ["rnd"]
    path.write_text(
        "default_settings: {}\nbehaviors:\n  A:\n    reward_signals: {extrinsic: null}\n"
    )
    with pytest.raises(SettingsError, match=r":4: .*needs at least one reward signal"):
        load_run_settings(path)
