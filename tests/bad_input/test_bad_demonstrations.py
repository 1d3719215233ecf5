"""Demonstrations that cannot be read, or are of another behavior."""

from __future__ import annotations

import resource

import pytest
from command import CONFIG

from pipeline.protocol.demo_file import delimited_message
from pipeline.protocol.generated.messages import (
    AgentInfoActionPairProto,
    BrainParametersProto,
    DemonstrationMetaProto,
)

CLONING = "    behavioral_cloning: {demo_path: bad.demo, steps: 100}\n"


@pytest.mark.parametrize("content", [None, b"", b"not a demonstration", b"\xff" * 100])
def test_a_file_that_is_no_demonstration(place, content):
    if content is not None:
        (place.folder / "bad.demo").write_bytes(content)
    before = place.files()
    assert "bad.demo" in place.pipeline("demo", "info", "bad.demo").error
    assert place.files() == before


def test_a_short_demonstration_of_a_very_large_branch(place):
    brain = BrainParametersProto(brain_name="Echo")
    brain.action_spec.num_discrete_actions = 1
    brain.action_spec.discrete_branch_sizes.append(60_000)
    pair = AgentInfoActionPairProto()
    pair.agent_info.observations.add(shape=[1]).float_data.data.append(1.0)
    meta = DemonstrationMetaProto(api_version=1, number_steps=20_000)
    parts = [delimited_message(one) for one in [brain, *[pair] * 20_000]]
    (place.folder / "bad.demo").write_bytes(
        delimited_message(meta).ljust(33, b"\0") + b"".join(parts)
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    done = place.pipeline("demo", "info", "bad.demo", before=limit)
    assert "bad.demo: a recording of 20000 steps would take 1,2" in done.error


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("other", "bad.demo: its actions are"),
        ("truncated", "bad.demo"),
        ("missing", "behaviors.Echo.behavioral_cloning.demo_path: bad.demo is not there; "),
    ],
)
def test_a_demonstration_that_cannot_be_imitated(place, other_demo, kind, expected):
    config = place.config(CONFIG + CLONING)
    content = other_demo.read_bytes()
    if kind != "missing":
        whole = kind == "other"
        (place.folder / "bad.demo").write_bytes(content if whole else content[:-7])
    env = place.fake()
    before = place.files()
    assert expected in place.learn(env, config=config).error
    assert place.files() == before
