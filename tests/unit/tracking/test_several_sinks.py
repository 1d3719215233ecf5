"""Several sinks, writers or behaviors at once: each gets all of its own events."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.errors import SettingsError
from pipeline.settings import RunSettings
from pipeline.tracking import names, progress, sinks
from pipeline.tracking.base import Sink, Tracker, Update
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.sinks import TrackedRun, standard_sinks, stats_writers
from pipeline.tracking.sinks.tensorboard import TensorBoardSink

CALLS = (
    *("on_start", "on_samples", "on_summary", "on_distribution", "on_update", "on_checkpoint"),
    *("on_end", "on_failure"),
)


def noting(*, fails: bool = False) -> Sink:
    """Return a sink that records each call; with `fails` every call raises an error."""

    def call_of(name: str):
        def call(self, *values: object) -> None:
            self.calls.append((name, *values))
            if fails:
                raise OSError(f"{name} is full")

        return call

    kind = type(
        "Fails" if fails else "Good", (Sink,), {name: call_of(name) for name in (*CALLS, "close")}
    )
    sink = kind()
    sink.calls = []
    return sink


def test_every_sink_receives_all_events_in_order_even_after_two_failing_sinks(caplog):
    broken, good, other, last = noting(fails=True), noting(), noting(fails=True), noting()
    type(other).__name__ = "Other"
    error = ValueError("no")
    update = Update(step=1, update_s=0.0, n_episodes=0, recent_returns=())
    samples = {"Goals": (StatsAggregationMethod.SUM, [1.0])}
    with (
        caplog.at_level(logging.WARNING),
        contextlib.suppress(ValueError),
        Tracker([broken, good, other, last]) as tracker,
    ):
        tracker.tell("on_start", "A", {"x": 1})
        tracker.tell("on_samples", "A", samples)
        tracker.on_summary("A", {"a": 1.0, "b": float("nan")}, 5)
        tracker.on_distribution("A", "a", [1.0, float("inf"), 3.0], 5)
        tracker.tell("on_update", "A", update)
        tracker.tell("on_checkpoint", "A", Path("c.pt"), 6)
        tracker.tell("on_end", "result")
        raise error
    expected = [
        ("on_start", "A", {"x": 1}),
        ("on_samples", "A", samples),
        ("on_summary", "A", {"a": 1.0}, 5),
        ("on_distribution", "A", "a", [1.0, 3.0], 5),
        ("on_update", "A", update),
        ("on_checkpoint", "A", Path("c.pt"), 6),
        ("on_end", "result"),
        ("on_failure", error),
        ("close",),
    ]
    for sink in (broken, good, other, last):
        assert sink.calls == expected
    assert tracker.failures == {"Fails": 9, "Other": 9}
    told = [message.split(")")[0] for message in caplog.messages]
    assert told == [f"{name} failed (OSError: on_start is full" for name in ("Fails", "Other")]


class Writer:
    """A statistics writer that records each call; with `fails` every call raises an error."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.told = fails, []

    def _note(self, *call: object) -> None:
        self.told.append(call)
        if self.fails:
            raise OSError("full")

    def add_property(self, category, kind, value):
        self._note(category, kind.name, value)

    def on_add_stat(self, category, key, value, method):
        self._note(category, key, value, method.name)

    def write_stats(self, category, values, step):
        self._note(category, {key: summary.full_dist for key, summary in values.items()}, step)


