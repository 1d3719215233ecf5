from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import SettingsError
from pipeline.tracking import names
from pipeline.tracking.base import Tracker
from pipeline.tracking.console import ConsoleSink, duration, summary_line
from pipeline.tracking.curve_csv import CsvSink
from pipeline.tracking.sinks import TrackedRun, named_sinks, standard_sinks, tensorboard
from pipeline.tracking.sinks.tensorboard import TensorBoardSink


def tracked(folder: Path, **more) -> TrackedRun:
    return TrackedRun(folder=folder, max_steps={}, **more)


def kinds(sinks) -> set[str]:
    return {type(sink).__name__ for sink in sinks}


def test_console_csv_and_tensorboard_are_default_sinks_and_other_sinks_are_chosen_by_name(
    tmp_path: Path,
):
    run = TrackedRun(folder=tmp_path, max_steps={"B": 10})
    always = {"ConsoleSink", "CsvSink"}
    assert kinds(standard_sinks(run)) == {*always, "TensorBoardSink"}
    assert kinds(standard_sinks(run, ())) == always
    assert kinds(standard_sinks(run, ["jsonl"])) == {*always, "JsonLinesSink"}
    debugged = standard_sinks(replace(run, debug_folder=tmp_path), ())
    assert kinds(debugged) == {*always, "UpdatesCsvSink"}


def test_error_for_an_unknown_sink_or_a_sink_without_its_package_names_the_remedy(
    tmp_path: Path, monkeypatch
):
    with pytest.raises(SettingsError, match=r"'jsonel' is not allowed; did you mean 'jsonl'\?"):
        named_sinks(tracked(tmp_path), ["jsonel"])
    monkeypatch.setattr("pipeline.settings.project.experiments.find_spec", lambda _: None)
    with pytest.raises(SettingsError) as caught:
        named_sinks(tracked(tmp_path), ["jsonl", "wandb"])
    assert str(caught.value) == (
        "pipeline.train: sinks: the package 'wandb' is not installed; "
        "pip install 'rl-pipeline[wandb]', or leave wandb out"
    )


def test_a_named_sink_that_cannot_open_is_left_out_with_a_warning(tmp_path: Path, caplog):
    # The sink needs the key of the run, which is missing here.
    sinks = named_sinks(tracked(tmp_path), ["mlflow", "jsonl"])
    assert kinds(sinks) == {"JsonLinesSink"}
    assert "The sink mlflow is not used in this run: a run of MLflow needs" in caplog.text


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
def test_summary_line_equals_the_line_of_ml_agents(values, line):
    start = "3DBall. Step: 12000. Time Elapsed: 3.142 s. "
    assert summary_line("3DBall", values, 12000, elapsed_s=3.14159) == start + line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (3675.2, "1:01:15")])
def test_durations_are_shown_as_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text


def summary(reward: float, **more: float) -> dict[str, float]:
    values = {names.REWARD: reward, names.LEARNING_RATE: 3e-4, names.IS_TRAINING: 1.0}
    return values | {"Time/update": time.perf_counter()} | more


def test_csv_has_the_standard_columns_and_adds_a_column_for_a_new_tag(tmp_path: Path):
    sink = CsvSink(tmp_path / "progress.csv")
    sink.on_summary("B", summary(1.5), 10)
    sink.on_summary("B", {"Losses/GAIL Loss": 0.25}, 20)
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


def test_tensorboard_writes_scalars_and_settings_in_a_folder_per_behavior(tmp_path: Path):
    sink = TensorBoardSink(tracked(tmp_path))
    sink.on_start("B", {"batch_size": 64})
    sink.on_summary("B", summary(1.5, **{names.REWARD_STD: 0.1}), 1000)
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


def test_tensorboard_writes_a_histogram_of_the_finite_returns(tmp_path: Path):
    with Tracker([TensorBoardSink(tracked(tmp_path))]) as tracker:
        tracker.on_distribution("B", names.REWARD, [1.0, 2.0, 2.0, math.nan, 5.0], 1000)
        tracker.on_distribution("B", names.REWARD, [], 2000)
        tracker.on_distribution("B", names.REWARD, [3.0], 3000)
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


