"""Jobs through a cluster executor, some of them killed: what `benchmarks/jobs.py` measures."""

from __future__ import annotations

from pathlib import Path

import jobs
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


@pytest.mark.slow
def test_jobs_killed_and_signalled_in_every_way_continue_and_end_whole(tmp_path: Path) -> None:
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    found = jobs.measure(tmp_path, jobs=5, kill=4, at_once=2, seed=1)
    assert jobs.whole(found), found
    assert all(len(stopped) == 1 for stopped in found["how"].values())


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
    assert jobs.whole(WHOLE)
    assert not jobs.whole(WHOLE | wrong)
