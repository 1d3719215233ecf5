"""A curriculum on a real executable: console, charts and environment agree on the lessons."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

import pipeline
from pipeline.tracking.sinks import TrackedRun
from pipeline.tracking.sinks.tensorboard import TensorBoardSink

BALL = "3DBall"
REWARD = {"behavior": BALL, "threshold": 0.5, "min_lesson_length": 30}
PROGRESS = {"behavior": BALL, "measure": "progress", "threshold": 0.6, "require_reset": True}
CHANGES = {
    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
    "max_steps": 6000,
    "time_horizon": 64,
    "summary_freq": 500,
    "parameters": {
        "gravity": {
            "curriculum": [
                {"name": "moon", "completion_criteria": REWARD, "value": 1.625},
                {"name": "earth", "completion_criteria": PROGRESS, "value": 9.8125},
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
def test_lessons_advance_in_console_charts_and_environment(
    quick, packed, tmp_path, caplog, recorder
):
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        pipeline.train(
            packed("balance_ball", tmp_path / "balance_ball"),
            quick(BALL, **CHANGES),
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
    charted = recorder.values("Environment/Lesson Number/gravity")
    assert charted == sorted(charted)
    assert set(charted) == {0.0, 1.0, 2.0}
    assert scalars(run_dir / BALL, "Environment/Lesson Number/gravity") == charted
    read = recorder.spreads["Environment/Parameter/gravity"]
    assert len(read) == len(charted) >= 10
    # in the period up to each summary, both executables read the value of the summary's lesson,
    # and that of the lesson before if a lesson began in the period
    for values, (before, now) in zip(read, pairwise([0.0, *charted]), strict=True):
        assert set(values) <= {VALUES[int(before)], VALUES[int(now)]}
    assert set(read[0]) == {VALUES[0]}
    assert set(read[-1]) == {VALUES[2]}
    masses = [m for values in recorder.spreads["Environment/Parameter/mass"] for m in values]
    assert 0.5 <= min(masses) < 0.6 < 1.9 < max(masses) <= 2.0
