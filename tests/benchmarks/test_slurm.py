"""`benchmarks/slurm.py` sees what is not whole."""

from __future__ import annotations

import pytest
import slurm

FOUND = {
    "exit_code": 0,
    "stopped": 1,
    "resumed_from_step": [30000],
    "evaluated": ["late", "quick"],
    "files": 6,
    "differences": [],
    "left_over": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit_code": 1},
        {"stopped": 0},
        {"resumed_from_step": []},
        {"evaluated": ["quick"]},
        {"evaluated": ["late"]},
        {"files": 0},
        {"differences": ["results/train/late/seed1/policy.pt"]},
        {"left_over": ["python workflow/scripts/train.py"]},
    ],
)
def test_what_is_not_whole_is_seen(wrong: dict) -> None:
    assert slurm.whole(FOUND)
    assert not slurm.whole(FOUND | wrong)


def test_the_pace_of_a_training_leaves_out_its_start() -> None:
    line = "[INFO] 3DBall. Step: {}. Time Elapsed: {} s. Mean Reward: 1.000."
    log = "\n".join(["started", line.format(10000, "30.5"), line.format(20000, "31.500")])
    assert slurm.pace(log) == 10000.0
