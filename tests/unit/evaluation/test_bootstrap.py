from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation import bootstrap

# Scores, and what rliable 1.2.0 (the package of Agarwal et al.) gives for them: the estimates to
# all digits, the ends of its 5,000-draw (IQM) and 2,000-draw (probability) bootstrap intervals.
ONE = [[1.13, 0.87, 1.64, 1.1, 0.46, 1.36, 2.3, 1.95, 0.3, -0.27]]
OTHER = [[-0.32, 0.34, -2.03, 0.08, -0.95, -0.43, -0.24, -0.02]]
TASKS = [
    [1.41, 2.37, 1.9, 0.08, -0.01],
    [2.04, 0.33, 1.09, 0.54, 0.79],
    [0.87, 1.35, 0.26, 1.22, 0.84],
]
OTHER_TASKS = [
    [0.84, -0.35, 1.79, 1.65, -0.01],
    [0.51, 0.17, -0.96, 1.08, 1.76],
    [0.66, 1.08, 1.81, 0.56, 2.26],
]
KNOWN = [
    (ONE, OTHER, 1.0933333333, (0.53325, 1.62), 0.9375, (0.8, 1.0)),
    (TASKS, OTHER_TASKS, 0.9377777778, (0.55775, 1.37336), 0.58, (0.37333, 0.77333)),
]


def strata(scores):
    return [np.array(one) for one in scores]


@pytest.mark.parametrize(("x", "y", "iqm", "ends", "probability", "probable_ends"), KNOWN)
def test_estimates_and_intervals_are_those_of_the_authors_package(
    x, y, iqm, ends, probability, probable_ends
):
    x, y = strata(x), strata(y)
    assert bootstrap.interquartile_means(np.concatenate(x)) == pytest.approx(iqm, abs=1e-9)
    assert bootstrap.probability_of_improvement(x=x, y=y) == pytest.approx(probability)
    rng = np.random.default_rng(0)
    assert bootstrap.iqm_interval(x, rng) == pytest.approx(ends, abs=0.05)
    found = bootstrap.improvement_interval(x=x, y=y, rng=rng)
    assert found == pytest.approx(probable_ends, abs=0.03)


def test_interquartile_mean_drops_a_quarter_at_each_end():
    assert bootstrap.interquartile_means(np.array([-100.0, -50, 2, 3, 4, 5, 6, 900])) == 3.5
    rows = np.array([[3.0, 1, 2], [7, 7, 7]])
    np.testing.assert_array_equal(bootstrap.interquartile_means(rows), [2.0, 7.0])
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap.interquartile_means(np.zeros(0))


def test_ties_count_half():
    same = strata([[1.0, 2.0]])
    assert bootstrap.probability_of_improvement(x=same, y=same) == 0.5
    # 3 > 1, 3 > 2, 2 > 1, 2 = 2
    assert bootstrap.probability_of_improvement(x=strata([[3.0, 2.0]]), y=same) == 3.5 / 4


def test_runs_are_drawn_within_their_own_stratum():
    # Both tasks are certain, so nothing varies however far apart they lie.
    low, high = bootstrap.iqm_interval(strata([[0.0] * 4, [100.0] * 4]), np.random.default_rng(0))
    assert low == high == 50.0


def test_equal_streams_give_equal_intervals():
    x = strata(ONE)
    first, second, other = (bootstrap.iqm_interval(x, np.random.default_rng(k)) for k in (1, 1, 2))
    assert first == second != other


def test_interval_sees_the_spread_between_seeds():
    rng = np.random.default_rng(1)
    noise = rng.normal(0.0, 0.1, 5)
    alike = bootstrap.iqm_interval([noise], rng)
    apart = bootstrap.iqm_interval([noise + 5 * np.arange(5)], rng)
    assert alike[1] - alike[0] < 0.3
    assert apart[1] - apart[0] > 4.0


def test_band_of_curves_is_the_interval_at_each_point():
    rng = np.random.default_rng(0)
    curves = rng.normal(0.0, 1.0, (6, 3)) + np.array([0.0, 10.0, 20.0])
    low, high = bootstrap.iqm_band(curves, np.random.default_rng(3))
    for point in range(3):
        alone = bootstrap.iqm_interval([curves[:, point]], np.random.default_rng(4))
        assert (low[point], high[point]) == pytest.approx(alone, abs=0.1)


def test_few_seeds_are_said_to_be_few():
    assert bootstrap.caution(1) == "1 seed is too few for an interval"
    assert bootstrap.caution(2) == "2 seeds are too few for an interval"
    assert "wide" in bootstrap.caution(3)
    assert "wide" in bootstrap.caution(4)
    assert bootstrap.caution(5) == ""


def test_intervals_over_three_seeds_cover_less_than_they_say_and_over_ten_nearly_that():
    def coverage(n_seeds: int) -> float:
        rng = np.random.default_rng(1)
        found = [bootstrap.iqm_interval([rng.normal(0.0, 1.0, n_seeds)], rng) for _ in range(300)]
        return float(np.mean([low <= 0.0 <= high for low, high in found]))

    assert coverage(3) == pytest.approx(0.74, abs=0.08)
    assert coverage(10) == pytest.approx(0.94, abs=0.05)


def test_strata_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        bootstrap.probability_of_improvement(x=strata(ONE), y=strata(TASKS))
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap.iqm_interval([np.zeros(0)], np.random.default_rng(0))
