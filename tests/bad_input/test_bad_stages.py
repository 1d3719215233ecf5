"""Stages with unusable inputs: one error line, and no output."""

import json
import shutil
import socket

import pytest

from pipeline.dag import policies

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


def experiment(project, *player: str, params: str) -> None:
    """Plan one experiment in the fake environment, which is built."""
    project.config()
    (project.folder / "params.yaml").write_text(params)
    result = project.pipeline("plan")
    assert result.code == 0, result.err
    build = project.folder / "build/env/fake"
    build.mkdir(parents=True)
    shutil.move(project.fake(*player), build / "fake")
    described = {"file": "fake", "args": [], "simulator": None}
    (build / "environment.json").write_text(json.dumps(described))


def duration_s(project) -> float:
    facts = json.loads((project.folder / "results/.work/train/small/seed1/stage.json").read_text())
    return float(facts["duration_s"])


@pytest.mark.slow
def test_training_continues_if_mlflow_cannot_be_reached(project):
    experiment(project, params=PARAMS.replace("STAGES", "train"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {"PIPELINE_MLFLOW": "on", "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    stage = ["workflow/scripts/train.py", "small", "--seed", "1"]
    assert project.python(*stage, PIPELINE_MLFLOW="off").code == 0
    without = duration_s(project)
    result = project.python(*stage, **variables)
    assert result.code == 0, result.err
    (warning,) = [line for line in result.err.splitlines() if not line.startswith(("[INFO]", "\t"))]
    assert warning.startswith("[WARNING] MLflow cannot be written (")
    assert "Check MLFLOW_TRACKING_URI" in warning
    names = [path.name for path in (project.folder / "results/train").rglob("*") if path.is_file()]
    assert sorted(names) == ["metrics.json", "policy.pt", "progress.csv"]
    # importing MLflow takes seconds; relative to training, since a busy machine slows both
    assert duration_s(project) < 60 + 2 * without


@pytest.mark.slow
def test_training_from_a_pretrained_policy_of_another_shape_is_refused(project, trained):
    experiment(project, "--wide", params=PARAMS.replace("STAGES", "pretrain, train") + PRETRAIN)
    demonstration = project.folder / "data/demos/other.demo"
    demonstration.parent.mkdir(parents=True)
    demonstration.touch()
    policy = project.folder / "results/pretrain/small/seed1/policy.pt"
    policy.parent.mkdir(parents=True)
    policies.join({"Echo": trained.folder / "results/run/Echo/checkpoint.pt"}, policy)
    error = project.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert "Echo.pt: this checkpoint does not fit the present behavior Echo" in error
    assert not (project.folder / "results/train").exists()
