"""`benchmarks/cluster_jobs.py` and `benchmarks/slurm.py` notice incomplete results."""

import cluster_jobs
import pytest
import slurm

JOBS = {
    "jobs": 3, "exit_code": 0, "policies": 3, "mlflow_runs": 3, "finished_mlflow_runs": 3,
    "victims": [2], "killed": [2], "resumed": [2], "resumed_from_step": {"2": 1000},
    "broken_curves": [], "broken_mlflow_curves": [], "left_over": [],
}  # fmt: skip
SLURM = {
    "exit_code": 0, "stopped": 1, "resumed_from_step": [30000], "evaluated": ["late", "quick"],
    "files": 6, "differences": [], "left_over": [],
}  # fmt: skip
SCRIPT = "python workflow/scripts/train.py"


@pytest.mark.parametrize(
    ("benchmark", "whole", "wrong"),
    [
        (cluster_jobs, JOBS, {"exit_code": 1}),
        (cluster_jobs, JOBS, {"policies": 2}),
        (cluster_jobs, JOBS, {"resumed": []}),
        (cluster_jobs, JOBS, {"resumed": [], "killed": []}),
        (cluster_jobs, JOBS, {"resumed": [1, 2]}),
        (cluster_jobs, JOBS, {"resumed_from_step": {}}),
        (cluster_jobs, JOBS, {"broken_mlflow_curves": ["short-seed3"]}),
        (cluster_jobs, JOBS, {"mlflow_runs": 4}),
        (cluster_jobs, JOBS, {"finished_mlflow_runs": 2}),
        (cluster_jobs, JOBS, {"broken_curves": [3]}),
        (cluster_jobs, JOBS, {"left_over": [SCRIPT]}),
        (slurm, SLURM, {"exit_code": 1}),
        (slurm, SLURM, {"stopped": 0}),
        (slurm, SLURM, {"resumed_from_step": []}),
        (slurm, SLURM, {"evaluated": ["quick"]}),
        (slurm, SLURM, {"evaluated": ["late"]}),
        (slurm, SLURM, {"files": 0}),
        (slurm, SLURM, {"differences": ["results/train/late/seed1/policy.pt"]}),
        (slurm, SLURM, {"left_over": [SCRIPT]}),
    ],
)
def test_cluster_benchmark_does_not_accept_incomplete_or_faulty_results(
    benchmark, whole: dict, wrong: dict
) -> None:
    assert benchmark.whole(whole)
    assert not benchmark.whole(whole | wrong)


def test_training_steps_per_second_are_measured_after_the_first_summary() -> None:
    line = "[INFO] 3DBall. Step: {}. Time Elapsed: {} s. Mean Reward: 1.000."
    log = "\n".join(["started", line.format(10000, "30.5"), line.format(20000, "31.500")])
    assert slurm.pace(log) == 10000.0
