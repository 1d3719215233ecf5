"""Statistics of a policy's episodes, and of experiments over training seeds.

Interquartile means, probabilities of improvement and bootstrap intervals follow Agarwal et al.
2021, arXiv 2108.13264, for one task at a time; a bootstrap sample has as many runs as the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

CONFIDENCE = 0.95
POWER = 0.8
"""Statistical power: probability that an experiment detects a difference."""
# Number of bootstrap samples. With so many samples, an interval depends little on the bootstrap's
# seed.
DRAWS = 5000
FEWEST_SEEDS = 3
"""Smallest number of seeds with which an interval is computed."""
ENOUGH_SEEDS = 5
"""Smallest number of seeds for an interval without a warning, and for a probability's interval."""
HELD = 0.9
"""Probability that a tolerance interval contains the score of one more seed."""
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
    """Upper end of the 95 % confidence interval of the mean; None for one value."""
    median: float
    minimum: float
    maximum: float


def summarize(values: Sequence[float] | NDArray[np.floating[Any]]) -> Summary:
    """Return mean, spread and confidence interval of independent values.

    Raises:
        ValueError: There is no value, or a value is not finite.
    """
    from scipy.special import stdtrit  # this import is slow, and tables do not need it

    sample = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError(f"a summary needs finite values, found {sample[~np.isfinite(sample)][0]}")
    mean, n = float(sample.mean()), len(sample)
    std = half = None
    if n > 1:
        # Bessel's correction: values are nearer to their own mean than to the true mean.
        std = float(sample.std(ddof=1))
        # Student's t is used instead of 1.96, because few values estimate their spread poorly.
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
    """Return the interquartile means [...] of values [..., n] along the last axis.

    A quarter of the n values, rounded down, is dropped at each end, so that up to three values give
    their mean. This mean is robust like the median, but uses more of the data (arXiv 2108.13264,
    section 4.3).
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    n = ordered.shape[-1]
    if n == 0:
        raise ValueError("an interquartile mean needs at least one value")
    cut = n // 4
    means: FloatArray = ordered[..., cut : n - cut].mean(axis=-1)
    return means


def probability_of_improvement(x: FloatArray, y: FloatArray) -> float:
    """Return the probability that a score of x [n] is above a score of y [m]; ties count half.

    This is the Mann-Whitney statistic (arXiv 2108.13264, section 4.3).
    """
    return float(_improvements(x[None], y[None])[0])


def chance_of_separation(x: FloatArray, y: FloatArray) -> float:
    """Return the probability that chance separates scores x [n] and y [m] as clearly as observed.

    This is the p-value of the exact two-sided Mann-Whitney test: the share of all divisions of the
    scores into n and m in which the rank sum of the n scores is at least as far from its
    expectation as the observed rank sum of x.
    """
    pooled = np.concatenate([x, y])
    # Midranks of equal scores may be fractions. The ranks are doubled, because indices must be
    # whole numbers.
    ranks = 2 * (pooled[:, None] > pooled).sum(axis=1) + (pooled[:, None] == pooled).sum(axis=1)
    total, n = int(ranks.sum()), len(x)
    ways = np.zeros((n + 1, total + 1))  # axes: number of chosen scores, sum of their ranks
    ways[0, 0] = 1.0
    for rank in ranks:
        # Choosing this score adds one to the number of chosen scores, and its rank to their sum.
        ways[1:, rank:] += ways[:-1, :-rank]
    # Distances are multiplied by the number of scores, so that they are whole numbers.
    away = np.abs(len(pooled) * np.arange(total + 1) - n * total)
    observed = abs(len(pooled) * int(ranks[:n].sum()) - n * total)
    return float(ways[n, away >= observed].sum() / ways[n].sum())


def iqm_interval(scores: FloatArray, rng: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the interquartile mean of [n] scores."""
    return _ends(interquartile_means(_drawn(scores, rng)))


def tolerance_interval(scores: FloatArray) -> tuple[float, float] | None:
    """Return the range that contains the score of one more seed with a probability of 90 %.

    The result is a tolerance interval in expectation, also called a prediction interval. With 19
    scores or more its ends are two of the scores, for any distribution (Wilks 1941, Annals of
    Mathematical Statistics 12:91); with fewer scores a normal distribution is assumed (Hahn and
    Meeker 1991, "Statistical Intervals", chapter 4).

    Returns:
        Lower and upper end, in units of the scores [seeds]; None with fewer than 5 seeds.
    """
    from scipy.special import stdtrit

    n = len(scores)
    if n < ENOUGH_SEEDS:
        return None
    # The new score is equally likely in each of the n + 1 gaps between the n scores, so `left_out`
    # gaps at each end may be left out.
    left_out = int((n + 1) * (1 - HELD) / 2 + 1e-9)
    if left_out:
        ordered = np.sort(scores)
        return float(ordered[left_out - 1]), float(ordered[n - left_out])
    mean = float(scores.mean())
    # In units of the variance, a new score varies by 1 and the estimated mean by 1 / n.
    half = float(stdtrit(n - 1, (1 + HELD) / 2) * scores.std(ddof=1) * math.sqrt(1 + 1 / n))
    return mean - half, mean + half


