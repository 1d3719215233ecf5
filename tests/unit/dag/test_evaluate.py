"""The calls of the stage `evaluate`: playing, filming, and reporting to MLflow."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.dag.stages import evaluate
from pipeline.envs import unity
from pipeline.evaluation import episodes as episodes_module
from pipeline.evaluation import video
from pipeline.evaluation.episodes import Episode
from pipeline.settings import load_run_settings


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
    calls = []

    @contextlib.contextmanager
    def environment(*arguments, **options):
        calls.append(("open", arguments, options))
        yield "env"
        calls.append("close")

    def noted(name, result=None):
        def call(*arguments, **options):
            calls.append((name, arguments, options))
            return result

        return call

    monkeypatch.setattr(unity, "UnityEnvironment", environment)
    monkeypatch.setattr(episodes_module, "evaluate", noted("play", [MEDIAN, BEST]))
    monkeypatch.setattr(video, "check", lambda file, paths: calls.append(("check", file, [*paths])))
    monkeypatch.setattr(video, "choose", lambda _: {"median": MEDIAN, "best": BEST})
    monkeypatch.setattr(video, "film", noted("film"))
    monkeypatch.chdir(tmp_path)
    build = SimpleNamespace(file=Path("game"), args=("--level", "7"))
    videos = {"best": Path("b.gif"), "median": Path("m.gif")} if is_filmed else None
    policies = {"A": "policy of A", "B": "policy of B"}
    played = evaluate.play(
        policies,
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
        ("open", (Path("game"),), options | {"log_folder": tmp_path / "logs"}),
        ("play", ("env", policies), {"episodes": 4, "seed": 9, "deterministic": False}),
        "close",
    ]
    if is_filmed:
        wanted = {Path("b.gif"): BEST, Path("m.gif"): MEDIAN}
        arguments = (Path("game"), ("--level", "7"), policies, played, wanted)
        film = ("film", arguments, {"seed": 9, "deterministic": False})
        expected = [("check", Path("game"), [*wanted]), *expected, film]
    assert calls == expected


def test_metrics_have_each_policys_digest_and_no_score_is_recorded_for_self_play(
    tmp_path, monkeypatch
):
    exported = tmp_path / "results/export/e/seed7"
    exported.mkdir(parents=True)
    content = {"A": {"policy_md5": "a", "step": 30}, "B": {"policy_md5": "b", "step": 50}}
    (exported / "export.json").write_text(json.dumps(content))
    behaviors = {"A": {}, "B": {"self_play": {}}}
    run = SimpleNamespace(
        root=tmp_path,
        name="e",
        folder=lambda stage: Path("results") / stage / "e/seed7",
        experiment=SimpleNamespace(environment="ball"),
        params=SimpleNamespace(
            run_settings=lambda _: load_run_settings(None, overrides={"behaviors": behaviors})
        ),
    )
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
    told = {}

    def note(name):
        return lambda *arguments, **options: told.setdefault(name, (arguments, options))

    names = ("settings", "results", "artifacts", "picture", "made", "score")
    record = SimpleNamespace(**{name: note(name) for name in names})
    params = {"episodes": 4, "seed": 9}
    outputs = (Path("x/episodes.csv"), Path("x/returns.png"))
    job = SimpleNamespace(params=params, outputs=outputs)
    monkeypatch.setattr(evaluate, "job_of", lambda _: job)
    (tmp_path / "metrics.json").write_text(json.dumps(named))
    evaluate.tell(record, run, tmp_path)
    build = tmp_path / "build/env/ball"
    assert told["score"] == (
        ({"A": 2.5},),
        {"environment": "ball", "build": build, "params": params},
    )
    assert told["picture"] == ((tmp_path / "returns.png",), {"step": 50})
    assert told["artifacts"][0][0] == [tmp_path / "episodes.csv", tmp_path / "returns.png"]
    assert told["settings"][0] == (params,)
    assert told["made"][0] == (tmp_path / "metrics.json",)
    (results,) = told["results"][0]
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