def test_stats_writers_listed_after_a_failing_writer_receive_the_same_calls():
    whole, writers = [Writer()], [Writer(fails=True), Writer(), Writer(fails=True), Writer()]
    for several in (whole, writers):
        with Tracker([stats_writers.StatsWriterSink(several)]) as tracker:
            tracker.tell("on_start", "A", {"self_play": {}, "x": 1})
            tracker.tell("on_start", "B", {"self_play": None})
            tracker.tell("on_samples", "A", {"Goals": (StatsAggregationMethod.SUM, [1.0, 2.0])})
            values = {"Goals": 3.0, names.LESSON_NUMBER + "mass": 2.0, "Time/x": 1.0}
            tracker.on_summary("A", values, 7)
    told = [
        ("A", "HYPERPARAMETERS", {"self_play": {}, "x": 1}),
        ("A", "SELF_PLAY", True),
        ("B", "HYPERPARAMETERS", {"self_play": None}),
        ("A", "Step", 7.0, "MOST_RECENT"),
        ("A", "Goals", 1.0, "SUM"),
        ("A", "Goals", 2.0, "SUM"),
        ("A", names.LESSON_NUMBER + "mass", 2.0, "MOST_RECENT"),
        ("A", {"Step": [7.0], "Goals": [1.0, 2.0], names.LESSON_NUMBER + "mass": [2.0]}, 7),
    ]
    assert whole[0].told == told
    # A failing call ends the current report of that behavior, but no other report.
    for writer in writers:
        assert writer.told == [told[0], told[2], told[3]]
    with pytest.raises(RuntimeError, match=r"^Writer: OSError: full; Writer: OSError: full$"):
        stats_writers.StatsWriterSink(writers).on_summary("A", {}, 7)


def test_stats_writers_get_the_samples_of_the_behavior_that_is_summarised():
    told = []

    class Short:
        def on_add_stat(self, category, key, value, _aggregation):
            told.append((category, key, value))

        def write_stats(self, category, values, step):
            told.append((category, step, values["Goals"].aggregated_value))

    sink = stats_writers.StatsWriterSink([Short()])
    for behavior, values in (("A", [1.0, 2.0]), ("B", [10.0])):
        sink.on_samples(behavior, {"Goals": (StatsAggregationMethod.SUM, values)})
    for behavior, step in (("A", 30), ("B", 20)):
        sink.on_summary(behavior, {"Goals": 0.0}, step)
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
    sink.on_summary("A", {"Goals": 7.0}, 40)  # a summary without samples has none of the one before
    assert told == [("A", "Step", 40.0), ("A", "Goals", 7.0), ("A", 40, 7.0)]


def test_stats_writers_of_all_packages_are_used_except_writers_that_cannot_be_created(
    tmp_path, monkeypatch, caplog
):
    made, seen = [Writer() for _ in range(3)], []

    def fails(_):
        raise ValueError("no licence")

    def point(name, function, package="p"):
        dist = SimpleNamespace(name=package, version="1")
        return SimpleNamespace(name=name, load=lambda: function, dist=dist)

    points = [
        point("default", fails, "mlagents"),
        point("a", fails),
        point("b", lambda options: seen.append(options) or made[:2]),
        point("c", lambda options: seen.append(options) or made[2:]),
    ]
    monkeypatch.setattr(stats_writers, "all_of", lambda _: points)
    run = TrackedRun(folder=tmp_path, max_steps={}, settings=RunSettings(debug=True))
    sink = stats_writers.for_run(run)
    assert list(sink._writers) == made
    assert seen[0].checkpoint_settings.write_path == str(tmp_path)
    assert seen[1].checkpoint_settings.run_logs_dir == str(tmp_path / "run_logs")
    assert seen[1].checkpoint_settings.run_id == "ppo"
    assert seen[0].debug is seen[0].as_dict()["debug"] is True
    assert ["'a' of p 1" in message for message in caplog.messages] == [True]
    monkeypatch.setattr(stats_writers, "all_of", lambda _: points[:2])
    assert stats_writers.for_run(run) is None, "the only writer cannot be made"


