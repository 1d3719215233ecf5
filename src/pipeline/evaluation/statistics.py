"""Summaries of the episodes of one policy, and comparisons over training seeds.

Interquartile means, probability of improvement and bootstrap intervals are those of Agarwal et al.
2021, arXiv 2108.13264, for one task at a time; the bootstrap draws as many runs as there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

CONFIDENCE = 0.95
POWER = 0.8
"""Share of repetitions in which a difference is to be seen."""
# Enough that the ends of an interval move little from one seed of the bootstrap to another.
DRAWS = 5000
FEWEST_SEEDS = 3
"""With fewer, no interval is given."""
ENOUGH_SEEDS = 5
"""With fewer, an interval is given with a warning, and none of a probability."""
HELD = 0.9
"""Probability with which a tolerance interval holds the score of one more seed."""
_ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Location and spread of a sample."""

    n: int
    mean: float
    std: float | None
    """Standard deviation with n - 1 in the denominator; None for one value."""
    ci_low: float | None
    """Lower end of the 95 % confidence interval of the mean (Student's t); None for one value."""
    ci_high: float | None
    """Upper end of the same."""
    median: float
    minimum: float
    maximum: float


def summarize(values: Sequence[float] | NDArray[np.floating[Any]]) -> Summary:
    """Return mean, spread and confidence interval of independent values.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    from scipy.special import stdtrit  # takes longer to import than all else that tables need

    sample = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError(f"a summary needs finite values, found {sample[~np.isfinite(sample)][0]}")
    mean, n = float(sample.mean()), len(sample)
    std = half = None
    if n > 1:
        std = float(sample.std(ddof=1))
        # Student's t and not 1.96: few values estimate their spread poorly.
        half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * std / math.sqrt(n)
    return Summary(
        n=n,
        mean=mean,
        std=std,
        ci_low=None if half is None else mean - half,
        ci_high=None if half is None else mean + half,
        median=float(np.median(sample)),
        minimum=float(sample.min()),
        maximum=float(sample.max()),
    )


def interquartile_means(values: NDArray[np.floating[Any]]) -> FloatArray:
    """Return the mean of the middle half along the last axis; a quarter is dropped at each end.

    Robust like the median, and uses more of the data (arXiv 2108.13264, section 4.3). The quarter
    of the n values [..., n] is rounded down, so that up to three values give their mean.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    n = ordered.shape[-1]
    if n == 0:
        raise ValueError("an interquartile mean needs at least one value")
    cut = n // 4
    means: FloatArray = ordered[..., cut : n - cut].mean(axis=-1)
    return means


def probability_of_improvement(x: FloatArray, y: FloatArray) -> float:
    """Return how probable it is that a run of x [n] beats a run of y [m], ties counting half.

    The Mann-Whitney statistic (arXiv 2108.13264, section 4.3 and appendix A.3).
    """
    # The scores as they are count as one draw.
    return float(_improvements(x[None], y[None])[0])


def chance_of_separation(x: FloatArray, y: FloatArray) -> float:
    """Return how probable it is that chance alone separates x [n] and y [m] as clearly as here.

    The exact two-sided Mann-Whitney test: of all ways to divide the scores into n and m, the share
    in which the ranks of the n are at least as far from their expected sum.
    """
    pooled = np.concatenate([x, y])
    # Twice the midranks, which are whole numbers also where scores are equal.
    ranks = 2 * (pooled[:, None] > pooled).sum(axis=1) + (pooled[:, None] == pooled).sum(axis=1)
    total, n = int(ranks.sum()), len(x)
    ways = np.zeros((n + 1, total + 1))  # by how many scores are taken, and the sum of their ranks
    ways[0, 0] = 1.0
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    # Times the number of scores, so that the expected sum is a whole number.
    away = np.abs(len(pooled) * np.arange(total + 1) - n * total)
    observed = abs(len(pooled) * int(ranks[:n].sum()) - n * total)
    return float(ways[n, away >= observed].sum() / ways[n].sum())


