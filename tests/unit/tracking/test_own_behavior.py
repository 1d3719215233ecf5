"""Sinks keep what they know of one behavior, run or place apart from that of the others."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.tracking import names
from pipeline.tracking.base import Update
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.curve_csv import CsvSink, UpdatesCsvSink, read_points
from pipeline.tracking.mlflow_run import BUILD, EXPERIMENT, SCORE, score
from pipeline.tracking.run_metadata import flat, parameters
from pipeline.tracking.sinks import TrackedRun
from pipeline.tracking.sinks.jsonl import JsonLinesSink
from pipeline.tracking.timers import TimersSink


def test_time_and_episodes_between_updates_are_those_of_the_same_behavior(tmp_path: Path):
    clock = iter((50.0, 54.0, 60.0, 61.0, 70.0)).__next__
    sink = UpdatesCsvSink(tmp_path, clock=clock)
    for behavior, step, update_s, n_episodes, returns in (
        ("A", 100, 1.0, 2, [2.0, 4.0]),
        ("B", 1000, 5.0, 1, [50.0]),
        ("A", 150, 1.5, 3, [2.0, 4.0, 9.0]),
        ("B", 1700, 7.0, 3, [50.0, 70.0, 90.0]),
    ):
        update = Update(step=step, update_s=update_s, n_episodes=n_episodes, recent_returns=returns)
        sink.updated(behavior, update)
    sink.close()
    rows = {name: (tmp_path / f"{name}.csv").read_text().splitlines()[1:] for name in "AB"}
    assert rows == {
        "A": ["A,1,4,3,100,3", "A,0.5,11,6.5,50,9"],
        "B": ["B,5,10,5,1000,50", "B,2,20,8,700,80"],
    }


def test_a_resumed_behavior_drops_its_own_later_summaries_alone(tmp_path: Path):
    run = TrackedRun(folder=tmp_path, max_steps={})
    for steps in ((("A", 10), ("B", 15), ("A", 20), ("B", 30)), (("B", 30), ("A", 20), ("A", 30))):
        sinks = [CsvSink(tmp_path / "progress.csv"), JsonLinesSink(run)]
        for behavior, step in steps:
            for sink in sinks:
                sink.metrics(behavior, {names.REWARD: len(steps)}, step)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = sorted((line["behavior"], line["step"], line[names.REWARD]) for line in lines)
    assert kept == [("A", 10, 4), ("A", 20, 3), ("A", 30, 3), ("B", 15, 4), ("B", 30, 3)]
    new = JsonLinesSink(replace(run, keep_earlier=False))  # begins anew, once for all behaviors
    for behavior in "AB":
        new.metrics(behavior, {}, 5)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    points = read_points(tmp_path / "progress.csv")
    assert sorted((name, step, value) for name, _, value, step in points) == kept
    with (tmp_path / "progress.csv").open(newline="") as file:
        assert {row["reward"] for row in csv.DictReader(file)} == {"3", "4"}


def test_speed_and_time_left_are_of_the_same_behavior():
    clock = iter(float(second) for second in range(0, 1000, 10)).__next__
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream, clock=clock)
    for behavior, max_steps in (("A", 1000), ("B", 90)):
        sink.began(behavior, {"max_steps": max_steps})
    for behavior, step in (("A", 100), ("B", 10), ("A", 500), ("B", 50)):
        sink.metrics(behavior, {}, step)
    *_, third, fourth = stream.getvalue().splitlines()
    # each reads the clock twice a summary: 40 s between two summaries of a behavior
    assert third.endswith("(10 steps/s, 0:50 left)")
    assert fourth.endswith("(1 steps/s, 0:40 left)")


def test_times_of_behaviors_that_step_together_are_counted_once_and_gauges_apart(tmp_path: Path):
    sink = TimersSink(tmp_path / "timers.json", clock=lambda: 100.0)
    for behavior, update, reward in (("A", 1.0, 5.0), ("B", 4.0, 50.0), ("A", 2.0, 3.0)):
        values = {"Time/environment": 10.0, "Time/update": update, names.REWARD: reward}
        sink.metrics(behavior, values, 1)
    tree = sink.tree()
    parts = tree["children"]["TrainerController.start_learning"]["children"]
    assert parts["env_step"]["total"] == 20.0
    assert parts["_update_policy"]["total"] == 7.0
    gauges = {name.split(".")[0]: gauge for name, gauge in tree["gauges"].items()}
    assert gauges["A"] == {"value": 3.0, "min": 3.0, "max": 5.0, "count": 2}
    assert gauges["B"] == {"value": 50.0, "min": 50.0, "max": 50.0, "count": 1}


def test_writers_get_the_samples_of_the_behavior_that_is_summarised():
    from pipeline.tracking.sinks.stats_writers import StatsWriterSink

    told = []

    class Writer:
        def on_add_stat(self, category, key, value, _aggregation):
            told.append((category, key, value))

        def write_stats(self, category, values, step):
            told.append((category, step, values["Goals"].aggregated_value))

    sink = StatsWriterSink([Writer()])
    for behavior, values in (("A", [1.0, 2.0]), ("B", [10.0])):
        sink.samples(behavior, {"Goals": (StatsAggregationMethod.SUM, values)})
    for behavior, step in (("A", 30), ("B", 20)):
        sink.metrics(behavior, {"Goals": 0.0}, step)
    assert told == [
        ("A", "Step", 30.0),
        ("A", "Goals", 1.0),
        ("A", "Goals", 2.0),
        ("A", 30, 3.0),
        ("B", "Step", 20.0),
        ("B", "Goals", 10.0),
        ("B", 20, 10.0),
    ]
    told.clear()
    sink.metrics("A", {"Goals": 7.0}, 40)  # a summary without samples has none of the one before
    assert told == [("A", "Step", 40.0), ("A", "Goals", 7.0), ("A", 40, 7.0)]


def test_names_of_numbers_and_settings_begin_with_their_behavior_where_there_are_several():
    metrics = {"A": {"reward": 1.0}, "B": {"reward": 2.0}}
    assert flat(metrics) == {"A/reward": 1.0, "B/reward": 2.0}
    assert flat({"A": metrics["A"]}) == {"reward": 1.0}
    settings = {name: {"hyperparameters": {"beta": k}} for k, name in enumerate("AB", 1)}
    assert parameters(settings) == {"A.beta": 1, "B.beta": 2}


class Registry:
    """Model versions of two runs, and the aliases that they have."""

    def __init__(self, *versions) -> None:
        self.versions, self.aliases, self.metrics = list(versions), {}, []

    def search_model_versions(self, query):
        key, value = query.split(" = ")
        field = {"run_id": "run", "name": "name"}[key]
        return [version for version in self.versions if getattr(version, field) == value.strip("'")]

    def set_model_version_tag(self, name, number, key, value):
        (version,) = (v for v in self.versions if (v.name, v.version) == (name, number))
        version.tags[key] = value

    def log_metric(self, run, key, value, *, step, model_id):
        self.metrics.append((run, key, value, step, model_id))

    def get_registered_model(self, _):
        return self

    def set_registered_model_alias(self, _, alias, version):
        self.aliases[alias] = version


class Version:
    def __init__(self, run, version, name="ball.Ball", **tags) -> None:
        self.run, self.version, self.name, self.tags = run, version, name, tags
        self.source = f"models:/m-{run}-{version}"


def test_a_score_is_of_the_newest_policy_of_its_run_and_aliases_of_their_candidates():
    scored = {SCORE: "9.0", BUILD: "now", EXPERIMENT: "other"}
    registry = Registry(
        Version("run", "2", SCORE="4.0"),
        Version("run", "10"),
        Version("run", "11", name="ball.Goalie"),
        Version("rival", "3", **scored),
        Version("rival", "4", **scored | {SCORE: "99.0", BUILD: "before"}),
    )
    score(registry, "run", "ball.Ball", {SCORE: "7.0", BUILD: "now", EXPERIMENT: "mine"})
    old, new, goalie = registry.versions[:3]
    assert new.tags == {SCORE: "7.0", BUILD: "now", EXPERIMENT: "mine"}
    assert (old.tags, goalie.tags) == ({"SCORE": "4.0"}, {})
    assert registry.metrics == [("run", "evaluate/mean_return", 7.0, 0, "m-run-10")]
    assert registry.aliases == {"best": "3", "mine": "10"}


def test_a_run_of_one_behavior_alone_has_tags_without_its_name(tmp_path: Path):
    run = TrackedRun(folder=tmp_path, max_steps={"A": 1})
    assert [replace(run, max_steps=steps).prefixed for steps in ({"A": 1}, {"A": 1, "B": 2})] == [
        False,
        True,
    ]
