"""A stage with what cannot be used: one line, and no output in place."""

from __future__ import annotations

import json
import shutil

import pytest

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
    stages: [pretrain, train]
    demonstrations: other
    pretrain: {epochs: 1, batch_size: 16, learning_rate: 0.001}
"""


@pytest.mark.slow
def test_training_from_a_policy_that_does_not_fit(project, trained):
    project.config()
    (project.folder / "params.yaml").write_text(PARAMS)
    done = project.pipeline("plan")
    assert done.code == 0, done.err
    build = project.folder / "build/env/fake"
    build.mkdir(parents=True)
    shutil.move(project.fake("--wide"), build / "fake")
    described = {"file": "fake", "args": [], "simulator": None}
    (build / "environment.json").write_text(json.dumps(described))
    demonstration = project.folder / "data/demos/other.demo"
    demonstration.parent.mkdir(parents=True)
    demonstration.touch()
    policy = project.folder / "results/pretrain/small/seed1/policy.pt"
    policy.parent.mkdir(parents=True)
    policies.join({"Echo": trained.folder / "results/run/Echo/checkpoint.pt"}, policy)
    error = project.python("workflow/scripts/train.py", "small", "--seed", "1").error
    assert "Echo.pt: this checkpoint does not fit the behavior Echo" in error
    assert not (project.folder / "results/train").exists()