def iqm_interval(scores: FloatArray, rng: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the interquartile mean of [n] scores."""
    return _ends(interquartile_means(_drawn(scores, rng)))


def tolerance_interval(scores: FloatArray) -> tuple[float, float] | None:
    """Return the range that holds the score of one more seed with a probability of 90 %.

    A tolerance interval in expectation, also called a prediction interval. From 19 scores on its
    ends are two of the scores, whatever their distribution (Wilks 1941, Annals of Mathematical
    Statistics 12:91); with fewer they are those of a normal distribution (Hahn and Meeker 1991,
    "Statistical Intervals", chapter 4).

    Returns:
        Both ends in units of the scores [seeds], None with fewer than 5 seeds.
    """
    from scipy.special import stdtrit

    n = len(scores)
    if n < ENOUGH_SEEDS:
        return None
    # Of n + 1 exchangeable scores the last is as likely in each of the n + 1 gaps between the
    # others; so many gaps at each end may be left out.
    left_out = int((n + 1) * (1 - HELD) / 2 + 1e-9)
    if left_out:
        ordered = np.sort(scores)
        return float(ordered[left_out - 1]), float(ordered[n - left_out])
    mean = float(scores.mean())
    # The new seed varies like the others, and their mean is an estimate: 1 + 1 / n variances.
    half = float(stdtrit(n - 1, (1 + HELD) / 2) * scores.std(ddof=1) * math.sqrt(1 + 1 / n))
    return mean - half, mean + half


def improvement_interval(
    x: FloatArray, y: FloatArray, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of `probability_of_improvement`."""
    # Each group is drawn by itself, so a group with more runs does not outweigh the other.
    return _ends(_improvements(_drawn(x, rng), _drawn(y, rng)))


def iqm_band(curves: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Return the ends [points] of the 95 % interval of the interquartile mean at each point.

    Whole curves of [seeds, points] are drawn, so that points stay together.
    """
    n_seeds, n_points = curves.shape
    # Drawn once for all points: separate draws for each point would give a ragged band.
    drawn = rng.integers(0, n_seeds, (DRAWS, n_seeds), dtype=np.int64)
    ends = np.empty((2, n_points))
    # Point by point: all points at once would take draws * seeds * points numbers.
    for point in range(n_points):
        ends[:, point] = _ends(interquartile_means(curves[:, point][drawn]))
    return ends[0], ends[1]


def detectable_difference(groups: Sequence[FloatArray]) -> float | None:
    """Return the difference of two experiments that four of five repetitions would detect.

    The difference of means at which Student's two-sample t-test at 5 % has a power of 80 %, given
    the spread that seeds have within the groups (pooled) and the fewest seeds of a group (Cohen
    1988, section 2.2). Groups of one seed are left out.

    Returns:
        The difference in units of the scores; None without two groups of two seeds, or when all
        seeds of each group score the same.
    """
    from scipy.special import nctdtr, stdtrit

    several = [scores for scores in groups if len(scores) > 1]
    if len(several) < 2:
        return None
    n_seeds = min(map(len, several))
    squares = sum(float(((scores - scores.mean()) ** 2).sum()) for scores in several)
    error = math.sqrt(2 / n_seeds * squares / sum(len(scores) - 1 for scores in several))
    if error == 0.0:
        return None
    freedom = 2 * n_seeds - 2
    critical = stdtrit(freedom, (1 + CONFIDENCE) / 2)
    low, high = 0.0, 100.0  # noncentralities, in standard errors of the difference
    for _ in range(60):
        middle = (low + high) / 2
        missed = nctdtr(freedom, middle, critical) - nctdtr(freedom, middle, -critical)
        low, high = (middle, high) if missed > 1 - POWER else (low, middle)
    return high * error


def caution(n_seeds: int) -> str:
    """Return a warning about intervals of few seeds; empty if there are enough."""
    if n_seeds < FEWEST_SEEDS:
        subject = "1 seed is" if n_seeds == 1 else f"{n_seeds} seeds are"
        return f"{subject} too few for an interval; run {ENOUGH_SEEDS} or more"
    if n_seeds < ENOUGH_SEEDS:
        return (
            f"{n_seeds} seeds are few: the 95 % interval misses what many seeds would give more "
            f"often than in 5 % of cases; run {ENOUGH_SEEDS} or more"
        )
    return ""


def _drawn(scores: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return bootstrap samples [draws, n] of [n] scores."""
    if not len(scores):
        raise ValueError("a bootstrap needs at least one score")
    return scores[rng.integers(0, len(scores), (DRAWS, len(scores)), dtype=np.int64)]


def _ends(drawn: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(drawn, _ENDS)
    return float(low), float(high)


def _improvements(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return [draws] probabilities of improvement for [draws, n] and [draws, m] scores."""
    x, y = x[:, :, None], y[:, None, :]
    shares: FloatArray = ((x > y) + 0.5 * (x == y)).mean(axis=(1, 2))
    return shares
