from pathlib import Path

import pytest
import tracking

pytestmark = pytest.mark.slow


def test_benchmark_counts_metrics_that_are_missing_in_the_mlflow_store(tmp_path: Path):
    tracking.run(tmp_path, n_processes=1, n_summaries=3, n_metrics=2)
    assert tracking.missing(tmp_path, 1, 3, 2) == 0
    assert tracking.missing(tmp_path, 1, 4, 2) == 2, "a fourth summary was not logged"
    assert tracking.missing(tmp_path, 2, 3, 2) == 6, "nor a second run"
