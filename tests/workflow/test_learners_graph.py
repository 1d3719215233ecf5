"""`learners: 2` of an experiment in params.yaml, through the same rule of both engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from project import commit, run

from pipeline.settings.params import load_params
from pipeline.settings.plan import plan, write_plan

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture
def shared(project: Path) -> Path:
    """A copy of the project whose one experiment has two learners with two threads each."""
    content = yaml.safe_load((HERE / "tiny.yaml").read_text())
    plain = content["experiments"]["plain"]
    plain |= {"learners": 2, "resources": {"memory_mb": 700, "gpus": 1}}
    content["experiments"] = {"plain": plain}
    (project / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    write_plan(load_params(project / "params.yaml"), project / "workflow/runs.yaml")
    commit(project, "with two learners")
    return project


def test_the_stage_trains_with_two_learners(shared: Path):
    snakemake = ("snakemake", "--cores", "2", "--quiet", "all")
    made = shared / "results/train/plain/seed1"
    run(shared, *snakemake, "--", "results/train/plain/seed1/policy.pt")
    metrics = json.loads((made / "metrics.json").read_text())["3DBall"]
    assert metrics["steps"] >= 4000
    work = shared / "results/.work/train/plain/seed1"
    facts = json.loads((work / "stage.json").read_text())
    assert facts["params"]["learners"] == 2
    assert (work / "run/logs/learner-1.log").is_file()
    run(shared, "dvc", "init", "--force", "--quiet")
    run(shared, "dvc", "repro", "check")  # a dry run needs the files that the others depend on
    status = run(shared, "dvc", "repro", "--dry", "train@plain-1").stdout
    assert "python workflow/scripts/train.py plain --seed 1" in status


def test_another_number_of_learners_is_another_run(shared: Path):
    path = shared / "params.yaml"
    before = plan(load_params(path))["runs"]["train_from_scratch"]["plain-1"]
    path.write_text(path.read_text().replace("learners: 2", "learners: 1"))
    after = plan(load_params(path))["runs"]["train_from_scratch"]["plain-1"]
    assert before == after | {"learners": 2}
