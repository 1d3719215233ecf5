"""Demonstrations that people made, in place of recorded demonstrations."""

import json
from pathlib import Path

import pytest
from project import set_params

from pipeline.cli.demo import record
from pipeline.dag.stages.demos import record_named
from pipeline.errors import PipelineError

RECORDED = """\
    environment: collector
    policy: expert
    episodes: 48
    seed: 100
"""
GIVEN = "    file: data/people/food.demo\n"


@pytest.fixture
def given(project: Path) -> Path:
    """A copy of the project whose demonstrations are a file."""
    text = (project / "params.yaml").read_text()
    assert RECORDED in text
    set_params(project, text.replace(RECORDED, GIVEN))
    (project / "data/people").mkdir(parents=True)
    return project


def test_given_demo_file_is_copied_unchanged_and_its_metrics_are_written(given: Path):
    file = given / "data/people/food.demo"
    summary = record("collector", file, episodes=2, seed=1)
    record_named("collector_expert", given)
    assert (given / "data/demos/collector_expert.demo").read_bytes() == file.read_bytes()
    numbers = json.loads((given / "results/demos/collector_expert.json").read_text())
    assert numbers["episodes"] == 2
    assert f"mean return {numbers['mean_return']:.3f}" in summary
    assert numbers["min_return"] <= numbers["mean_return"] <= numbers["max_return"]


@pytest.mark.parametrize("content", [b"not a demonstration", None])
def test_missing_or_invalid_demo_file_is_refused_and_no_output_is_made(given, content):
    if content is not None:
        (given / "data/people/food.demo").write_bytes(content)
    with pytest.raises(PipelineError, match=r"data/people/food\.demo"):
        record_named("collector_expert", given)
    assert not (given / "data/demos/collector_expert.demo").exists()