def test_each_behavior_has_its_own_progress_bar_speed_and_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    told = []
    monkeypatch.setattr(progress, "tell", lambda **facts: told.append(tuple(facts.values())))
    # Read at the start, and once for each summary.
    clock = iter((0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0)).__next__
    stream = Terminal()
    sink = ConsoleSink(stream=stream, clock=clock)
    for behavior, max_steps in (("A", 1000), ("B", 90), ("C", 50)):
        sink.on_start(behavior, {"max_steps": max_steps})
    for behavior, step, reward, trains in (
        ("A", 100, 1.0, 1.0),
        ("C", 7, 5.0, 0.0),  # only plays
        ("A", 400, 3.0, 1.0),
        ("B", 10, 2.0, 1.0),
        ("B", 40, 4.0, 1.0),
        ("A", 430, 5.0, 1.0),
        ("A", 440, 6.0, 0.0),  # past its last step
    ):
        sink.on_summary(behavior, {names.REWARD: reward, names.IS_TRAINING: trains}, step)
    assert told == [
        (100, 1000, 1.0, None),
        (7, None, 5.0, None),
        (400, 1000, 3.0, 15.0),
        (10, 90, 2.0, None),
        (40, 90, 4.0, 3.0),
        (430, 1000, 5.0, 8.0),
        (440, 1000, 6.0, 4.5),
    ]
    bars = {
        task.description: (task.total, task.completed, task.fields["note"])
        for task in sink._progress.tasks
    }
    # The rate of A was 15 steps/s, then twice averaged with 1 step/s.
    assert bars == {
        "A": (1000, 440, "reward 6.000  (4 steps/s, 2:04 left)"),
        "C": (None, 7, "reward 5.000  "),
        "B": (90, 40, "reward 4.000  (3 steps/s, 0:17 left)"),
    }
    sink.close()
    sink.close()
    assert "440 steps" in stream.getvalue()
    assert "reward 6.000" in stream.getvalue()


@pytest.mark.parametrize("goes_on", [False, True])
def test_each_behavior_has_its_own_event_files_and_a_new_run_deletes_old_files(
    goes_on, tmp_path, caplog
):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    old = [tmp_path / f"{name}/events.out.tfevents.{n}.here" for name in "AB" for n in (1, 2)]
    for path in old:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "A/checkpoint.pt").touch()
    sink = TensorBoardSink(TrackedRun(folder=tmp_path, max_steps={}, keep_earlier=goes_on))
    for behavior, step in (("A", 1), ("B", 2), ("A", 3), ("B", 4)):
        sink.on_start(behavior, {"step": step})
        sink.on_summary(behavior, {"a": step}, step)
    sink.close()
    assert {path.exists() for path in old} == {goes_on}
    assert (f"Deleting TensorBoard data {old[0]} that was left over" in caplog.text) != goes_on
    (tmp_path / "A/checkpoint.pt").unlink()
    for behavior, steps in (("A", [0, 1, 0, 3]), ("B", [0, 2, 0, 4])):
        (path,) = set((tmp_path / behavior).iterdir()) - set(old)
        events = LegacyEventFileLoader(str(path)).Load()
        assert [event.step for event in events if event.summary.value] == steps


def test_sinks_of_installed_packages_are_used_even_if_another_sink_cannot_be_loaded(
    tmp_path, monkeypatch, caplog
):
    asked = []

    class Known:
        ours = ("stats_writers", "tensorboard", "mlflow", "jsonl")

        def __iter__(self):
            return iter((*self.ours, "broken", "good"))

    def named(_run, chosen):
        asked.append(list(chosen))
        if "broken" in chosen:
            raise SettingsError("no such module")
        return list(chosen)

    monkeypatch.setattr(sinks, "SINKS", Known())
    monkeypatch.setattr(sinks, "named_sinks", named)
    run = TrackedRun(folder=tmp_path, max_steps={}, debug_folder=tmp_path / "debug")
    console, curve, updates, *others = standard_sinks(run)
    assert others == ["stats_writers", "tensorboard", "good"]
    assert asked[1:] == [["broken"], ["good"]]
    assert "The sink broken is not used in this run: no such module" in caplog.text
    assert (curve.path, updates._folder) == (tmp_path / "progress.csv", tmp_path / "debug")
    staged = TrackedRun(folder=tmp_path, max_steps={}, record=console)
    assert standard_sinks(staged)[2:] == ["stats_writers", "tensorboard", "mlflow", "good"]
