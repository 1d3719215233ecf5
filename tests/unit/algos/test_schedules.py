"""Schedules end where they should."""

import pytest

from pipeline.algos.schedules import scheduled


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 0, 0.2),
        ("constant", 500, 0.2),
        ("linear", 0, 0.2),
        ("linear", 50, 0.15),
        ("linear", 100, 0.1),
        ("linear", 250, 0.1),
    ],
)
def test_schedule_goes_from_start_to_floor(kind, step, expected):
    value = scheduled(kind, 0.2, 0.1, step=step, max_steps=100)
    assert value == pytest.approx(expected)
