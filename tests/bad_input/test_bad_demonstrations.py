"""Demonstrations that cannot be read, or are of another behavior."""

from __future__ import annotations

import pytest
from command import CONFIG

CLONING = "    behavioral_cloning: {demo_path: bad.demo, steps: 100}\n"


def test_a_truncated_demonstration(place, other_demo):
    (place.folder / "bad.demo").write_bytes(other_demo.read_bytes()[:-7])
    before = place.files()
    error = place.pipeline("demo", "info", "bad.demo").error
    assert "bad.demo" in error
    assert place.files() == before


@pytest.mark.parametrize("content", [b"", b"not a demonstration", b"\xff" * 100])
def test_a_file_that_is_no_demonstration(place, content):
    (place.folder / "bad.demo").write_bytes(content)
    before = place.files()
    assert "bad.demo" in place.pipeline("demo", "info", "bad.demo").error
    assert place.files() == before


def test_a_demonstration_that_is_not_there(place):
    assert "no.demo" in place.pipeline("demo", "info", "no.demo").error


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("other", "bad.demo: its actions are"),
        ("truncated", "bad.demo"),
        ("missing", "bad.demo: this demonstration file or directory does not exist"),
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
