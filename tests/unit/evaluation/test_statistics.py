from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.evaluation.statistics import summarize, t_cdf, t_quantile


# Table of Student's t, two-sided 95 % and one-sided 99 %.
@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.3026527),
        (0.975, 3, 3.1824463),
        (0.975, 4, 2.7764451),
        (0.975, 9, 2.2621572),
        (0.975, 30, 2.0422725),
        (0.975, 100, 1.9839715),
        (0.99, 5, 3.3649300),
        (0.75, 1, 1.0),
        (0.5, 7, 0.0),
        (0.025, 4, -2.7764451),
        (0.975, 1000, 1.9623391),
        (0.975, 10**6, 1.9599664),
    ],
)
def test_t_quantiles_are_those_of_the_table(probability, degrees, expected):
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-6)


def test_t_quantile_has_no_step_where_the_method_changes():
    assert t_quantile(0.975, 1000) - t_quantile(0.975, 1001) == pytest.approx(2.37e-6, rel=0.02)


def test_t_distribution_with_one_and_two_degrees_is_the_closed_form():
    for t in (-3.0, -0.2, 0.0, 0.7, 5.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_quantile_out_of_range_is_refused(probability, degrees):
    with pytest.raises(ValueError, match="out of range"):
        t_quantile(probability, degrees)


def test_summary_of_a_hand_worked_sample():
    # mean 5, squared deviations 9+1+1+9 = 20, std √(20/3); t(0.975, 3) = 3.18245.
    summary = summarize([2.0, 4.0, 6.0, 8.0])
    assert (summary.n, summary.mean, summary.median) == (4, 5.0, 5.0)
    assert (summary.minimum, summary.maximum) == (2.0, 8.0)
    assert summary.std == pytest.approx(2.581989)
    half = 3.1824463 * 2.581989 / 2
    assert (summary.ci_low, summary.ci_high) == (
        pytest.approx(5 - half, abs=1e-5),
        pytest.approx(5 + half, abs=1e-5),
    )


def test_one_value_has_no_spread_and_is_json():
    summary = summarize([3.0])
    assert (summary.mean, summary.std, summary.ci_low, summary.ci_high) == (3.0, None, None, None)
    assert json.loads(json.dumps(summary.as_dict(), allow_nan=False))["n"] == 1


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_cannot_be_summarised_are_refused(values):
    with pytest.raises(ValueError, match="a summary needs"):
        summarize(values)


def test_interval_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    intervals = [summarize(rng.normal(1.0, 2.0, 5)) for _ in range(2000)]
    covered = np.mean([s.ci_low <= 1.0 <= s.ci_high for s in intervals])
    assert covered == pytest.approx(0.95, abs=0.015)
