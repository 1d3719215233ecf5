"""Interquartile means, probability of improvement, and bootstrap intervals over training seeds.

After Agarwal et al. 2021, arXiv 2108.13264. A *stratum* is one task with the scores of its runs;
the stratified bootstrap draws runs anew within each stratum, as often as the stratum has runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95
DRAWS = 5000
FEWEST_SEEDS = 3
"""With fewer, no interval is given."""
ENOUGH_SEEDS = 5
"""With fewer, an interval is given with a warning."""


def interquartile_means(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Mean of the middle half along the last axis: a quarter is dropped at each end.

    Robust like the median, and uses more of the data (arXiv 2108.13264, section 4.3).

    Args:
        values: [..., n], n at least 1. The quarter is rounded down, so that up to three values
            give their mean.

    Returns:
        [...] the means.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    n = ordered.shape[-1]
    if n == 0:
        raise ValueError("an interquartile mean needs at least one value")
    cut = n // 4
    kept: NDArray[np.float64] = ordered[..., cut : n - cut].mean(axis=-1)
    return kept


def probability_of_improvement(
    *, x: Sequence[NDArray[np.float64]], y: Sequence[NDArray[np.float64]]
) -> float:
    """How probable it is that a run of x does better than one of y, ties counting half.

    The Mann-Whitney statistic of each stratum, averaged over strata (arXiv 2108.13264, section 4.3
    and appendix A.3).

    Args:
        x: for each stratum, [n] scores of its runs.
        y: for the same strata, [m] scores.
    """
    drawn = _improvements([one[None] for one in x], [one[None] for one in y])
    return float(drawn[0])


def iqm_interval(
    strata: Sequence[NDArray[np.float64]], rng: np.random.Generator
) -> tuple[float, float]:
    """95 % stratified bootstrap interval of the interquartile mean over all runs and tasks."""
    return interval(strata, lambda drawn: interquartile_means(np.concatenate(drawn, axis=-1)), rng)


def improvement_interval(
    *,
    x: Sequence[NDArray[np.float64]],
    y: Sequence[NDArray[np.float64]],
    rng: np.random.Generator,
) -> tuple[float, float]:
    """95 % stratified bootstrap interval of `probability_of_improvement`."""
    n = len(x)
    return interval([*x, *y], lambda drawn: _improvements(drawn[:n], drawn[n:]), rng)


def interval(
    strata: Sequence[NDArray[np.float64]],
    statistic: Callable[[list[NDArray[np.float64]]], NDArray[np.float64]],
    rng: np.random.Generator,
) -> tuple[float, float]:
    """95 % percentile interval of a statistic, runs being drawn anew within each stratum.

    Args:
        strata: [n] scores for each.
        statistic: from [draws, n] for each stratum to [draws].
        rng: of the draws.
    """
    if not strata or any(len(scores) == 0 for scores in strata):
        raise ValueError("a bootstrap needs at least one score in every stratum")
    drawn = [
        scores[rng.integers(0, len(scores), (DRAWS, len(scores)), dtype=np.int64)]
        for scores in strata
    ]
    low, high = np.quantile(statistic(drawn), _ends())
    return float(low), float(high)


def iqm_band(
    curves: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ends of the 95 % bootstrap interval of the interquartile mean at each point of curves.

    Args:
        curves: [seeds, points]; whole curves are drawn, so that points stay together.
        rng: of the draws.

    Returns:
        Lower and upper end, [points] each.
    """
    n_seeds, n_points = curves.shape
    drawn = rng.integers(0, n_seeds, (DRAWS, n_seeds), dtype=np.int64)
    ends = np.empty((2, n_points))
    for point in range(n_points):
        ends[:, point] = np.quantile(interquartile_means(curves[:, point][drawn]), _ends())
    return ends[0], ends[1]


def caution(n_seeds: int) -> str:
    """What few seeds mean for the intervals; empty when there are enough."""
    if n_seeds < FEWEST_SEEDS:
        what = "1 seed is" if n_seeds == 1 else f"{n_seeds} seeds are"
        return f"{what} too few for an interval"
    if n_seeds < ENOUGH_SEEDS:
        return f"{n_seeds} seeds: the interval is wide, and still too narrow for its 95 %"
    return ""


def _improvements(
    x: Sequence[NDArray[np.float64]], y: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """[draws, n] and [draws, m] of each stratum to [draws] probabilities."""
    if len(x) != len(y) or not x:
        raise ValueError(f"{len(x)} and {len(y)} strata cannot be compared")
    of_strata = [
        ((a[:, :, None] > b[:, None, :]) + 0.5 * (a[:, :, None] == b[:, None, :])).mean(axis=(1, 2))
        for a, b in zip(x, y, strict=True)
    ]
    averaged: NDArray[np.float64] = np.mean(of_strata, axis=0)
    return averaged


def _ends() -> list[float]:
    return [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
