"""`benchmarks/cluster_jobs.py` sees what is not whole."""

from __future__ import annotations

import cluster_jobs
import pytest

WHOLE = {
    "jobs": 3,
    "exit_code": 0,
    "policies": 3,
    "mlflow_runs": 3,
    "finished_mlflow_runs": 3,
    "victims": [2],
    "killed": [2],
    "resumed": [2],
    "resumed_from_step": {"2": 1000},
    "broken_curves": [],
    "broken_mlflow_curves": [],
    "left_over": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit_code": 1},
        {"policies": 2},
        {"resumed": []},
        {"resumed": [], "killed": []},
        {"resumed": [1, 2]},
        {"resumed_from_step": {}},
        {"broken_mlflow_curves": ["short-seed3"]},
        {"mlflow_runs": 4},
        {"finished_mlflow_runs": 2},
        {"broken_curves": [3]},
        {"left_over": ["python workflow/scripts/train.py"]},
    ],
)
def test_what_is_not_whole_is_seen(wrong: dict) -> None:
    assert cluster_jobs.whole(WHOLE)
    assert not cluster_jobs.whole(WHOLE | wrong)
