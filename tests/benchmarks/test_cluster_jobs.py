"""Jobs through a cluster executor, some of them killed: `benchmarks/cluster_jobs.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cluster_jobs
import pytest
import worktrees

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
    results = cluster_jobs.measure(tmp_path, jobs=5, kill=4, at_once=2, seed=1)
    assert cluster_jobs.whole(results), results
    assert all(len(stopped) == 1 for stopped in results["how"].values())


@pytest.mark.slow
def test_a_job_lost_after_its_stage_has_finished_is_not_trained_again(tmp_path: Path) -> None:
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    root = worktrees.copy_project(tmp_path / "project", cluster_jobs.PARAMS.replace("SEEDS", "[1]"))
    submit = root / "workflow/cluster/submit.sh"
    first = """[[ $1 == *train* && ! -e lost ]] && touch lost && code=1; echo "$code" >"""
    text = submit.read_text()
    assert text.count('echo "$code" >') == 1
    submit.write_text(text.replace('echo "$code" >', first))
    engine = (sys.executable, "-m", "snakemake", "--profile", "profiles/cluster-generic")
    completed = subprocess.run(  # noqa: S603  # fixed command
        [*engine, "--jobs", "1", "--", "results/short"],
        cwd=root,
        env=worktrees.environment(root),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert completed.returncode == 0, completed.stderr
    assert (root / "lost").exists()
    assert "Trying to restart job" in completed.stderr
    assert cluster_jobs.complete(cluster_jobs.place(root, 1, "train"))
    assert "taking what it made" in cluster_jobs.logs(root)[0].read_text()
    facts = json.loads((cluster_jobs.place(root, 1, ".work/train") / "stage.json").read_text())
    assert facts["seconds"]["total"] > 0.0
    assert cluster_jobs.mlflow_runs(root)["finished_mlflow_runs"] == 1


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
