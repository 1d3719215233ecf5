"""Values of schedules and of the adaptive learning rate."""

import pytest

from pipeline.algos.schedules import adapted_rate, scheduled


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
def test_scheduled_value_falls_linearly_to_the_floor_or_stays_constant(kind, step, expected):
    value = scheduled(kind, 0.2, 0.1, step=step, max_steps=100)
    assert value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (1e-3, 0.021, 1e-3 / 1.5),
        (1e-3, 0.02, 1e-3),
        (1e-3, 0.005, 1e-3),
        (1e-3, 0.004, 1.5e-3),
        (1.2e-5, 9.0, 1e-5),
        (9e-3, 0.0, 1e-2),
        (1e-3, float("nan"), 1e-3),
    ],
)
def test_adaptive_learning_rate_depends_on_the_kl_divergence_of_the_last_step(rate, kl, expected):
    assert adapted_rate(rate, kl, 0.01) == pytest.approx(expected)
