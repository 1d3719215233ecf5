"""Summaries of returns: over the episodes of one policy, and over training seeds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import seeding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95
BOOTSTRAP_DRAWS = 2000
_SERIES_LIMIT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Location and spread of a sample."""

    n: int
    """Values in the sample."""
    mean: float
    """Arithmetic mean."""
    std: float | None
    """Standard deviation with n - 1 in the denominator; None for one value."""
    ci_low: float | None
    """Lower end of the 95 % confidence interval of the mean (Student's t); None for one value."""
    ci_high: float | None
    """Upper end of the same."""
    median: float
    """Middle value."""
    minimum: float
    """Smallest value."""
    maximum: float
    """Largest value."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedSummary:
    """How a configuration did over several training seeds."""

    seeds: tuple[int, ...]
    """The training seeds, ascending."""
    seed_means: tuple[float, ...]
    """Mean return of each seed's policy, in the same order."""
    over_seeds: Summary
    """Of the seed means: each seed is one observation, however many episodes it played."""
    iqm: float
    """Interquartile mean of all seeds' episodes."""
    iqm_low: float
    """Lower end of its 95 % bootstrap interval (seeds and their episodes drawn anew)."""
    iqm_high: float
    """Upper end of the same."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def summarize(values: Sequence[float] | NDArray[np.floating[Any]]) -> Summary:
    """Mean, spread and confidence interval of independent values.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    sample = _sample(values)
    mean, n = float(sample.mean()), len(sample)
    std = half = None
    if n > 1:
        std = float(sample.std(ddof=1))
        half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * std / math.sqrt(n)
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


def across_seeds(returns: Mapping[int, Sequence[float]], *, seed: int = 0) -> SeedSummary:
    """Summarise the episodes of policies that were trained with different seeds.

    Args:
        returns: episode returns by training seed.
        seed: of the bootstrap.

    Raises:
        ValueError: There is no seed, or a seed has no finite episodes.
    """
    if not returns:
        raise ValueError("across_seeds needs the episodes of at least one seed")
    seeds = tuple(sorted(returns))
    samples = [_sample(returns[key]) for key in seeds]
    means = tuple(float(sample.mean()) for sample in samples)
    low, high = _bootstrap_iqm(samples, seeding.stream(seed, "evaluation", "bootstrap"))
    return SeedSummary(
        seeds=seeds,
        seed_means=means,
        over_seeds=summarize(means),
        iqm=interquartile_mean(_pooled(samples)),
        iqm_low=low,
        iqm_high=high,
    )


def interquartile_mean(values: Sequence[float] | NDArray[np.floating[Any]]) -> float:
    """Mean of the middle half: a quarter of the values is dropped at each end.

    Robust like the median, and uses more of the data (Agarwal et al. 2021, arXiv 2108.13264).
    """
    ordered = np.sort(_sample(values))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval_over_seeds(
    curves: NDArray[np.floating[Any]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean and 95 % interval (Student's t) at each point of learning curves.

    Args:
        curves: [seeds, points]; NaN where a seed has no value.

    Returns:
        Mean, lower and upper end, [points] each. Where fewer than two seeds have a value both ends
        equal the mean; where none has, all are NaN.
    """
    middle, low, high = (np.full(curves.shape[1], np.nan) for _ in range(3))
    for point, column in enumerate(curves.T):
        present = column[~np.isnan(column)]
        if len(present):
            summary = summarize(present)
            middle[point] = summary.mean
            low[point] = summary.mean if summary.ci_low is None else summary.ci_low
            high[point] = summary.mean if summary.ci_high is None else summary.ci_high
    return middle, low, high


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution with a whole number of degrees of freedom.

    Inverts the finite series of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4, by bisection; above
    1000 degrees the expansion 26.7.5 around the normal quantile is exact to 1e-9.

    Args:
        probability: in (0, 1).
        degrees: at least 1.
    """
    if degrees < 1 or not 0.0 < probability < 1.0:
        raise ValueError(f"t_quantile({probability}, {degrees}): out of range")
    if probability < 0.5:
        return -t_quantile(1.0 - probability, degrees)
    if degrees > _SERIES_LIMIT:
        return _expanded_quantile(probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def t_cdf(t: float, degrees: int) -> float:
    """Probability that Student's t is at most `t`, for a whole number of degrees of freedom."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2 == 1
    # Terms cos^k with coefficients (k-1)/k · (k-3)/(k-2) …; k runs over the parity of degrees.
    term, total = (cosine if is_odd else 1.0), 0.0
    for k in range(3 if is_odd else 2, degrees + 1, 2):
        total += term
        term *= (k - 1) / k * cosine * cosine
    inside = 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + inside / 2.0


def _expanded_quantile(probability: float, degrees: int) -> float:
    x = NormalDist().inv_cdf(probability)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def _bootstrap_iqm(
    samples: list[NDArray[np.float64]], rng: np.random.Generator
) -> tuple[float, float]:
    """Percentile interval; seeds are drawn first, then episodes within each drawn seed."""
    draws = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        chosen = rng.integers(0, len(samples), len(samples))
        parts = [rng.choice(samples[index], len(samples[index])) for index in chosen]
        draws[draw] = interquartile_mean(_pooled(parts))
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _pooled(samples: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(samples)


def _sample(values: Sequence[float] | NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError(f"a summary needs finite values, found {sample[~np.isfinite(sample)][0]}")
    return sample