def test_a_full_disk_causes_one_warning_of_the_tensorboard_sink(
    tmp_path: Path, caplog, capfd, monkeypatch
):
    monkeypatch.setattr(tensorboard.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(tensorboard.os, "getpid", lambda: 7)
    monkeypatch.setattr(tensorboard.time, "time", lambda: 5.5)
    folder = tmp_path / "B"
    folder.mkdir()
    (folder / "events.out.tfevents.0000000005.here.7.0").symlink_to("/dev/full")
    with Tracker([TensorBoardSink(tracked(tmp_path))]) as tracker:
        for step in (1, 2):
            tracker.on_summary("B", {"a": 1.0}, step)
    (warning,) = caplog.messages
    assert warning.startswith("TensorBoardSink failed (OSError: [Errno 28] No space left on device")
    assert capfd.readouterr() == ("", "")


def test_console_prints_the_settings_of_a_behavior_in_the_format_of_ml_agents():
    stream = io.StringIO()
    settings = {"trainer_type": "ppo", "network_settings": {"memory": {"size": 8}, "x": None}}
    Tracker([ConsoleSink(stream=stream)]).tell("on_start", "B", settings)
    assert stream.getvalue() == (
        "[INFO] Hyperparameters for behavior name B:\n"
        "\ttrainer_type:\tppo\n"
        "\tnetwork_settings:\n"
        "\t  memory:\n"
        "\t    size:\t8\n"
        "\t  x:\tNone\n"
    )


def test_a_resumed_behavior_deletes_only_its_own_later_summaries(tmp_path):
    """An incomplete row of a killed run is removed from the CSV file and the JSON lines."""
    run, rows = tracked(tmp_path), {}

    def play(folder, *steps) -> None:
        sinks = [CsvSink(folder / "progress.csv"), *named_sinks(tracked(folder), ["jsonl"])]
        for behavior, step in steps:
            for sink in sinks:
                sink.on_summary(behavior, summary(step / 10), step)

    before = (("A", 10), ("B", 15), ("A", 20), ("B", 30))
    after = (("B", 30), ("A", 20), ("A", 30))
    for name in ("whole", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "whole":
            play(folder, ("A", 10), ("B", 15), *after)
        else:
            play(folder, *before)
            for file, half in (("progress.csv", "B,35,0.1"), ("metrics.jsonl", '{"behavior": "A"')):
                with (folder / file).open("a") as written:
                    written.write(half)
            play(folder, *after)
        text = (folder / "metrics.jsonl").read_text()
        assert names.IS_TRAINING not in text
        read = [json.loads(line) for line in text.splitlines()]
        values = [(row["behavior"], row["step"], row[names.REWARD]) for row in read]
        rows[name] = sorted(values), sorted((folder / "progress.csv").read_text().splitlines())
    assert rows["whole"] == rows["resumed"]
    assert [step for _, step, _ in rows["whole"][0]] == [10, 20, 30, 15, 30]
    for _ in range(2):  # new runs, once for all behaviors
        (sink,) = named_sinks(replace(run, keep_earlier=False), ["jsonl"])
        for behavior in "AB":
            sink.on_summary(behavior, {}, 5)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_lines_of_the_console_show_elapsed_time_speed_and_time_left():
    clock = iter((0.0, 10.0, 20.0, 50.0, 60.0)).__next__  # read twice for each summary
    sink = ConsoleSink(stream=io.StringIO(), clock=clock)
    sink.on_start("A", {"max_steps": 1000})
    for step in (100, 500):
        sink.on_summary("A", {}, step)
    *_, first, second = sink._stream.getvalue().splitlines()
    assert first.startswith("[INFO] A. Step: 100. Time Elapsed: 20.000 s.")
    assert "steps/s" not in first
    assert second.endswith("(10 steps/s, 0:50 left)")
