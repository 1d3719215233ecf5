"""The scripts of the DAG with what cannot be used: one line, and no output in place."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
from command import CONFIG, ROOT

from pipeline.stages.shared import policies

PARAMS = """\
runtime: {torch_threads: 1, device: cpu}
environments:
  fake: {source: path, path: fake, args: []}
demonstrations:
  other: {environment: fake, policy: expert, episodes: 1, seed: 1}
experiments:
  small:
    environment: fake
    trainer: config.yaml
    overrides: {}
    seeds: [1]
    stages: [STAGES]
"""
PRETRAIN = """\
    demonstrations: other
    pretrain: {epochs: 1, batch_size: 16, learning_rate: 0.001}
"""


@pytest.fixture
def project(place):
    """A copy of the project with one experiment in the fake environment, which is built."""
    for name in ("src", "workflow"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, place.folder / name, ignore=ignore)
    place.config()
    build = place.folder / "build/env/fake"
    build.mkdir(parents=True)
    shutil.move(place.fake(), build / "fake")
    described = {"file": "fake", "args": [], "simulator": None}
    (build / "environment.json").write_text(json.dumps(described))
    return place


def plan(project, stages: str) -> None:
    more = PRETRAIN if "pretrain" in stages else ""
    (project.folder / "params.yaml").write_text(PARAMS.replace("STAGES", stages) + more)
    done = project.pipeline("plan")
    assert done.code == 0, done.err


def duration_s(project) -> float:
    facts = json.loads((project.folder / "results/.work/train/small/seed1/stage.json").read_text())
    return float(facts["duration_s"])


def outputs(project, stage: str) -> list[str]:
    return [path.name for path in (project.folder / "results" / stage).rglob("*") if path.is_file()]


@pytest.mark.slow
def test_training_goes_on_when_mlflow_cannot_be_reached(project):
    plan(project, "train")
    stage = ["workflow/scripts/train.py", "small", "--seed", "1"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {"PIPELINE_MLFLOW": "on", "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    assert project.python(*stage, PIPELINE_MLFLOW="off").code == 0
    without = duration_s(project)
    done = project.python(*stage, **variables)
    assert done.code == 0, done.err
    warnings = [line for line in done.err.splitlines() if not line.startswith(("[INFO]", "\t"))]
    assert len(warnings) == 1, done.err
    assert warnings[0].startswith("[WARNING] MLflow is not being written (")
    assert "Check MLFLOW_TRACKING_URI" in warnings[0]
    assert sorted(outputs(project, "train")) == ["metrics.json", "policy.pt", "progress.csv"]
    # its import takes some seconds; beside training, so that a busy machine slows both down
    assert duration_s(project) < 60 + 2 * without


def test_pretraining_on_another_behaviors_demonstration(project, other_demo):
    plan(project, "pretrain, train")
    target = project.folder / "data/demos/other.demo"
    target.parent.mkdir(parents=True)
    shutil.copy(other_demo, target)
    error = project.python("workflow/scripts/pretrain.py", "small", "--seed", "1").error
    assert "GridWorld" in error
    assert outputs(project, "pretrain") == []


def test_pretraining_on_a_truncated_demonstration(project, other_demo):
    plan(project, "pretrain, train")
    target = project.folder / "data/demos/other.demo"
    target.parent.mkdir(parents=True)
    target.write_bytes(other_demo.read_bytes()[:-7])
    error = project.python("workflow/scripts/pretrain.py", "small", "--seed", "1").error
    assert "other.demo" in error
    assert outputs(project, "pretrain") == []


@pytest.mark.slow
def test_training_from_a_policy_that_does_not_fit(project, trained, other_demo):
    plan(project, "pretrain, train")
    demonstration = project.folder / "data/demos/other.demo"
    demonstration.parent.mkdir(parents=True)
    shutil.copy(other_demo, demonstration)
    policy = project.folder / "results/pretrain/small/seed1/policy.pt"
    policy.parent.mkdir(parents=True)
    policies.join({"Echo": trained.folder / "results/run/Echo/checkpoint.pt"}, policy)
    build = project.folder / "build/env/fake/fake"
    shutil.move(project.fake("--wide"), build)
    error = project.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert "Echo.pt: this checkpoint does not fit the behavior Echo" in error
    assert outputs(project, "train") == []


@pytest.mark.parametrize("program", ["exit 3", "exec sleep 1000"])
def test_a_stage_whose_environment_does_not_start(project, program):
    seconds = 60 if program == "exit 3" else 2
    project.config(CONFIG + f"env_settings: {{timeout_wait: {seconds}}}\n")
    plan(project, "train")
    project.program(program, name="build/env/fake/fake")
    error = project.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert ("return code 3" if program == "exit 3" else "too long to respond (2 s)") in error
    assert outputs(project, "train") == []
