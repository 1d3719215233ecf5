from __future__ import annotations

import io
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import SettingsError
from pipeline.tracking import names
from pipeline.tracking.base import Sink, Tracker, Update
from pipeline.tracking.console import ConsoleSink, duration, summary_line
from pipeline.tracking.curve_csv import CsvSink
from pipeline.tracking.sinks import TrackedRun, named_sinks, standard_sinks, tensorboard
from pipeline.tracking.sinks.tensorboard import TensorBoardSink


class Recorder(Sink):
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float], int]] = []
        self.closed = 0

    def metrics(self, behavior, values, step):
        self.seen.append((behavior, dict(values), step))

    def close(self):
        self.closed += 1


class Broken(Recorder):
    def metrics(self, behavior, values, step):
        super().metrics(behavior, values, step)
        raise OSError("disk full")

    def close(self):
        raise OSError("disk full")


def test_a_broken_sink_is_named_once_and_the_others_get_everything(caplog):
    broken, good = Broken(), Recorder()
    with caplog.at_level(logging.WARNING), Tracker([broken, good]) as tracker:
        for step in (10, 20, 30):
            tracker.metrics("Walker", {"loss": 1.0}, step)
    assert [step for _, _, step in good.seen] == [10, 20, 30]
    assert len(broken.seen) == 3
    assert good.closed == 1
    assert tracker.failures == {"Broken": 4}
    assert [r.message for r in caplog.records if "Broken" in r.message and "disk full" in r.message]
    assert len(caplog.records) == 1


def test_values_that_are_not_finite_reach_no_sink():
    sink = Recorder()
    Tracker([sink]).metrics("Walker", {"a": math.nan, "b": math.inf, "c": 2.0}, 5)
    assert sink.seen == [("Walker", {"c": 2.0}, 5)]


def tracked(folder: Path, **more) -> TrackedRun:
    return TrackedRun(folder=folder, max_steps={}, **more)


def kinds(sinks) -> set[str]:
    return {type(sink).__name__ for sink in sinks}


def test_console_curve_and_tensorboard_take_part_by_default_and_others_by_name(tmp_path: Path):
    run = TrackedRun(folder=tmp_path, max_steps={"B": 10})
    always = {"ConsoleSink", "CsvSink"}
    assert kinds(standard_sinks(run)) == {*always, "TensorBoardSink"}
    assert kinds(standard_sinks(run, ())) == always
    assert kinds(standard_sinks(run, ["jsonl"])) == {*always, "JsonLinesSink"}
    debugged = standard_sinks(replace(run, debug_folder=tmp_path), ())
    assert kinds(debugged) == {*always, "UpdatesCsvSink"}


def test_a_name_that_is_no_sink_is_refused_with_the_nearest(tmp_path: Path):
    run = tracked(tmp_path)
    with pytest.raises(SettingsError, match=r"'jsonel' is not allowed; did you mean 'jsonl'\?"):
        named_sinks(run, ["jsonel"])


def test_a_sink_whose_package_is_missing_is_refused_with_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("pipeline.settings.experiments.find_spec", lambda _: None)
    with pytest.raises(SettingsError) as caught:
        named_sinks(tracked(tmp_path), ["jsonl", "wandb"])
    assert str(caught.value) == (
        "pipeline.train: sinks: the package 'wandb' is not installed; "
        "pip install 'rl-pipeline[wandb]', or leave wandb out"
    )


def test_a_named_sink_that_cannot_open_is_left_out_with_a_warning(tmp_path: Path, caplog):
    # it needs to be told which run this is
    sinks = named_sinks(tracked(tmp_path), ["mlflow", "jsonl"])
    assert kinds(sinks) == {"JsonLinesSink"}
    assert "The sink mlflow takes no part in this run: a row of MLflow needs" in caplog.text


def lines(folder: Path) -> list[tuple[str, int, float]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["behavior"], row["step"], row["loss"]) for row in read]


