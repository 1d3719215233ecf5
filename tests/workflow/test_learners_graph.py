"""`learners: 2` of an experiment in params.yaml, through the same rule of both engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from project import commit, run, set_params

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def test_the_stage_trains_with_two_learners(project: Path):
    content = yaml.safe_load((HERE / "tiny.yaml").read_text())
    plain = content["experiments"]["plain"]
    plain |= {"learners": 2, "resources": {"memory_mb": 700, "gpus": 1}}
    content["experiments"] = {"plain": plain}
    set_params(project, yaml.safe_dump(content, sort_keys=False))
    commit(project, "with two learners")
    snakemake = ("snakemake", "--cores", "2", "--quiet", "all")
    made = project / "results/train/plain/seed1"
    run(project, *snakemake, "--", "results/train/plain/seed1/policy.pt")
    metrics = json.loads((made / "metrics.json").read_text())["3DBall"]
    assert metrics["steps"] >= 4000
    work = project / "results/.work/train/plain/seed1"
    facts = json.loads((work / "stage.json").read_text())
    assert facts["params"]["learners"] == 2
    assert (work / "run/logs/learner-1.log").is_file()
    run(project, "dvc", "init", "--force", "--quiet")
    run(project, "dvc", "repro", "check")  # a dry run needs the files that the others depend on
    status = run(project, "dvc", "repro", "--dry", "train@plain-1").stdout
    assert "python workflow/scripts/train.py plain --seed 1" in status
