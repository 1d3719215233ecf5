"""Figures: returns of episodes, learning curves over seeds, and experiments beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import seeding
from pipeline.evaluation import canvas
from pipeline.evaluation.bootstrap import FEWEST_SEEDS, interquartile_means, iqm_band
from pipeline.evaluation.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from pipeline.evaluation.comparison import Improvement, Standing

_MOST_BINS = 30
_MOST_POINTS = 200
_ROW = 0.42


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curves:
    """Learning curves of one configuration, one per seed, on common steps."""

    steps: NDArray[np.float64]
    """[points] ascending."""
    values: NDArray[np.float64]
    """[seeds, points]."""

    def thinned(self) -> Curves:
        """The same on at most 200 evenly chosen steps, the first and the last among them."""
        n = len(self.steps)
        if n <= _MOST_POINTS:
            return self
        kept = np.unique(np.linspace(0, n - 1, _MOST_POINTS).round().astype(np.int64))
        return Curves(steps=self.steps[kept], values=self.values[:, kept])


def align_curves(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> Curves:
    """Bring the (steps, values) of several seeds onto common steps by linear interpolation.

    Only steps that every seed reached are kept: where seeds come and go, a mean over those present
    jumps without anything having been learnt.

    Args:
        curves: (steps, values) of each seed, steps ascending, at least one point each.

    Returns:
        Curves on every recorded step in the common range; without such a range, on no steps.
    """
    arrays = [(np.asarray(s, dtype=np.float64), np.asarray(v, dtype=np.float64)) for s, v in curves]
    first = max(steps[0] for steps, _ in arrays)
    last = min(steps[-1] for steps, _ in arrays)
    grid = np.unique(np.concatenate([steps for steps, _ in arrays]))
    grid = grid[(grid >= first) & (grid <= last)]
    return Curves(steps=grid, values=np.stack([np.interp(grid, *curve) for curve in arrays]))


def plot_returns(path: Path, returns: Sequence[float], *, title: str) -> None:
    """Histogram of episode returns with their mean and its 95 % interval, as PNG."""
    summary = summarize(returns)
    with canvas.styled():
        axes = canvas.axes_of(title, "Episode return", "Episodes")
        bins = _bins(np.asarray(returns, dtype=np.float64))
        axes.hist(returns, bins=bins, color=canvas.color_of(0), alpha=0.55, edgecolor="white")
        label = f"mean {_number(summary.mean)}"
        mark = canvas.color_of(1)
        if summary.ci_low is not None and summary.ci_high is not None:
            axes.axvspan(summary.ci_low, summary.ci_high, color=mark, alpha=0.35, linewidth=0)
            label += f" (95 % interval {_number(summary.ci_low)} to {_number(summary.ci_high)})"
        axes.axvline(summary.mean, color=mark, linewidth=2.0, label=label)
        axes.yaxis.get_major_locator().set_params(integer=True)
        canvas.legend(axes)
        canvas.save(axes, path)


def band(curves: Curves) -> tuple[NDArray[np.float64], ...] | None:
    """Interquartile mean over seeds and the ends of its 95 % interval, [points] each.

    Returns:
        None with too few seeds for an interval.
    """
    if len(curves.values) < FEWEST_SEEDS:
        return None
    low, high = iqm_band(curves.values, seeding.stream(0, "curves", len(curves.values)))
    return interquartile_means(curves.values.T), low, high


def plot_learning_curves(
    path: Path,
    curves: Mapping[str, Curves],
    *,
    title: str,
    target: float | None = None,
    y_label: str = "Mean episode return",
) -> None:
    """Interquartile mean over seeds with its 95 % interval, one line per configuration, as PNG.

    With too few seeds for an interval every seed has its own thin line instead.
    """
    with canvas.styled():
        has_bands = any(len(group.values) >= FEWEST_SEEDS for group in curves.values())
        note = " (bands: 95 % interval over seeds)" if has_bands else ""
        axes = canvas.axes_of(title, f"Environment steps{note}", y_label)
        for index, (name, group) in enumerate(curves.items()):
            _draw_curves(axes, index, name, group)
        if target is not None:
            axes.axhline(target, color=canvas.MUTED, linewidth=1.0, linestyle=":", label="target")
        axes.xaxis.set_major_formatter(canvas.step_formatter())
        axes.margins(x=0.01)
        canvas.fit_to_values(axes, [group.values for group in curves.values()])
        canvas.legend(axes)
        canvas.save(axes, path)


def _draw_curves(axes: Any, index: int, name: str, group: Curves) -> None:
    look = {"color": canvas.color_of(index), "linestyle": canvas.line_of(index)}
    n_seeds = len(group.values)
    label = f"{name} ({n_seeds} seed{'s' if n_seeds > 1 else ''})"
    group = group.thinned()
    drawn = band(group)
    if drawn is None:
        for number, values in enumerate(group.values):
            axes.plot(
                group.steps, values, linewidth=1.2, label=label if not number else None, **look
            )
        return
    middle, low, high = drawn
    axes.fill_between(group.steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.plot(group.steps, middle, linewidth=1.8, label=label, **look)


def plot_standings(path: Path, standings: Sequence[Standing], *, title: str, x_label: str) -> None:
    """Every seed's score as a dot, with the interquartile mean and its interval, as PNG."""
    with canvas.styled():
        axes = _rows(title, x_label, [one.experiment for one in standings])
        for row, one in enumerate(standings):
            color = canvas.color_of(row)
            if one.low is not None and one.high is not None:
                axes.plot(
                    [one.low, one.high],
                    [row, row],
                    color=color,
                    alpha=0.35,
                    linewidth=9.0,
                    solid_capstyle="butt",
                )
            axes.plot([one.iqm], [row], color=color, marker="|", markersize=16, markeredgewidth=2.5)
            axes.plot(
                one.scores,
                [row] * len(one.scores),
                "o",
                color=color,
                markersize=4.5,
                alpha=0.8,
                markeredgecolor="white",
                markeredgewidth=0.6,
            )
        canvas.save(axes, path)