def improvement_interval(
    x: FloatArray, y: FloatArray, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the probability that a score of x is above one of y.

    x [n] and y [m] are as in `probability_of_improvement`.
    """
    # Each group is sampled separately, so that a larger group does not outweigh the other.
    return _ends(_improvements(_drawn(x, rng), _drawn(y, rng)))


def iqm_band(curves: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Return the lower and upper ends [points] of the interquartile mean's 95 % interval.

    The bootstrap draws whole curves from `curves` [seeds, points].
    """
    n_seeds, n_points = curves.shape
    # Separate draws for each point would give a ragged band.
    drawn = rng.integers(0, n_seeds, (DRAWS, n_seeds), dtype=np.int64)
    ends = np.empty((2, n_points))
    # All points at once would need memory for draws * seeds * points numbers.
    for point in range(n_points):
        ends[:, point] = _ends(interquartile_means(curves[:, point][drawn]))
    return ends[0], ends[1]


def detectable_difference(groups: Sequence[FloatArray]) -> float | None:
    """Return the smallest difference of two means that is detected with a probability of 80 %.

    At this difference of means Student's two-sample t-test at 5 % has a power of 80 %, for the
    pooled standard deviation of seeds within the groups and the smallest group's number of seeds
    (Cohen 1988). Groups of one seed are left out.

    Returns:
        The difference in units of the scores; None without two groups of two seeds, or if all seeds
        of each group have equal scores.
    """
    from scipy.special import nctdtr, stdtrit

    several = [scores for scores in groups if len(scores) > 1]
    if len(several) < 2:
        return None
    n_seeds = min(map(len, several))
    squares = sum(float(((scores - scores.mean()) ** 2).sum()) for scores in several)
    # Standard error of the difference of two means of `n_seeds` scores (pooled variance).
    error = math.sqrt(2 / n_seeds * squares / sum(len(scores) - 1 for scores in several))
    if error == 0.0:
        return None
    freedom = 2 * n_seeds - 2
    critical = stdtrit(freedom, (1 + CONFIDENCE) / 2)
    low, high = 0.0, 100.0  # bounds of the noncentrality, in standard errors
    # Each step of this bisection halves the range; 60 steps reach float64's precision.
    for _ in range(60):
        middle = (low + high) / 2
        # The test misses a difference if the t statistic stays within the critical values.
        missed = nctdtr(freedom, middle, critical) - nctdtr(freedom, middle, -critical)
        low, high = (middle, high) if missed > 1 - POWER else (low, middle)
    return high * error


def caution(n_seeds: int) -> str:
    """Return a warning that `n_seeds` are few for an interval; empty if they are enough."""
    if n_seeds < FEWEST_SEEDS:
        subject = "1 seed is" if n_seeds == 1 else f"{n_seeds} seeds are"
        return f"{subject} too few for an interval; run {ENOUGH_SEEDS} or more"
    if n_seeds < ENOUGH_SEEDS:
        return (
            f"{n_seeds} seeds are few: in more than 5 % of cases the 95 % interval does not "
            f"contain the value that many seeds would give; run {ENOUGH_SEEDS} or more"
        )
    return ""


def _drawn(scores: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return bootstrap samples [draws, n] of `scores` [n]."""
    if not len(scores):
        raise ValueError("a bootstrap needs at least one score")
    return scores[rng.integers(0, len(scores), (DRAWS, len(scores)), dtype=np.int64)]


def _ends(drawn: FloatArray) -> tuple[float, float]:
    # The ends are those of the percentile bootstrap (arXiv 2108.13264).
    low, high = np.quantile(drawn, _ENDS)
    return float(low), float(high)


def _improvements(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the probability of improvement [draws] of each pair of bootstrap samples.

    The samples are the rows of x [draws, n] and of y [draws, m].
    """
    # Every score of x is compared with every score of y: [draws, n, m].
    x, y = x[:, :, None], y[:, None, :]
    shares: FloatArray = ((x > y) + 0.5 * (x == y)).mean(axis=(1, 2))
    return shares
