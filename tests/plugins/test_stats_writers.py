"""Statistics writers of ML-Agents' plug-ins receive the calls of `mlagents-learn`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from example_plugin_site import distribution

import pipeline
from pipeline.settings import load_run_settings
from pipeline.tracking.sinks import TrackedRun, standard_sinks
from pipeline.tracking.sinks.stats_writers import StatsWriterSink, for_run

WRITER = Path(__file__).resolve().parents[1] / "support/recording_writer.py"
MODULES = Path(__file__).resolve().parents[2] / "packages/mlagents_envs"
GROUP = "mlagents.stats_writer"
RUN = {
    "default_settings": {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 64, "buffer_size": 256, "num_epoch": 1},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "reward_signals": {"extrinsic": {}, "rnd": {"network_settings": {"hidden_units": 8}}},
        "max_steps": 2000,
        "summary_freq": 1000,
    },
    "environment_parameters": {"mass": {"curriculum": [{"name": "one", "value": 1.0}]}},
}
MEAN, LATEST, ALL = "AVERAGE", "MOST_RECENT", "HISTOGRAM"
# Statistics of such a run by mlagents-learn 1.1.0; benchmarks/stats_writers.py compares both.
THEIRS = {
    "Environment/Cumulative Reward": ALL,
    "Environment/Episode Length": MEAN,
    "Environment/Lesson Number/mass": LATEST,
    "Environment/Parameter/mass": ALL,
    "Is Training": MEAN,
    "Losses/Policy Loss": MEAN,
    "Losses/RND Loss": MEAN,
    "Losses/Value Loss": MEAN,
    "Policy/Beta": MEAN,
    "Policy/Entropy": MEAN,
    "Policy/Epsilon": MEAN,
    "Policy/Extrinsic Reward": MEAN,
    "Policy/Extrinsic Value Estimate": MEAN,
    "Policy/Learning Rate": MEAN,
    "Policy/Rnd Reward": MEAN,
    "Policy/Rnd Value Estimate": MEAN,
    "Step": LATEST,
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder for installed packages; modules with ML-Agents' names are unloaded afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(WRITER, folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(MODULES))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mlagents", "mlagents_envs", "recording_writer", "writers"):
            del sys.modules[name]


def tracked(folder: Path) -> TrackedRun:
    settings = load_run_settings(None, overrides=RUN)
    folder.mkdir()
    return TrackedRun(folder=folder, max_steps={}, settings=settings)


def calls(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def sink(tmp_path: Path, site: Path) -> StatsWriterSink:
    """Return a sink with a writer that records its calls in the folder `run`."""
    distribution(site, "recorder", "1.0", groups={GROUP: {"r": "recording_writer:get_writers"}})
    sinks = standard_sinks(tracked(tmp_path / "run"))
    (writer_sink,) = (candidate for candidate in sinks if isinstance(candidate, StatsWriterSink))
    return writer_sink


def test_a_writer_gets_the_calls_that_ml_agents_makes(tmp_path: Path, sink: StatsWriterSink):
    result = pipeline.train("balance_ball", RUN, seed=1, run_dir=tmp_path / "run", sinks=[sink])
    curves = result.curves["3DBall"]
    first, *rest = calls(tmp_path / "run")
    assert (first["call"], first["type"], first["known"]) == (
        "add_property",
        "HYPERPARAMETERS",
        True,
    )
    assert {"trainer_type", "hyperparameters", "reward_signals", "summary_freq"} <= set(
        first["value"]
    )
    assert [(call["call"], call["category"], call["step"]) for call in rest] == [
        ("write_stats", "3DBall", 1000),
        ("write_stats", "3DBall", 2000),
    ]
    for call in rest:
        assert {key: entry[0] for key, entry in call["values"].items()} == THEIRS
        assert call["added"] == {key: entry[1] for key, entry in call["values"].items()}
        _, n, mean, std, total, charted, length = call["values"]["Environment/Episode Length"]
        assert n == length > 5
        assert total == pytest.approx(n * mean)
        assert charted == mean
        assert std > 0
        returns = call["values"]["Environment/Cumulative Reward"]
        assert returns[1] == n
        assert call["values"]["Step"][2] == call["step"]
        for key, entry in call["values"].items():  # other sinks have the same numbers
            if key != "Step":
                assert entry[5] == pytest.approx(dict(curves[key])[call["step"]], rel=1e-6), key


def test_stats_writers_are_notified_of_self_play_and_get_sums_with_the_aggregation_method_sum(
    tmp_path: Path, sink: StatsWriterSink
):
    sink.on_start("Pong", {"self_play": {"window": 3}})
    last = calls(tmp_path / "run")[-1]
    assert (last["type"], last["known"], last["value"]) == ("SELF_PLAY", True, True)
    sink.on_samples("B", {"Goals": (pipeline.StatsAggregationMethod.SUM, [1.0, 2.0])})
    sink.on_summary("B", {"Goals": 3.0, "Time/update": 4.0}, 10)
    values = calls(tmp_path / "run")[-1]["values"]
    assert values["Goals"] == ["SUM", 2, 1.5, 0.5, 3.0, 3.0, 2]
    assert set(values) == {"Step", "Goals"}


WRITERS = """\
from mlagents.trainers.stats import StatsWriter

class Good(StatsWriter):
    def write_stats(self, category, values, step):
        with open({path!r}, "a") as lines:
            lines.write(f"{{step}}\\n")

class Broken(Good):
    def write_stats(self, category, values, step):
        raise OSError("full")

def good(run_options):
    return [Good()]

def broken(run_options):
    return [Broken()]

def failing(run_options):
    raise ValueError(run_options.checkpoint_settings.run_id)
"""


def test_a_failing_stats_writer_is_named_and_the_other_writers_continue(tmp_path, site, caplog):
    path = tmp_path / "steps"
    (site / "writers.py").write_text(WRITERS.format(path=str(path)))
    points = {name: f"writers:{name}" for name in ("broken", "failing", "good")}
    distribution(site, "several", "1.2", groups={GROUP: points})
    # ML-Agents' own writers, if it is installed too.
    distribution(site, "mlagents", "1.1.0", groups={GROUP: {"default": "nowhere:at_all"}})
    from pipeline.tracking.base import Tracker

    sink = for_run(tracked(tmp_path / "run"))
    assert sink is not None
    with Tracker([sink]) as tracker:
        tracker.on_summary("B", {}, 7)
        tracker.on_summary("B", {}, 8)
    assert path.read_text() == "7\n8\n"
    assert "'failing' of several 1.2 is not used in this run (ValueError: ppo)" in caplog.text
    assert "Broken: OSError: full" in caplog.text
    assert "default" not in caplog.text


def test_warning_about_a_writer_that_imports_missing_mlagents_modules_says_how_to_install_them(
    tmp_path, site, caplog, monkeypatch
):
    assert for_run(TrackedRun(folder=tmp_path, max_steps={})) is None, "there is no writer"
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(MODULES)])
    distribution(site, "recorder", "1.0", groups={GROUP: {"r": "recording_writer:get_writers"}})
    assert for_run(tracked(tmp_path / "run")) is None
    assert "`pip install ./packages/mlagents_envs` installs that module" in caplog.text
