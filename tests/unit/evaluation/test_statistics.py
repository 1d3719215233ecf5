from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.evaluation.statistics import (
    across_seeds,
    interquartile_mean,
    interval_over_seeds,
    summarize,
    t_cdf,
    t_quantile,
)


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


def test_interquartile_mean_drops_a_quarter_at_each_end():
    assert interquartile_mean([-100.0, -50, 2, 3, 4, 5, 6, 900]) == 3.5
    assert interquartile_mean([1.0, 2, 3]) == 2.0
    assert interquartile_mean([7.0]) == 7.0


def test_each_seed_counts_once_however_many_episodes_it_played():
    result = across_seeds({2: [3.0, 3.0, 3.0, 3.0], 0: [1.0], 1: [2.0, 2.0]})
    assert result.seeds == (0, 1, 2)
    assert result.seed_means == (1.0, 2.0, 3.0)
    assert result.over_seeds == summarize([1.0, 2.0, 3.0])


def test_bootstrap_interval_holds_the_estimate_and_repeats():
    rng = np.random.default_rng(1)
    returns = {seed: rng.normal(seed, 1.0, 50).tolist() for seed in range(5)}
    result = across_seeds(returns)
    assert result.iqm_low < result.iqm < result.iqm_high
    assert across_seeds(returns) == result
    assert across_seeds(returns, seed=1) != result
    json.dumps(result.as_dict(), allow_nan=False)


def test_bootstrap_interval_sees_the_spread_between_seeds():
    rng = np.random.default_rng(1)
    noise = [rng.normal(0.0, 1.0, 200) for _ in range(5)]
    alike = across_seeds({seed: values.tolist() for seed, values in enumerate(noise)})
    apart = across_seeds({seed: (values + 5 * seed).tolist() for seed, values in enumerate(noise)})
    assert alike.iqm_high - alike.iqm_low < 0.5
    assert apart.iqm_high - apart.iqm_low > 4.0


def test_equal_returns_have_a_point_as_interval():
    result = across_seeds({0: [1.0, 1.0], 1: [1.0, 1.0]})
    assert (result.iqm_low, result.iqm, result.iqm_high) == (1.0, 1.0, 1.0)
    assert (result.over_seeds.ci_low, result.over_seeds.ci_high) == (1.0, 1.0)


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        across_seeds({})


def test_interval_of_curves_uses_the_seeds_that_are_present():
    nan = float("nan")
    curves = np.array([[1.0, 4.0, 5.0, nan], [3.0, nan, nan, nan]])
    middle, low, high = interval_over_seeds(curves)
    np.testing.assert_array_equal(middle, [2.0, 4.0, 5.0, nan])
    # std √2, t(0.975, 1) = 12.7062, half = 12.7062 · √2 / √2
    np.testing.assert_allclose(low, [2 - 12.7062047, 4.0, 5.0, nan], rtol=1e-6)
    np.testing.assert_allclose(high, [2 + 12.7062047, 4.0, 5.0, nan], rtol=1e-6)
