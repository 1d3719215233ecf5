"""Summaries of returns over the episodes of one policy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95
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


def _sample(values: Sequence[float] | NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError(f"a summary needs finite values, found {sample[~np.isfinite(sample)][0]}")
    return sample
