from __future__ import annotations

from pathlib import Path

import pytest
import tracking

pytestmark = pytest.mark.slow


def test_eight_processes_on_a_new_store_lose_no_metric(tmp_path: Path):
    results = tracking.run(tmp_path, n_processes=8, n_summaries=20, n_metrics=5)
    assert results["errors"] == 0
    assert results["points_logged"] == 800
    assert results["points_missing"] == 0


def test_a_lost_metric_is_counted(tmp_path: Path):
    tracking.run(tmp_path, n_processes=1, n_summaries=3, n_metrics=2)
    assert tracking.missing(tmp_path, 1, 3, 2) == 0
    assert tracking.missing(tmp_path, 1, 4, 2) == 2, "a fourth summary was not logged"
    assert tracking.missing(tmp_path, 2, 3, 2) == 6, "nor a second run"
