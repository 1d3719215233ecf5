"""The settings that benchmarks/self_play.py derives from a trainer file."""

import pytest
import self_play

from pipeline.settings import load_run_settings

TAG = self_play.ROOT / self_play.CONFIGURATIONS["tag"]


def test_self_play_benchmark_keeps_max_steps_or_fits_four_team_changes_into_the_given_steps():
    original = load_run_settings(TAG).behaviors
    adapted = self_play.adapted(TAG, None).behaviors
    for name, behavior in adapted.items():
        assert behavior.max_steps == original[name].max_steps
        assert behavior.self_play == original[name].self_play
        assert behavior.checkpoint_interval == behavior.max_steps // 5
    assert adapted["Hunter"].max_steps == 2 * adapted["Runner"].max_steps
    for behavior in self_play.adapted(TAG, 1000).behaviors.values():
        assert (behavior.max_steps, behavior.self_play.team_change) == (1000, 250)


def test_self_play_benchmark_refuses_a_run_with_0_steps(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["self_play.py", "tag", "--steps", "0"])
    with pytest.raises(SystemExit) as ended:
        self_play.main()
    assert ended.value.code == 2
    assert "--steps 0: expected at least 10" in capsys.readouterr().err