def test_json_lines_have_every_summary_and_a_resumed_run_repeats_none(tmp_path: Path):
    run = TrackedRun(folder=tmp_path, max_steps={"A": 30, "B": 30})
    (first,) = named_sinks(run, ["jsonl"])
    for step in (10, 20):
        first.metrics("A", {"loss": 1.0, names.IS_TRAINING: 1.0}, step)
        first.metrics("B", {"loss": 2.0}, step)
    assert "Is Training" not in (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"behavior": "A", "st')  # a kill
    (resumed,) = named_sinks(run, ["jsonl"])
    resumed.metrics("A", {"loss": 3.0}, 20)
    resumed.metrics("B", {"loss": 4.0}, 30)
    assert lines(tmp_path) == [
        ("A", 10, 1.0),
        ("B", 10, 2.0),
        ("B", 20, 2.0),
        ("A", 20, 3.0),
        ("B", 30, 4.0),
    ]


def test_json_lines_of_a_new_run_begin_anew(tmp_path: Path):
    run = TrackedRun(folder=tmp_path, max_steps={"A": 30}, keep_earlier=False)
    for loss in (1.0, 2.0):
        (sink,) = named_sinks(run, ["jsonl"])
        sink.metrics("A", {"loss": loss}, 10)
        sink.metrics("B", {"loss": loss}, 10)
    assert lines(tmp_path) == [("A", 10, 2.0), ("B", 10, 2.0)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {names.REWARD: 12.3456, names.REWARD_STD: 1.5, names.IS_TRAINING: 1.0},
            "Mean Reward: 12.346. Std of Reward: 1.500. Training.",
        ),
        (
            {names.IS_TRAINING: 0.0},
            "No episode was completed since last summary. Not Training.",
        ),
        (
            {names.REWARD: 1, names.REWARD_STD: 9, names.GROUP_REWARD: 2, names.ELO: 1201.5},
            "Mean Reward: 1.000. Mean Group Reward: 2.000. Training. ELO: 1201.500.",
        ),
    ],
)
def test_summary_line_reads_as_in_ml_agents(values, line):
    start = "3DBall. Step: 12000. Time Elapsed: 3.142 s. "
    assert summary_line("3DBall", values, 12000, elapsed_s=3.14159) == start + line


def test_console_tells_speed_and_time_left():
    now = iter([0.0, 1.0, 1.0, 3.0, 3.0])
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream, clock=lambda: next(now))
    sink.began("B", {"max_steps": 2000})
    sink.metrics("B", {names.REWARD: 0.5, names.REWARD_STD: 0.0}, 200)
    sink.metrics("B", {names.REWARD: 1.0, names.REWARD_STD: 0.0}, 400)
    *_, first, second = stream.getvalue().splitlines()
    assert first.startswith("[INFO] B. Step: 200. Time Elapsed: 1.000 s.")
    assert "steps/s" not in first
    assert second.endswith("Training. (100 steps/s, 0:16 left)")


def test_console_shows_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    sink = ConsoleSink(stream=stream)
    sink.began("B", {"max_steps": 1000})
    sink.metrics("B", {names.REWARD: 0.5}, 500)
    sink.close()
    assert "500 steps" in stream.getvalue()
    assert "reward 0.500" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (3675.2, "1:01:15")])
def test_duration_reads_as_a_clock(seconds, text):
    assert duration(seconds) == text


def summary(reward: float, **more: float) -> dict[str, float]:
    values = {names.REWARD: reward, names.LEARNING_RATE: 3e-4, names.IS_TRAINING: 1.0}
    return values | {"Time/update": time.perf_counter()} | more


def test_resumed_csv_equals_an_uninterrupted_one(tmp_path: Path):
    uninterrupted, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"

    def play(path: Path, *steps: int) -> None:
        sink = CsvSink(path)
        for step in steps:
            sink.metrics("B", summary(step / 10), step)
            sink.metrics("C", summary(step), step)

    play(uninterrupted, 10, 20, 30, 40)
    play(resumed, 10, 20, 30)
    with resumed.open("a") as file:
        file.write("B,35,0.1")  # a kill in the middle of a row
    play(resumed, 30, 40)  # the checkpoint was made after step 20
    lines = sorted(resumed.read_text().splitlines())
    assert lines == sorted(uninterrupted.read_text().splitlines())


def test_csv_has_the_columns_that_plots_name_and_gets_another_for_a_new_tag(tmp_path: Path):
    sink = CsvSink(tmp_path / "progress.csv")
    sink.metrics("B", summary(1.5), 10)
    sink.metrics("B", {"Losses/GAIL Loss": 0.25}, 20)
    header, first, second = sink.path.read_text().splitlines()
    assert header.startswith("behavior,step,reward,reward_std,episode_length")
    assert header.endswith(",Losses/GAIL Loss")
    assert first.startswith("B,10,1.5,,")
    assert first.endswith(",0.0003,")
    assert second == "B,20,,,,,,,,0.25"


def events(folder: Path):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        event
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in LegacyEventFileLoader(str(path)).Load()
    ]


