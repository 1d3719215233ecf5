"""The configurations, digests and table of `benchmarks/interruptions.py`."""

from __future__ import annotations

from pathlib import Path

import interruptions
import pytest

from pipeline.settings import load_run_settings


@pytest.mark.parametrize("name", interruptions.ROWS)
def test_trainer_configuration_of_each_row_of_the_benchmark_is_valid(name: str):
    row = interruptions.ROWS[name]
    settings = load_run_settings(None, overrides=row.content())
    assert set(settings.behaviors) == set(row.behaviors)
    assert all(behavior.threaded == row.threaded for behavior in settings.behaviors.values())
    assert settings.torch_settings.compile == row.compiled


def test_digests_leave_out_files_that_contain_times(tmp_path: Path):
    for name in ("B/checkpoint.pt", "progress.csv", "run_logs/timers.json", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = interruptions.digests(tmp_path)
    assert list(before) == ["B/checkpoint.pt", "progress.csv"]
    (tmp_path / "B/checkpoint.pt").write_text("other")
    assert interruptions.digests(tmp_path)["B/checkpoint.pt"] != before["B/checkpoint.pt"]


def test_table_of_interruptions_counts_kills_and_differing_files():
    outcome = interruptions.Outcome(
        row="sac-4", n_runs=2, n_kills=5, n_resumed=4, n_environments=3, n_files=9
    )
    outcome.differing.append("run1: progress.csv")
    text = interruptions.summary([outcome])
    assert "| sac-4 | SAC | balance_ball | 4 | 1 | False | False | 2 | 5 | 4 | 3 | 9 | 1 |" in text
    assert text.endswith("5 kills, 3 of environments, 1 differences")
