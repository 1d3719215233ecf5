"""Demonstrations that people made: data like any other, in place of the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.commands.demo import record
from pipeline.errors import PipelineError
from pipeline.settings.params import load_params
from pipeline.settings.plan import write_plan
from pipeline.stages.demos import record_named

RECORDED = """\
    environment: balance_ball
    policy: expert
    episodes: 12
    seed: 100
"""
GIVEN = "    file: data/people/ball.demo\n"


@pytest.fixture
def given(project: Path) -> Path:
    """A copy of the project whose demonstrations are a file."""
    path = project / "params.yaml"
    assert RECORDED in path.read_text()
    path.write_text(path.read_text().replace(RECORDED, GIVEN))
    write_plan(load_params(path), project / "workflow/runs.yaml")
    (project / "data/people").mkdir(parents=True)
    return project


def test_a_file_is_taken_as_it_is_with_the_numbers_of_a_recording(given: Path):
    file = given / "data/people/ball.demo"
    said = record("balance_ball", file, episodes=2, seed=1)
    record_named("balance_ball_expert", given)
    assert (given / "data/demos/balance_ball_expert.demo").read_bytes() == file.read_bytes()
    numbers = json.loads((given / "results/demos/balance_ball_expert.json").read_text())
    assert numbers["episodes"] == 2
    assert f"mean return {numbers['mean_return']:.3f}" in said
    assert numbers["min_return"] <= numbers["mean_return"] <= numbers["max_return"]


def test_a_file_that_is_no_demonstration_is_refused_and_nothing_is_made(given: Path):
    (given / "data/people/ball.demo").write_bytes(b"not a demonstration")
    with pytest.raises(PipelineError, match=r"ball\.demo"):
        record_named("balance_ball_expert", given)
    assert not (given / "data/demos/balance_ball_expert.demo").exists()


def test_a_file_that_is_missing_is_told(given: Path):
    with pytest.raises(PipelineError, match=r"data/people/ball\.demo"):
        record_named("balance_ball_expert", given)
