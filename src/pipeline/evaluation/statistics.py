"""Summaries of returns over the episodes of one policy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95


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


def _sample(values: Sequence[float] | NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(sample):
        raise ValueError("a summary needs at least one value")
    if not np.isfinite(sample).all():
        raise ValueError(f"a summary needs finite values, found {sample[~np.isfinite(sample)][0]}")
    return sample