def test_tensorboard_gets_the_tags_per_behavior(tmp_path: Path):
    sink = TensorBoardSink(tracked(tmp_path))
    sink.began("B", {"batch_size": 64})
    sink.metrics("B", summary(1.5, **{names.REWARD_STD: 0.1}), 1000)
    written = events(tmp_path / "B")  # there at once, not when the file is closed
    sink.close()
    sink.close()
    assert events(tmp_path / "B") == written
    assert written[0].file_version == "brain.Event:2"
    scalars = {v.tag: v.simple_value for e in written for v in e.summary.value if e.step == 1000}
    assert scalars.pop("Time/update") > 0
    assert scalars == {
        names.REWARD: 1.5,
        names.LEARNING_RATE: pytest.approx(3e-4),
        names.REWARD_STD: pytest.approx(0.1),
    }
    texts = [v for e in written for v in e.summary.value if v.tag.startswith("Hyperparameters")]
    assert len(texts) == 1
    assert b"batch_size:\t64" in texts[0].tensor.string_val[0]


def test_tensorboard_gets_a_histogram_of_the_returns_behind_a_mean(tmp_path: Path):
    with Tracker([TensorBoardSink(tracked(tmp_path)), Recorder()]) as tracker:
        tracker.distribution("B", names.REWARD, [1.0, 2.0, 2.0, math.nan, 5.0], 1000)
        tracker.distribution("B", names.REWARD, [], 2000)
        tracker.distribution("B", names.REWARD, [3.0], 3000)
    values = [(e.step, v) for e in events(tmp_path / "B") for v in e.summary.value]
    assert [(step, v.tag) for step, v in values] == [
        (1000, "Environment/Cumulative Reward_hist"),
        (3000, "Environment/Cumulative Reward_hist"),
    ]
    several, single = (v.histo for _, v in values)
    assert (several.min, several.max, several.num) == (1.0, 5.0, 4.0)
    assert (several.sum, several.sum_squares) == (10.0, 34.0)
    assert list(several.bucket) == [1.0, 2.0, 0.0, 1.0]
    assert list(several.bucket_limit) == [2.0, 3.0, 4.0, 5.0]
    assert sum(single.bucket) == single.num == 1.0


def test_event_files_of_an_earlier_run_are_deleted_with_a_warning_unless_it_goes_on(
    tmp_path: Path, caplog
):
    left = tmp_path / "B/events.out.tfevents.1.host"
    left.parent.mkdir()
    left.write_bytes(b"")
    (tmp_path / "B/checkpoint.pt").touch()
    sink = TensorBoardSink(tracked(tmp_path))
    sink.metrics("B", {"a": 1.0}, 5)
    sink.close()
    assert left.exists()
    sink = TensorBoardSink(tracked(tmp_path, keep_earlier=False))
    with caplog.at_level(logging.WARNING):
        sink.metrics("B", {"a": 1.0}, 5)
    sink.metrics("B", {"a": 1.0}, 6)
    sink.close()
    assert not left.exists()
    assert f"Deleting TensorBoard data {left} that was left over" in caplog.text
    assert (tmp_path / "B/checkpoint.pt").exists()
    assert [e.step for e in events(tmp_path / "B") if e.summary.value] == [5, 6]


def test_a_full_disk_costs_tensorboard_one_warning(tmp_path: Path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(tensorboard.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(tensorboard.os, "getpid", lambda: 7)
    monkeypatch.setattr(tensorboard.time, "time", lambda: 5.5)
    folder = tmp_path / "B"
    folder.mkdir()
    (folder / "events.out.tfevents.0000000005.here.7.0").symlink_to("/dev/full")
    with Tracker([TensorBoardSink(tracked(tmp_path))]) as tracker:
        for step in (1, 2):
            tracker.metrics("B", {"a": 1.0}, step)
    (warning,) = caplog.messages
    assert warning.startswith("TensorBoardSink failed (OSError: [Errno 28] No space left on device")
    assert capfd.readouterr() == ("", "")


def test_console_shows_the_settings_of_a_behavior_as_in_ml_agents():
    stream = io.StringIO()
    settings = {"trainer_type": "ppo", "network_settings": {"memory": {"size": 8}, "x": None}}
    Tracker([ConsoleSink(stream=stream)]).began("B", settings)
    assert stream.getvalue() == (
        "[INFO] Hyperparameters for behavior name B:\n"
        "\ttrainer_type:\tppo\n"
        "\tnetwork_settings:\n"
        "\t  memory:\n"
        "\t    size:\t8\n"
        "\t  x:\tNone\n"
    )


def test_what_only_some_sinks_take_does_not_trouble_the_others(caplog):
    class Fails(Recorder):
        def updated(self, *_: object):
            raise OSError("disk full")

        began = distribution = updated

    plain, fails = Recorder(), Fails()
    tracker = Tracker([plain, fails])
    tracker.began("B", {})
    tracker.updated("B", Update(step=1, update_s=0.0, n_episodes=0, recent_returns=()))
    tracker.distribution("B", names.REWARD, [1.0], 5)
    assert plain.seen == []
    assert tracker.failures == {"Fails": 3}
