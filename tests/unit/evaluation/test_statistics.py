from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from pipeline.evaluation.statistics import summarize


# Two-sided 95 % quantiles from a table of Student's t.
@pytest.mark.parametrize(
    ("n", "quantile"),
    [(2, 12.7062047), (3, 4.3026527), (4, 3.1824463), (10, 2.2621572), (101, 1.9839715)],
)
def test_intervals_are_those_of_students_t(n, quantile):
    values = np.random.default_rng(n).normal(size=n)
    summary = summarize(values)
    half = quantile * values.std(ddof=1) / math.sqrt(n)
    assert summary.ci_high - summary.mean == pytest.approx(half, rel=1e-7)
    assert summary.mean - summary.ci_low == pytest.approx(half, rel=1e-7)


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
    assert json.loads(json.dumps(asdict(summary), allow_nan=False))["n"] == 1


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_cannot_be_summarised_are_refused(values):
    with pytest.raises(ValueError, match="a summary needs"):
        summarize(values)
