import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from pipeline.evaluation import statistics

# Scores for which the tests have the results of rliable 1.2.0, the package of Agarwal et al.:
# estimates to all digits, and bootstrap intervals of 5,000 (IQM) and 2,000 draws (probability).
ONE = np.array([1.13, 0.87, 1.64, 1.1, 0.46, 1.36, 2.3, 1.95, 0.3, -0.27])
OTHER = np.array([-0.32, 0.34, -2.03, 0.08, -0.95, -0.43, -0.24, -0.02])


def test_estimates_and_intervals_equal_the_results_of_rliable():
    assert statistics.interquartile_means(ONE) == pytest.approx(1.0933333333, abs=1e-9)
    assert statistics.probability_of_improvement(ONE, OTHER) == pytest.approx(0.9375)
    rng = np.random.default_rng(0)
    assert statistics.iqm_interval(ONE, rng) == pytest.approx((0.53325, 1.62), abs=0.05)
    interval = statistics.improvement_interval(ONE, OTHER, rng)
    assert interval == pytest.approx((0.8, 1.0), abs=0.03)


def test_interquartile_mean_leaves_out_a_quarter_of_the_values_at_each_end():
    assert statistics.interquartile_means(np.array([-100.0, -50, 2, 3, 4, 5, 6, 900])) == 3.5
    rows = np.array([[3.0, 1, 2], [7, 7, 7]])
    np.testing.assert_array_equal(statistics.interquartile_means(rows), [2.0, 7.0])
    with pytest.raises(ValueError, match="at least one value"):
        statistics.interquartile_means(np.zeros(0))


def test_ties_count_half_in_the_probability_of_improvement():
    same = np.array([1.0, 2.0])
    assert statistics.probability_of_improvement(same, same) == 0.5
    # 3 > 1, 3 > 2, 2 > 1, 2 = 2
    assert statistics.probability_of_improvement(np.array([3.0, 2.0]), same) == 3.5 / 4


@pytest.mark.parametrize(
    "scores", [([1.0, 2, 3], [4.0, 5, 6]), ([1.0, 5, 7, 8], [4.0, 5]), ([2.0, 2], [2.0, 2, 9])]
)
def test_chance_of_separation_is_the_share_of_divisions_with_at_least_the_same_separation(scores):
    x, y = map(np.array, scores)
    pooled = np.concatenate([x, y])

    def clearness(first):
        rest = np.delete(pooled, first)
        return abs(statistics.probability_of_improvement(pooled[list(first)], rest) - 0.5)

    here = clearness(tuple(range(len(x))))
    ways = [clearness(way) for way in itertools.combinations(range(len(pooled)), len(x))]
    expected = np.mean([way >= here - 1e-9 for way in ways])
    assert statistics.chance_of_separation(x, y) == pytest.approx(expected)
    assert statistics.chance_of_separation(y, x) == pytest.approx(expected)


def test_chance_of_separation_equals_published_tables():
    # Mann and Whitney 1947, table I: P(U <= 0) is 0.05 of 3 and 3, 0.004 of 5 and 5.
    assert statistics.chance_of_separation(np.arange(3.0), np.arange(3.0) + 9) == 2 / 20
    assert statistics.chance_of_separation(np.arange(5.0), np.arange(5.0) + 9) == 2 / 252
    assert statistics.chance_of_separation(np.ones(1), np.zeros(1)) == 1.0


def test_iqm_intervals_cover_the_true_value_too_rarely_with_3_seeds_and_in_94_percent_with_10():
    def coverage(n_seeds: int) -> float:
        rng = np.random.default_rng(1)
        intervals = [
            statistics.iqm_interval(rng.normal(0.0, 1.0, n_seeds), rng) for _ in range(300)
        ]
        return float(np.mean([low <= 0.0 <= high for low, high in intervals]))

    assert coverage(3) == pytest.approx(0.74, abs=0.08)
    assert coverage(10) == pytest.approx(0.94, abs=0.05)


def test_a_detectable_difference_is_detected_in_four_of_five_repetitions():
    rng = np.random.default_rng(5)
    # Their pooled variance is exactly 4.
    groups = [np.array([-2.0, 0.0, 2.0]), np.array([5.0, 7.0, 9.0])]
    difference = statistics.detectable_difference(groups)
    ours = rng.normal(0.0, 2.0, (20_000, 3))
    theirs = rng.normal(difference, 2.0, (20_000, 3))
    spread = np.sqrt((ours.var(axis=1, ddof=1) + theirs.var(axis=1, ddof=1)) / 3)
    seen = np.abs(theirs.mean(axis=1) - ours.mean(axis=1)) / spread > 2.776
    assert seen.mean() == pytest.approx(0.8, abs=0.01)


def test_a_detectable_difference_needs_two_groups_with_a_spread():
    same, single = np.array([1.0, 1.0]), np.array([3.0])
    assert statistics.detectable_difference([same, same]) is None
    assert statistics.detectable_difference([np.array([1.0, 2.0]), single]) is None
    with_many = statistics.detectable_difference([np.arange(20.0), np.arange(20.0)])
    with_few = statistics.detectable_difference([np.arange(0.0, 20, 5), np.arange(0.0, 20, 5)])
    assert with_many < with_few


