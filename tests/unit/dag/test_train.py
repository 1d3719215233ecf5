"""The arguments that the stage `train` gives to the trainer, and its outputs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import trainer
from pipeline.dag.stages import train
from pipeline.settings import load_run_settings
from pipeline.trainer.result import BehaviorResult, TrainResult

BEHAVIORS = {"A": {"max_steps": 70}, "B": {"max_steps": 90}}
POLICIES = {"A": Path("a.pt"), "B": Path("b.pt")}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Replace all parts that train or write, and return the arguments of each call."""
    seen: dict[str, object] = {}

    def noted(name, result=None):
        def call(*arguments, **options):
            seen[name] = (arguments, options)
            return result

        return call

    results = {
        name: BehaviorResult(
            steps=steps, n_updates=3, n_episodes=4, mean_reward=1.0, checkpoint=POLICIES[name]
        )
        for name, steps in (("A", 70), ("B", 90))
    }
    result = TrainResult(behaviors=results, seconds={"total": 9.0, "update": 4.0}, interrupted=[30])
    record = SimpleNamespace(trained=noted("trained"), made=noted("made"))

    @contextlib.contextmanager
    def recorded(run, attempt, **options):
        seen["recorded"] = ((run, attempt), options)
        yield record

    monkeypatch.setattr(trainer, "train", noted("train", result))
    monkeypatch.setattr(train, "standard_sinks", noted("sinks", ["sink"]))
    monkeypatch.setattr(train, "read_points", lambda path: ["points of", path])
    monkeypatch.setattr(train.policies, "join", noted("join"))
    monkeypatch.setattr(train, "_history", lambda run, attempt, steps: [run, attempt, steps])
    monkeypatch.setattr(train.run_context, "recorded", recorded)
    monkeypatch.setattr(train.run_context, "key_of", lambda *_: "key")
    monkeypatch.setattr(train.run_context, "row_of", lambda *_: "row")
    monkeypatch.setattr(train.run_context, "tell_pretraining", noted("pretraining"))
    seen["attempt"] = SimpleNamespace(
        run=tmp_path / "scratch", resumed=True, facts={}, out=lambda name: tmp_path / "out" / name
    )
    seen["run"] = SimpleNamespace(
        root=tmp_path,
        name="e",
        seed=7,
        params=SimpleNamespace(track=["jsonl"]),
        experiment=SimpleNamespace(learners=2, chosen=None, stages=("pretrain", "train")),
        runtime=lambda: {"torch_threads": 3, "device": "cuda"},
        folder=lambda stage: Path("results") / stage / "e/seed7",
    )
    seen["record"] = record
    return seen


def test_train_stage_passes_all_settings_to_the_trainer_and_writes_all_results(asked, tmp_path):
    env = {"env_settings": {"num_envs": 5}}
    settings = load_run_settings(None, overrides={"behaviors": BEHAVIORS, **env})
    build = SimpleNamespace(file=Path("game"), args=("--level", "7"))
    run, attempt, first = asked["run"], asked["attempt"], {"A": Path("first.pt")}
    metrics = train._train(run, attempt, settings, build, first)
    (program, given), options = asked["train"]
    assert (program, given) == (Path("game"), settings)
    assert options == {
        "seed": 7,
        "run_dir": attempt.run,
        "num_envs": 5,
        "env_args": ("--level", "7"),
        "init_from": first,
        "whole_weights": True,
        "log_folder": attempt.run / "logs",
        "resume": True,
        "device": "cuda",
        "torch_threads": 3,
        "callbacks": ["sink"],
        "learners": 2,
    }
    tracked, chosen = asked["sinks"][0]
    assert (tracked.folder, tracked.key, tracked.row) == (attempt.run, "key", "row")
    assert (tracked.max_steps, tracked.record) == ({"A": 70, "B": 90}, asked["record"])
    assert (tracked.prefixed, chosen) == (True, ["jsonl"])
    told = {"prefix": True, "key": "key", "row": "row"}
    assert asked["recorded"] == ((run, attempt), told)
    assert asked["pretraining"][0] == (asked["record"], tmp_path / "results/pretrain/e/seed7")
    assert asked["join"] == (
        (POLICIES, tmp_path / "out/policy.pt"),
        {"history": [run, attempt, [30]]},
    )
    assert {name: values["steps"] for name, values in metrics.items()} == {"A": 70, "B": 90}
    assert asked["trained"] == (
        (metrics,),
        {
            "curve": ["points of", attempt.run / "progress.csv"],
            "seconds": None,  # unknown for a resumed attempt
            "interrupted": [30],
        },
    )
    assert asked["made"][0] == (tmp_path / "out/policy.pt",)
    assert attempt.facts == {
        "pruned": False,
        "seconds": {"total": 9.0, "update": 4.0},
        "interrupted_at_steps": [30],
    }


def test_train_stage_of_a_sweep_trial_is_stopped_by_the_pruner_and_marked_as_pruned(
    asked, monkeypatch
):
    pruner = train.Pruner({100: 5.0}, "A")
    monkeypatch.setattr(train, "_pruner", lambda _: pruner)
    settings = load_run_settings(None, overrides={"behaviors": {"A": BEHAVIORS["A"]}})
    build = SimpleNamespace(file=Path("game"), args=())
    asked["attempt"].resumed = False
    train._train(asked["run"], asked["attempt"], settings, build, None)
    options = asked["train"][1]
    assert options["callbacks"] == ["sink", pruner]
    assert not pruner.stop
    assert (options["resume"], options["init_from"]) == (False, None)
    assert "pretraining" not in asked
    assert asked["recorded"][1]["prefix"] is False
    pruner.on_summary("B", {train.names.REWARD: 1.0}, 100)
    assert not pruner.stop, "another behavior decides nothing"
    pruner.on_summary("A", {train.names.REWARD: 1.0}, 100)
    pruner.on_summary("A", {train.names.REWARD: 9.0}, 200)
    assert pruner.stop
    train._train(asked["run"], asked["attempt"], settings, build, None)
    assert asked["attempt"].facts["pruned"]
