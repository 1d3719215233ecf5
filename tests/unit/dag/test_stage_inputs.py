"""The files and settings that each stage depends on, and the results that are read from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_project import left
from steps import decision_steps, terminal_steps

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.dag import run_context
from pipeline.dag.reporting.results import trials_of
from pipeline.dag.stages import demos, evaluate, export, pretrain, train
from pipeline.dag.stages.propose import _medians
from pipeline.demos.demo_file import read_demo
from pipeline.settings.project.experiments import EvaluationParams
from pipeline.settings.project.params import load_params

PARAMS = """\
runtime: {torch_threads: 2, device: cpu}
environments:
  ball: {source: builtin, name: balance_ball}
  other: {source: builtin, name: pong}
demonstrations:
  expert: {environment: ball, episodes: 5, seed: 1}
experiments:
  cloned:
    environment: ball
    trainer: config/t.yaml
    overrides: {behaviors: {Ball: {max_steps: 70}}}
    demonstrations: expert
    pretrain: {epochs: 1, batch_size: 2, learning_rate: 1e-3}
    seeds: [1, 2]
    stages: [pretrain, train, export, evaluate]
    evaluation: {episodes: 3, seed: 9}
    resources: {threads: 4}
  scratch:
    environment: other
    trainer: config/u.yaml
    overrides: {}
    seeds: [5]
    stages: [train, export, evaluate]
    evaluation: {episodes: 2, seed: 8}
sweeps:
  rates:
    experiment: scratch
    method: list
    configurations: [{behaviors.Ball.max_steps: 5}]
    seeds: [1]
    best: {seeds: [7]}