def plot_improvements(path: Path, improvements: Sequence[Improvement], *, title: str) -> None:
    """The probability that one experiment is better than another, with its interval, as PNG."""
    names = [f"{one.better}  >  {one.than}" for one in improvements]
    with canvas.styled():
        axes = _rows(title, "Probability that a run of the first does better", names)
        for row, one in enumerate(improvements):
            if one.low is not None and one.high is not None:
                axes.plot(
                    [one.low, one.high],
                    [row, row],
                    color=canvas.color_of(0),
                    alpha=0.35,
                    linewidth=9.0,
                    solid_capstyle="butt",
                )
            axes.plot(
                [one.probability],
                [row],
                color=canvas.color_of(0),
                marker="|",
                markersize=16,
                markeredgewidth=2.5,
            )
        axes.axvline(0.5, color=canvas.MUTED, linewidth=1.0, linestyle=":")
        axes.set_xlim(-0.02, 1.02)
        canvas.save(axes, path)


def _rows(title: str, x_label: str, names: Sequence[str]) -> Any:
    """Axes with one named row for each, the first at the top."""
    height = 1.15 + _ROW * max(len(names), 1)
    axes = canvas.axes_of(title, x_label, "", height=height, grid="x")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=canvas.INK)
    return axes


def _bins(returns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bin edges by Freedman and Diaconis, within reason; equal returns get one visible bin."""
    low, high = float(returns.min()), float(returns.max())
    if high - low <= 1e-9 * max(1.0, abs(high)):
        half = max(0.5, abs(high) * 0.05)
        return np.linspace(low - half, high + half, 12)
    quarter, three_quarters = np.quantile(returns, [0.25, 0.75])
    width = 2.0 * (three_quarters - quarter) / np.cbrt(len(returns))
    count = int(np.ceil((high - low) / width)) if width > 0 else _MOST_BINS
    return np.linspace(low, high, min(max(count, 5), _MOST_BINS) + 1)


def _number(value: float) -> str:
    """Four significant digits, with a proper minus sign."""
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")