def held(n_seeds: int, draw) -> float:
    """Return the share of intervals of n seeds that contain the value of another seed."""
    rng = np.random.default_rng(7)
    hits = []
    for _ in range(2000):
        low, high = statistics.tolerance_interval(draw(rng, n_seeds))
        hits.append(low <= draw(rng, 1)[0] <= high)
    return float(np.mean(hits))


def test_tolerance_interval_contains_the_score_of_a_new_seed_in_nine_of_ten_cases():
    def normal(rng, n):
        return rng.normal(3.0, 2.0, n)

    def skewed(rng, n):
        return rng.exponential(1.0, n) ** 2

    assert held(5, normal) == pytest.approx(0.9, abs=0.02)
    assert held(10, normal) == pytest.approx(0.9, abs=0.02)
    # For any distribution, once the ends are two of the scores.
    assert held(19, skewed) == pytest.approx(0.9, abs=0.02)
    assert held(39, skewed) == pytest.approx(0.9, abs=0.02)


def test_tolerance_intervals_equal_hand_worked_cases():
    # t(0.95, 4) = 2.1318; the standard deviation of 1 to 5 is the root of 2.5
    half = 2.131847 * np.sqrt(2.5) * np.sqrt(1 + 1 / 5)
    interval = statistics.tolerance_interval(np.array([3.0, 1, 5, 2, 4]))
    assert interval == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert statistics.tolerance_interval(np.arange(19.0)) == (0.0, 18.0)
    assert statistics.tolerance_interval(np.arange(39.0)) == (1.0, 37.0)
    assert statistics.tolerance_interval(np.arange(4.0)) is None


def test_an_interval_without_scores_is_refused():
    with pytest.raises(ValueError, match="at least one score"):
        statistics.iqm_interval(np.zeros(0), np.random.default_rng(0))


def test_interval_of_the_probability_of_improvement_resamples_the_scores_of_both_experiments():
    rng = np.random.default_rng(0)
    spread, level = np.array([0.0, 0.0, 10.0, 10.0]), np.full(4, 5.0)
    for pair in ((spread, level), (level, spread)):
        low, high = statistics.improvement_interval(*pair, rng)
        assert low < 0.3
        assert high > 0.7


def test_a_detectable_difference_uses_the_smallest_group_and_the_pooled_spread():
    few, many = np.array([-1.0, 0.0, 1.0]), np.tile([-1.0, 0.0, 1.0], 3)
    spread = np.sqrt((2 + 6) / (2 + 8))  # pooled over 2 and 8 degrees of freedom
    alike = np.array([-spread, 0.0, spread])
    assert statistics.detectable_difference([many, few]) == pytest.approx(
        statistics.detectable_difference([alike, alike])
    )


def test_band_of_a_learning_curve_has_the_interval_of_the_interquartile_mean_at_each_point():
    curves = np.random.default_rng(0).normal(0.0, 1.0, (6, 3)) + np.array([0.0, 10.0, 20.0])
    low, high = statistics.iqm_band(curves, np.random.default_rng(3))
    for point in range(3):
        interval = statistics.iqm_interval(curves[:, point], np.random.default_rng(4))
        assert (low[point], high[point]) == pytest.approx(interval, abs=0.1)


# Two-sided 95 % quantiles from a table of Student's t.
@pytest.mark.parametrize(
    ("n", "quantile"),
    [(2, 12.7062047), (3, 4.3026527), (4, 3.1824463), (10, 2.2621572), (101, 1.9839715)],
)
def test_confidence_intervals_use_the_t_distribution(n, quantile):
    values = np.random.default_rng(n).normal(size=n)
    summary = statistics.summarize(values)
    half = quantile * values.std(ddof=1) / math.sqrt(n)
    assert summary.ci_high - summary.mean == pytest.approx(half, rel=1e-7)
    assert summary.mean - summary.ci_low == pytest.approx(half, rel=1e-7)


def test_summary_equals_hand_worked_statistics_and_has_no_spread_for_a_single_value():
    # mean 5, squared deviations 9+1+1+9 = 20, std √(20/3)
    summary = statistics.summarize([2.0, 4.0, 6.0, 8.0])
    assert (summary.n, summary.mean, summary.median) == (4, 5.0, 5.0)
    assert (summary.minimum, summary.maximum) == (2.0, 8.0)
    assert summary.std == pytest.approx(2.581989)
    one = statistics.summarize([3.0])
    assert (one.mean, one.std, one.ci_low, one.ci_high) == (3.0, None, None, None)
    assert json.loads(json.dumps(asdict(one), allow_nan=False))["n"] == 1


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_cannot_be_summarised_are_refused(values):
    with pytest.raises(ValueError, match="a summary needs"):
        statistics.summarize(values)