"""


@pytest.fixture
def run(tmp_path: Path):
    """Return a run of `PARAMS` by its experiment and seed."""
    (tmp_path / "config").mkdir()
    for name in "tu":
        (tmp_path / f"config/{name}.yaml").write_text("behaviors: {Ball: {max_steps: 5}}")
    (tmp_path / "params.yaml").write_text(PARAMS)
    params = load_params(tmp_path / "params.yaml")
    return lambda name, seed: run_context.Run(root=tmp_path, params=params, name=name, seed=seed)


def files_of(job):
    assert job.instance.startswith(("cloned/seed2", "scratch/seed5", "rates_best/seed7"))
    return [path.as_posix() for path in job.inputs], [path.as_posix() for path in job.outputs]


def test_each_stage_of_a_run_uses_only_files_of_the_same_run(run):
    cloned, scratch, best = run("cloned", 2), run("scratch", 5), run("rates_best", 7)
    chosen = best.root / "results/sweep/rates/best.json"
    chosen.parent.mkdir(parents=True)
    chosen.write_text(json.dumps({"trial": "rates/001", "values": {"behaviors.Ball.max_steps": 5}}))
    made = ("policy.pt", "metrics.json", "progress.csv")
    assert files_of(pretrain.job_of(cloned)) == (
        ["data/demos/expert.demo"],
        [f"results/pretrain/cloned/seed2/{name}" for name in made],
    )
    assert files_of(train.job_of(cloned)) == (
        [
            "config/t.yaml",
            "build/env/ball",
            "results/pretrain/cloned/seed2/policy.pt",
            "data/demos/expert.demo",
        ],
        [f"results/train/cloned/seed2/{name}" for name in made],
    )
    assert files_of(train.job_of(scratch))[0] == ["config/u.yaml", "build/env/other"]
    assert files_of(train.job_of(best)) == (
        ["config/u.yaml", "build/env/other", "results/sweep/rates/best.json"],
        [f"results/train/rates_best/seed7/{name}" for name in made],
    )
    assert files_of(export.job_of(cloned)) == (
        ["results/train/cloned/seed2/policy.pt"],
        ["results/export/cloned/seed2"],
    )
    evaluated = [f"results/evaluate/cloned/seed2/{name}" for name in evaluate.OUTPUTS]
    assert files_of(evaluate.job_of(cloned)) == (
        ["build/env/ball", "results/export/cloned/seed2"],
        evaluated,
    )
    filmed = replace(cloned.experiment, evaluation=EvaluationParams(episodes=3, seed=9, video=True))
    params = replace(cloned.params, experiments=cloned.params.experiments | {"cloned": filmed})
    film = evaluate.job_of(replace(cloned, params=params))
    assert files_of(film)[1] == [
        *evaluated,
        *(f"results/evaluate/cloned/seed2/{name}.gif" for name in ("median", "best")),
    ]


def test_each_stage_of_an_experiment_depends_only_on_settings_of_that_experiment(run):
    cloned, scratch = run("cloned", 2), run("scratch", 5)
    learned, other = train.job_of(cloned).params, train.job_of(scratch).params
    assert learned["overrides"] == cloned.params.overrides("cloned") != other["overrides"]
    assert (learned["seed"], other["seed"]) == (2, 5)
    threads = [job["runtime"]["torch_threads"] for job in (learned, other)]
    assert threads == [4, 2]
    first = pretrain.job_of(cloned).params
    assert first["pretrain"]["batch_size"] == 2
    assert (first["seed"], first["runtime"]["torch_threads"]) == (2, 4)
    evaluated = evaluate.job_of(cloned).params
    assert (evaluated["episodes"], evaluated["seed"]) == (3, 9), "not the seed of the training"


def test_mlflow_key_contains_experiment_seed_stage_and_the_digest_of_the_policy_that_is_used(
    run, tmp_path
):
    cloned = run("cloned", 2)
    for seed in (1, 2):
        policy = tmp_path / f"results/train/cloned/seed{seed}/policy.pt"
        policy.parent.mkdir(parents=True)
        policy.write_text(str(seed))

    def key(stage, resumed=False):
        job = SimpleNamespace(stage=stage)
        return run_context.key_of(
            cloned, SimpleNamespace(job=job, fingerprint=f"of {stage}", resumed=resumed)
        )

    row = key("evaluate")
    assert (row.experiment, row.seed, row.stage) == ("cloned", 2, "evaluate")
    assert row.fingerprint == "of evaluate"
    assert row.policy == run_context.run_metadata.dvc_digest(policy)
    assert key("train", resumed=True).resumed
    assert key("train").policy is None, "which it is about to make"


def test_results_of_a_run_are_read_separately_for_each_behavior(tmp_path):
    results = tmp_path / "results"
    for seed in (1, 2):
        run = f"e/seed{seed}"
        played = {"A": {"mean_return": seed}, "B": {"mean_return": -1}}
        left(tmp_path, "evaluate", run, metrics=played)
        rows = f"A,10,{seed}\nB,10,7\nA,20,{seed + 1}\nB,20,\n"
        trained = {"A": {"interrupted_at_step": 5}, "B": {}}
        left(tmp_path, "train", run, metrics=trained, progress=rows)
        record = {"resumed": seed == 1, "duration_s": 10.0 * seed}
        left(tmp_path, ".work/train", run, stage=record)
    found = {
        (trial.behavior, trial.seed): trial
        for seed in (1, 2)
        for trial in trials_of(results, "e", seed, environment="ball")
    }
    assert {key: trial.evaluated for key, trial in found.items()} == {
        ("A", 1): 1.0,
        ("A", 2): 2.0,
        ("B", 1): -1.0,
        ("B", 2): -1.0,
    }
    assert found["A", 2].curve.returns.tolist() == [2.0, 3.0]
    assert found["B", 2].curve.steps.tolist() == [10.0]
    assert [found[key].exact for key in (("A", 1), ("B", 1))] == [False, True]
    assert [found["A", seed].seconds for seed in (1, 2)] == [None, 20.0]
    (trial, _) = trials_of(results, "e", 2, environment="ball", stages=("train",))
    assert (trial.evaluated, trial.environment) == (None, "ball")


def test_median_for_pruning_at_a_step_is_taken_over_the_curves_of_all_trials_and_seeds():
    told = {
        "001": {"curves": [[[100, 1.0], [200, 10.0]], [[100, 2.0], [200, 20.0]]]},
        "002": {"curves": [[[100, 6.0], [200, 60.0]], [[100, 9.0]]]},
    }
    assert _medians(told, SimpleNamespace(prune_after=100)) == [[100, 4.0], [200, 20.0]]
    assert _medians(told, SimpleNamespace(prune_after=150)) == [[200, 20.0]]


def test_recorded_episode_has_the_actions_and_rewards_of_one_agent(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_continuous(1))

    def message(ids, ended=()):
        obs = [np.array(ids, np.float32)[:, None]]
        ends = [np.array(ended, np.float32)[:, None] + 0.5]
        reward = np.array(ids, np.float32) * 10
        last = np.array(ended, np.float32) * 100
        return decision_steps(obs, ids, reward=reward), terminal_steps(ends, ended, reward=last)

    messages = [
        message([2, 1]),
        message([1, 2]),
        message([3, 1, 2], [2]),  # both other episodes begin after the two recorded ones
        message([3, 2], [1]),
    ]

    class Env:
        at = 0
        behavior_specs = {"Ball?team=0": spec}  # noqa: RUF012

        def get_steps(self, _):
            return messages[self.at]

        def set_actions(self, *_):
            pass

        def step(self):
            self.at += 1

    def act(steps):
        return ActionTuple(np.array(steps.agent_id, np.float32)[:, None] / 10)

    summary = demos.write_episodes(Env(), act, tmp_path / "a.demo", episodes=2)
    demo = read_demo(tmp_path / "a.demo")
    assert (summary["episodes"], summary["steps"]) == (2, 2 + 3)
    assert (summary["min_return"], summary["max_return"]) == (10 + 10 + 100, 20 + 200)
    assert demo.returns() == [20 + 200, 10 + 10 + 100]  # without the reward of each first step
    assert demo.obs[0].ravel().tolist() == [2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.5]
    assert demo.continuous.ravel().tolist() == pytest.approx([0.2, 0.2, 0.0, 0.1, 0.1, 0.1, 0.0])
