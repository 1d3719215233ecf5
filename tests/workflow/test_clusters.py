"""Cluster jobs that are killed, lost or at their time limit, run by programs of `benchmarks`."""

import json
import subprocess
import sys
from pathlib import Path

import cluster_jobs
import pytest
import slurm
import tracking
import worktrees

pytestmark = pytest.mark.slow


def test_cluster_jobs_that_are_killed_or_signalled_resume_and_finish(tmp_path: Path) -> None:
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    results = cluster_jobs.measure(tmp_path, jobs=5, kill=4, at_once=2, seed=1)
    assert cluster_jobs.whole(results), results
    assert all(len(stopped) == 1 for stopped in results["how"].values())


def test_training_of_a_lost_cluster_job_is_not_repeated_if_the_training_had_finished(
    tmp_path: Path,
) -> None:
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
    assert "using the outputs of" in cluster_jobs.logs(root)[0].read_text()
    facts = json.loads((cluster_jobs.place(root, 1, ".work/train") / "stage.json").read_text())
    assert facts["seconds"]["total"] > 0.0
    assert cluster_jobs.mlflow_runs(root)["finished_mlflow_runs"] == 1


@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    None in map(slurm.find, slurm.DAEMONS), reason="SLURM and munge are not installed"
)
def test_slurm_job_at_its_time_limit_resumes_and_the_dag_finishes(tmp_path: Path) -> None:
    pytest.importorskip("snakemake_executor_plugin_slurm")
    results = slurm.measure(tmp_path)
    assert slurm.whole(results), results


def test_eight_processes_that_share_a_new_mlflow_store_lose_no_metric(tmp_path: Path):
    results = tracking.run(tmp_path, n_processes=8, n_summaries=20, n_metrics=5)
    assert results["errors"] == 0
    assert results["points_logged"] == 800
    assert results["points_missing"] == 0
