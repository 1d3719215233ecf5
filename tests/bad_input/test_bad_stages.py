"""The scripts of the DAG with what cannot be used: one line, and no output in place."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
from command import CONFIG

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
def experiment(project):
    """The copy of the project with one experiment in the fake environment, which is built."""
    project.config()
    build = project.folder / "build/env/fake"
    build.mkdir(parents=True)
    shutil.move(project.fake(), build / "fake")
    described = {"file": "fake", "args": [], "simulator": None}
    (build / "environment.json").write_text(json.dumps(described))
    return project


def plan(experiment, stages: str) -> None:
    more = PRETRAIN if "pretrain" in stages else ""
    (experiment.folder / "params.yaml").write_text(PARAMS.replace("STAGES", stages) + more)
    done = experiment.pipeline("plan")
    assert done.code == 0, done.err


def duration_s(experiment) -> float:
    facts = json.loads(
        (experiment.folder / "results/.work/train/small/seed1/stage.json").read_text()
    )
    return float(facts["duration_s"])


def outputs(experiment, stage: str) -> list[str]:
    return [
        path.name for path in (experiment.folder / "results" / stage).rglob("*") if path.is_file()
    ]


@pytest.mark.slow
def test_training_goes_on_when_mlflow_cannot_be_reached(experiment):
    plan(experiment, "train")
    stage = ["workflow/scripts/train.py", "small", "--seed", "1"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {"PIPELINE_MLFLOW": "on", "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    assert experiment.python(*stage, PIPELINE_MLFLOW="off").code == 0
    without = duration_s(experiment)
    done = experiment.python(*stage, **variables)
    assert done.code == 0, done.err
    warnings = [line for line in done.err.splitlines() if not line.startswith(("[INFO]", "\t"))]
    assert len(warnings) == 1, done.err
    assert warnings[0].startswith("[WARNING] MLflow is not being written (")
    assert "Check MLFLOW_TRACKING_URI" in warnings[0]
    assert sorted(outputs(experiment, "train")) == ["metrics.json", "policy.pt", "progress.csv"]
    # its import takes some seconds; beside training, so that a busy machine slows both down
    assert duration_s(experiment) < 60 + 2 * without


@pytest.mark.parametrize(("n_lost", "named"), [(0, "GridWorld"), (7, "other.demo")])
def test_pretraining_on_the_demonstration_of_another_behavior_or_a_cut_off_one(
    experiment, other_demo, n_lost, named
):
    plan(experiment, "pretrain, train")
    target = experiment.folder / "data/demos/other.demo"
    target.parent.mkdir(parents=True)
    content = other_demo.read_bytes()
    target.write_bytes(content[: len(content) - n_lost])
    error = experiment.python("workflow/scripts/pretrain.py", "small", "--seed", "1").error
    assert named in error
    assert outputs(experiment, "pretrain") == []


@pytest.mark.slow
def test_training_from_a_policy_that_does_not_fit(experiment, trained, other_demo):
    plan(experiment, "pretrain, train")
    demonstration = experiment.folder / "data/demos/other.demo"
    demonstration.parent.mkdir(parents=True)
    shutil.copy(other_demo, demonstration)
    policy = experiment.folder / "results/pretrain/small/seed1/policy.pt"
    policy.parent.mkdir(parents=True)
    policies.join({"Echo": trained.folder / "results/run/Echo/checkpoint.pt"}, policy)
    build = experiment.folder / "build/env/fake/fake"
    shutil.move(experiment.fake("--wide"), build)
    error = experiment.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert "Echo.pt: this checkpoint does not fit the behavior Echo" in error
    assert outputs(experiment, "train") == []


@pytest.mark.parametrize("program", ["exit 3", "exec sleep 1000"])
def test_a_stage_whose_environment_does_not_start(experiment, program):
    seconds = 60 if program == "exit 3" else 2
    experiment.config(CONFIG + f"env_settings: {{timeout_wait: {seconds}}}\n")
    plan(experiment, "train")
    experiment.program(program, name="build/env/fake/fake")
    error = experiment.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert ("return code 3" if program == "exit 3" else "too long to respond (2 s)") in error
    assert outputs(experiment, "train") == []
