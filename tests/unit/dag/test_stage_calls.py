"""The arguments that stages give to trainer, exporter, players and MLflow, and their outputs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from pipeline import trainer
from pipeline.dag import policies, provenance, run_context
from pipeline.dag.stages import evaluate, export, pretrain, train
from pipeline.envs import unity
from pipeline.evaluation import episodes as episodes_module
from pipeline.evaluation import video
from pipeline.evaluation.episodes import Episode
from pipeline.export import publish as writing
from pipeline.settings import load_run_settings
from pipeline.tracking import run_metadata
from pipeline.tracking.result import BehaviorResult, TrainResult
from pipeline.trainer import JobSpec
from pipeline.trainer.checkpoints import restore
from pipeline.trainer.pretraining import PretrainResult

BEHAVIORS = {"A": {"max_steps": 70}, "B": {"max_steps": 90}}
POLICIES = {"A": Path("a.pt"), "B": Path("b.pt")}


@pytest.fixture
def parts(monkeypatch) -> Mock:
    """Parts that train, write and record, with the calls of each part."""
    parts = Mock()
    for place, name in (
        *((trainer, "train"), (trainer, "pretrain"), (train, "standard_sinks")),
        *((policies, "join"), (run_context, "recorded"), (run_context, "tell_pretraining")),
        *((run_context, "key_of"), (run_context, "row_of"), (torch, "set_num_threads")),
    ):
        monkeypatch.setattr(place, name, getattr(parts, name))
    parts.recorded.side_effect = lambda *_, **__: nullcontext(parts.record)
    parts.key_of.return_value, parts.row_of.return_value = "key", "row"
    return parts


@pytest.fixture
def attempt(tmp_path, monkeypatch) -> SimpleNamespace:
    """An attempt at a stage, without a lock and without files of its own."""
    made = SimpleNamespace(
        run=tmp_path / "scratch", done=False, facts={}, out=lambda name: tmp_path / "out" / name
    )
    (tmp_path / "out").mkdir()
    for stage in (pretrain, export):
        monkeypatch.setattr(stage, "attempt_at", lambda *_: nullcontext(made))
    return made


@pytest.fixture
def run(tmp_path) -> SimpleNamespace:
    return SimpleNamespace(
        root=tmp_path,
        name="e",
        seed=7,
        instance="e/seed7",
        folder=lambda stage: Path("results") / stage / "e/seed7",
        runtime=lambda: {"torch_threads": 3, "device": "cuda"},
        params=SimpleNamespace(
            track=["jsonl"],
            runtime=SimpleNamespace(torch_threads=2),
            network_settings="networks of {}".format,
        ),
        experiment=SimpleNamespace(
            environment="ball",
            demonstrations="expert",
            learners=2,
            chosen=None,
            stages=("pretrain", "train"),
        ),
    )


@pytest.fixture
def trained(parts, attempt, run, monkeypatch):
    """A function that calls the stage `train`."""
    results = {
        name: BehaviorResult(
            steps=steps, n_updates=3, n_episodes=4, mean_reward=1.0, checkpoint=POLICIES[name]
        )
        for name, steps in (("A", 70), ("B", 90))
    }
    parts.train.return_value = TrainResult(
        behaviors=results, seconds={"total": 9.0, "update": 4.0}, interrupted=[30]
    )
    parts.standard_sinks.return_value = ["sink"]
    monkeypatch.setattr(train, "read_points", lambda path: ["points of", path])
    monkeypatch.setattr(train, "_history", lambda run, attempt, steps: [run, attempt, steps])
    build = SimpleNamespace(file=Path("game"), args=("--level", "7"))
    return lambda settings, first: train._train(run, attempt, settings, build, first)


def test_train_stage_passes_all_settings_to_the_trainer_and_writes_all_results(
    trained, parts, attempt, run, tmp_path
):
    env = {"env_settings": {"num_envs": 5}}
    settings = load_run_settings(None, overrides={"behaviors": BEHAVIORS, **env})
    first, attempt.resumed = {"A": Path("first.pt")}, True
    metrics = trained(settings, first)
    job = JobSpec(
        Path("game"),
        settings,
        seed=7,
        run_dir=attempt.run,
        num_envs=5,
        env_args=("--level", "7"),
        init_from=first,
        whole_weights=True,
        log_folder=attempt.run / "logs",
        resume=True,
        torch_threads=3,
    )
    parts.train.assert_called_once_with(job, device="cuda", callbacks=["sink"], learners=2)
    tracked, chosen = parts.standard_sinks.call_args.args
    assert (tracked.folder, tracked.key, tracked.row) == (attempt.run, "key", "row")
    assert (tracked.max_steps, tracked.record) == ({"A": 70, "B": 90}, parts.record)
    assert (tracked.prefixed, chosen) == (True, ["jsonl"])
    parts.recorded.assert_called_once_with(run, attempt, prefix=True, key="key", row="row")
    pretrained = tmp_path / "results/pretrain/e/seed7"
    parts.tell_pretraining.assert_called_once_with(parts.record, pretrained)
    policy = tmp_path / "out/policy.pt"
    parts.join.assert_called_once_with(POLICIES, policy, history=[run, attempt, [30]])
    assert {name: values["steps"] for name, values in metrics.items()} == {"A": 70, "B": 90}
    parts.record.trained.assert_called_once_with(
        metrics,
        curve=["points of", attempt.run / "progress.csv"],
        seconds=None,  # unknown for a resumed attempt
        interrupted=[30],
    )
    parts.record.made.assert_called_once_with(policy)
    assert attempt.facts == {
        "pruned": False,
        "seconds": {"total": 9.0, "update": 4.0},
        "interrupted_at_steps": [30],
    }


def test_train_stage_of_a_sweep_trial_is_stopped_by_the_pruner_and_marked_as_pruned(
    trained, parts, attempt, monkeypatch
):
    pruner = train.Pruner({100: 5.0}, "A")
    monkeypatch.setattr(train, "_pruner", lambda _: pruner)
    settings = load_run_settings(None, overrides={"behaviors": {"A": BEHAVIORS["A"]}})
    attempt.resumed = False
    trained(settings, None)
    (job,), options = parts.train.call_args
    assert options["callbacks"] == ["sink", pruner]
    assert (job.resume, job.init_from) == (False, {})
    parts.tell_pretraining.assert_not_called()
    assert parts.recorded.call_args.kwargs["prefix"] is False
    assert not attempt.facts["pruned"]
    pruner.on_summary("A", {train.names.REWARD: 1.0}, 100)
    pruner.on_summary("A", {train.names.REWARD: 9.0}, 200)
    trained(settings, None)
    assert attempt.facts["pruned"]


@pytest.mark.parametrize("is_trained", [True, False])
def test_pretrain_stage_passes_all_settings_to_the_trainer_and_writes_the_losses(
    is_trained, parts, attempt, run, monkeypatch, tmp_path
):
    parts.pretrain.return_value = PretrainResult(
        behavior="A",
        n_rows=90,
        epochs=2,
        loss=0.25,
        held_out_loss=1.5,
        losses=[(1.0, 2.0), (float("nan"), 1.5)],
        checkpoint=Path("a.pt"),
    )
    demonstrations = Path("data/demos/expert.demo")
    params = {"pretrain": {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3}}
    job = SimpleNamespace(inputs=[demonstrations], params=params)
    monkeypatch.setattr(pretrain, "job_of", lambda _: job)
    monkeypatch.setattr(provenance, "of_stage", lambda *a, **more: (a[2], more))
    run.experiment.stages = ("pretrain", "train") if is_trained else ("pretrain",)
    pretrain.pretrain(run)
    parts.pretrain.assert_called_once_with(
        [tmp_path / demonstrations],
        "networks of e",
        seed=7,
        run_dir=attempt.run,
        device="cuda",
        **params["pretrain"],
    )
    parts.set_num_threads.assert_called_once_with(3)
    history, out = [(params, {"demonstrations": ("expert", demonstrations)})], tmp_path / "out"
    parts.join.assert_called_once_with({"A": Path("a.pt")}, out / "policy.pt", history=history)
    # With a stage `train`, the MLflow run belongs to that stage.
    told = [] if is_trained else [call(parts.record, out)]
    assert parts.tell_pretraining.mock_calls == told
    metrics = {"rows": 90, "epochs": 2, "loss": 0.25, "held_out_loss": 1.5}
    assert json.loads((out / "metrics.json").read_text()) == {"A": metrics}
    lines = (out / "progress.csv").read_text().splitlines()
    assert lines == ["step,loss,held_out_loss", "1,1,2", "2,nan,1.5"]


@dataclass
class Report:
    """Stands for the report of a written file."""

    size: int


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ([], None),
        ([{"stage": "pretrain"}, {"stage": "learn"}], [None, [30]]),
        ([{"interrupted_at_steps": [9]}, {"stage": "export"}], [[9], None]),
    ],
)
def test_export_checks_the_onnx_file_with_observations_recorded_in_the_checkpoint(
    history, told, monkeypatch, tmp_path
):
    saved = SimpleNamespace(
        behavior="A",
        policy="policy",
        recorded_obs="seen",
        recorded_masks="allowed",
        interrupted=[30],
        step=70,
    )
    write = Mock(return_value=Report(size=5))
    monkeypatch.setattr(restore, "load_policy", {Path("a.pt"): saved}.__getitem__)
    monkeypatch.setattr(writing, "record", lambda *arguments: arguments)
    monkeypatch.setattr(writing, "publish", write)
    monkeypatch.setattr(provenance, "text", lambda entries: [*entries])
    report = export.publish(Path("a.pt"), tmp_path, label="-70", history=history)
    assert report == {"size": 5, "step": 70}
    assert write.call_args.args == ("policy", tmp_path / "A-70.onnx")
    options = write.call_args.kwargs
    assert options["recording"] == ("policy", "seen", "allowed")
    records = options["metadata"].get(provenance.KEY)
    assert (records and [r.get("interrupted_at_steps") for r in records]) == told


@pytest.mark.usefixtures("attempt")
def test_every_behavior_of_a_run_is_exported_with_history_and_digest_of_the_policy(
    parts, run, monkeypatch, tmp_path
):
    policy = tmp_path / "results/train/e/seed7/policy.pt"
    policy.parent.mkdir(parents=True)
    policy.write_text("learned")
    publish = Mock(side_effect=[{"step": 1}, {"step": 2}])
    monkeypatch.setattr(policies, "split", lambda path, to: {n: (path, to, n) for n in ("A", "B")})
    monkeypatch.setattr(policies, "history", lambda path: [path.name])
    monkeypatch.setattr(provenance, "of_stage", lambda *arguments: arguments[2])
    monkeypatch.setattr(export, "publish", publish)
    export.export(run)
    folder, history = tmp_path / "out/seed7", ["policy.pt", {"runtime": run.runtime()}]
    assert publish.mock_calls == [
        call((policy, tmp_path / "scratch", name), folder, history=history) for name in ("A", "B")
    ]
    digest = {run_metadata.POLICY_DIGEST: run_metadata.dvc_digest(policy)}
    reports = {"A": {"step": 1} | digest, "B": {"step": 2} | digest}
    assert json.loads((folder / "export.json").read_text()) == reports
    assert parts.record.mock_calls == [
        call.made(folder),
        call.model(folder / "A.onnx", environment="ball"),
        call.model(folder / "B.onnx", environment="ball"),
    ]


def episode(behavior, agent, value, length=3, index=0):
    return Episode(
        index=index,
        behavior=behavior,
        agent=agent,
        episode_return=value,
        length=length,
        interrupted=False,
    )


MEDIAN, BEST = (episode("A", 0, 1.0 * k, index=k) for k in range(2))


@pytest.mark.parametrize("is_filmed", [True, False])
def test_evaluation_uses_the_given_settings_and_makes_videos_after_all_episodes(
    is_filmed, monkeypatch, tmp_path
):
    calls = Mock()
    calls.open.return_value.__enter__ = lambda _: "env"
    calls.open.return_value.__exit__ = calls.close
    calls.play.return_value = [MEDIAN, BEST]
    monkeypatch.setattr(unity, "UnityEnvironment", calls.open)
    monkeypatch.setattr(episodes_module, "evaluate", calls.play)
    monkeypatch.setattr(video, "check", lambda file, paths: calls.check(file, [*paths]))
    monkeypatch.setattr(video, "choose", lambda _: {"median": MEDIAN, "best": BEST})
    monkeypatch.setattr(video, "film", calls.film)
    monkeypatch.chdir(tmp_path)
    build = SimpleNamespace(file=Path("game"), args=("--level", "7"))
    videos = {"best": Path("b.gif"), "median": Path("m.gif")} if is_filmed else None
    names = {"A": "policy of A", "B": "policy of B"}
    played = evaluate.play(
        names,
        build,
        deterministic=False,
        episodes=4,
        seed=9,
        log_folder=Path("logs"),
        videos=videos,
    )
    assert played == [MEDIAN, BEST]
    options = {"seed": 9, "additional_args": ("--level", "7"), "no_graphics": True}
    expected = [
        call.open(Path("game"), log_folder=tmp_path / "logs", **options),
        call.play("env", names, episodes=4, seed=9, deterministic=False),
        call.close(None, None, None),
    ]
    if is_filmed:
        wanted = {Path("b.gif"): BEST, Path("m.gif"): MEDIAN}
        arguments = (Path("game"), ("--level", "7"), names, played, wanted)
        film = call.film(*arguments, seed=9, deterministic=False)
        expected = [call.check(Path("game"), [*wanted]), *expected, film]
    assert calls.mock_calls == expected


def test_metrics_have_each_policys_digest_and_no_score_is_recorded_for_self_play(
    run, tmp_path, monkeypatch
):
    exported = tmp_path / "results/export/e/seed7"
    exported.mkdir(parents=True)
    content = {"A": {"policy_md5": "a", "step": 30}, "B": {"policy_md5": "b", "step": 50}}
    (exported / "export.json").write_text(json.dumps(content))
    behaviors = {"A": {}, "B": {"self_play": {}}}
    run.params.run_settings = lambda _: load_run_settings(None, overrides={"behaviors": behaviors})
    metrics = evaluate.metrics_of(
        [
            MEDIAN,
            replace(BEST, episode_return=5.0),
            replace(MEDIAN, behavior="B?team=1", episode_return=8.0),
            replace(MEDIAN, behavior="C", episode_return=2.0),
        ]
    )
    named = evaluate._with_policy(metrics, run, {})
    assert {name: (v["policy_md5"], v["mean_return"]) for name, v in named.items()} == {
        "A": ("a", 2.5),
        "B": ("b", 8.0),
        "C": (None, 2.0),
    }
    record, params = Mock(), {"episodes": 4, "seed": 9}
    outputs = (Path("x/episodes.csv"), Path("x/returns.png"))
    monkeypatch.setattr(
        evaluate, "job_of", lambda _: SimpleNamespace(params=params, outputs=outputs)
    )
    (tmp_path / "metrics.json").write_text(json.dumps(named))
    evaluate.tell(record, run, tmp_path)
    build = tmp_path / "build/env/ball"
    record.score.assert_called_once_with({"A": 2.5}, environment="ball", build=build, params=params)
    record.picture.assert_called_once_with(tmp_path / "returns.png", step=50)
    record.artifacts.assert_called_once_with([tmp_path / path.name for path in outputs])
    record.settings.assert_called_once_with(params)
    record.made.assert_called_once_with(tmp_path / "metrics.json")
    (results,) = record.results.call_args.args
    assert (results["A/mean_return"], results["B/mean_return"]) == (2.5, 8.0)
    assert "B/std_return" not in results, "of one episode"


def test_metrics_of_a_behavior_combine_episodes_of_all_its_teams_and_of_no_other_behavior():
    played = [
        episode("A?team=0", 0, 1.0, 10),
        episode("B?team=0", 0, 100.0, 90),
        episode("A?team=1", 0, 3.0, 20),
        episode("A?team=1", 1, 8.0, 30),
    ]
    metrics = evaluate.metrics_of(played)
    spread = {name: metrics["A"].pop(name) for name in ("std_return", "ci_low", "ci_high")}
    assert metrics["A"] == {
        "episodes": 3,
        "mean_return": 4.0,
        "median_return": 3.0,
        "min_return": 1.0,
        "max_return": 8.0,
        "mean_length": 20.0,
    }
    assert spread["ci_low"] < 4.0 < spread["ci_high"]
    assert (metrics["B"]["mean_return"], metrics["B"]["mean_length"]) == (100.0, 90.0)
