"""A curriculum on a real executable: console, charts and environment agree on the lessons."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

import pipeline
from pipeline.settings import load_run_settings
from pipeline.tracking.base import Sink
from pipeline.tracking.sinks.tensorboard import TensorBoardSink
from pipeline.tracking.tracked_run import TrackedRun

BALL = "3DBall"
SETTINGS = {
    "behaviors": {
        BALL: {
            "trainer_type": "ppo",
            "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
            "network_settings": {"hidden_units": 8, "num_layers": 1},
            "max_steps": 6000,
            "time_horizon": 64,
            "summary_freq": 500,
        }
    },
    "environment_parameters": {
        "gravity": {
            "curriculum": [
                {
                    "name": "moon",
                    "completion_criteria": {
                        "behavior": BALL,
                        "threshold": 0.5,
                        "min_lesson_length": 30,
                    },
                    "value": 1.625,
                },
                {
                    "name": "earth",
                    "completion_criteria": {
                        "behavior": BALL,
                        "measure": "progress",
                        "threshold": 0.6,
                        "require_reset": True,
                    },
                    "value": 9.8125,
                },
                {"name": "jupiter", "value": 24.75},
            ]
        },
        "mass": {
            "sampler_type": "uniform",
            "sampler_parameters": {"min_value": 0.5, "max_value": 2.0},
        },
    },
}
VALUES = [1.625, 9.8125, 24.75]


class Recorder(Sink):
    """Keeps the metrics but the timings, and the distributions."""

    def __init__(self) -> None:
        self.rows, self.spreads = [], []

    def metrics(self, _, values, step):
        kept = {tag: value for tag, value in values.items() if not tag.startswith("Time/")}
        self.rows.append((step, kept))

    def distribution(self, _, tag, values, step):
        if not self.spreads or self.spreads[-1][0] != step:
            self.spreads.append((step, {}))
        self.spreads[-1][1][tag] = list(values)


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        value.simple_value
        for path in folder.glob("events.out.tfevents.*")
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == tag
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_lessons_advance_in_console_charts_and_environment(packed, tmp_path, caplog):
    recorder, run_dir = Recorder(), tmp_path / "run"
    with caplog.at_level(logging.INFO):
        pipeline.train(
            packed("balance_ball", tmp_path / "balance_ball"),
            load_run_settings(None, overrides=SETTINGS),
            seed=1,
            run_dir=run_dir,
            num_envs=2,
            sinks=[recorder, TensorBoardSink(TrackedRun(folder=run_dir, max_steps={}))],
        )
    lines = [r.getMessage() for r in caplog.records if "Parameter 'gravity'" in r.getMessage()]
    assert lines == [
        f"Parameter 'gravity' is in lesson '{name}' and has value 'Float: value={value}'."
        for name, value in zip(("moon", "earth", "jupiter"), VALUES, strict=True)
    ]
    charted = [row["Environment/Lesson Number/gravity"] for _, row in recorder.rows]
    assert charted == sorted(charted)
    assert set(charted) == {0.0, 1.0, 2.0}
    assert scalars(run_dir / BALL, "Environment/Lesson Number/gravity") == charted
    read = [spread["Environment/Parameter/gravity"] for _, spread in recorder.spreads]
    assert len(read) == len(charted) >= 10
    # what the two executables read in the period up to each summary is what the lessons say: that
    # of the summary, and where a lesson began in the period, the one before
    for values, (before, now) in zip(read, pairwise([0.0, *charted]), strict=True):
        assert set(values) <= {VALUES[int(before)], VALUES[int(now)]}
    assert set(read[0]) == {VALUES[0]}
    assert set(read[-1]) == {VALUES[2]}
    masses = [m for _, spread in recorder.spreads for m in spread["Environment/Parameter/mass"]]
    assert 0.5 <= min(masses) < 0.6 < 1.9 < max(masses) <= 2.0
