"""Figures: returns of episodes, learning curves over seeds, and experiments beside each other.

Equal data give equal bytes with one version of matplotlib: no dates, a fixed resolution, its own
fonts, and a style that ignores the user's settings. No display is used.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline import files, seeding
from pipeline.evaluation.statistics import FEWEST_SEEDS, interquartile_means, iqm_band, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from pipeline.evaluation.comparison import Improvement, Standing

SIZE = (7.0, 3.9)
_DPI = 150
INK, MUTED, GRID = "#22272e", "#6b7280", "#e5e7eb"
COLORS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#57534e")
_LINES = ("-", "--", "-.", ":")
# DejaVu Sans comes with matplotlib, so figures look the same on every machine.
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.parse_math": False,  # names may have dollar signs
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "legend.fontsize": 9.5,
}
ROUND = (1, 2, 5, 10)
"""Steps between the ticks of axes, times a power of ten."""
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
        """Return the curves on at most 200 even steps, the first and the last among them."""
        n = len(self.steps)
        if n <= _MOST_POINTS:
            return self
        indices = np.unique(np.linspace(0, n - 1, _MOST_POINTS).round().astype(np.int64))
        return Curves(steps=self.steps[indices], values=self.values[:, indices])


def align_curves(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> Curves:
    """Bring the (steps, values) of several seeds onto common steps by linear interpolation.

    Only steps that every seed reached are kept: where a seed's curve begins or ends, the mean over
    the seeds would jump without any learning.
    """
    arrays = [(np.asarray(s, dtype=np.float64), np.asarray(v, dtype=np.float64)) for s, v in curves]
    first = max(steps[0] for steps, _ in arrays)
    last = min(steps[-1] for steps, _ in arrays)
    grid = np.unique(np.concatenate([steps for steps, _ in arrays]))
    grid = grid[(grid >= first) & (grid <= last)]
    return Curves(steps=grid, values=np.stack([np.interp(grid, *curve) for curve in arrays]))


def plot_returns(path: Path, returns: Sequence[float], *, title: str) -> None:
    """Draw a histogram of episode returns with their mean and its 95 % interval, as PNG."""
    summary = summarize(returns)
    with _axes(path, title, "Episode return", "Episodes") as axes:
        bins = _bins(np.asarray(returns, dtype=np.float64))
        axes.hist(returns, bins=bins, color=color(0), alpha=0.55, edgecolor="white")
        label = f"mean {_number(summary.mean)}"
        if summary.ci_low is not None and summary.ci_high is not None:
            axes.axvspan(summary.ci_low, summary.ci_high, color=color(1), alpha=0.35, linewidth=0)
            label += f" (95 % interval {_number(summary.ci_low)} to {_number(summary.ci_high)})"
        axes.axvline(summary.mean, color=color(1), linewidth=2.0, label=label)
        axes.yaxis.get_major_locator().set_params(integer=True)


def band(curves: Curves) -> tuple[NDArray[np.float64], ...] | None:
    """Return the interquartile mean over seeds and its 95 % interval, [points] each, if any."""
    if len(curves.values) < FEWEST_SEEDS:
        return None
    # A fixed seed: equal curves have to give an equal picture.
    low, high = iqm_band(curves.values, seeding.stream(0, "curves", len(curves.values)))
    return interquartile_means(curves.values.T), low, high


def plot_learning_curves(
    path: Path, curves: Mapping[str, Curves], *, title: str, target: float | None = None
) -> None:
    """Draw interquartile means over seeds with 95 % intervals, a line per configuration, as PNG.

    With too few seeds for an interval every seed has its own thin line instead.
    """
    from matplotlib.ticker import EngFormatter

    has_bands = any(len(group.values) >= FEWEST_SEEDS for group in curves.values())
    note = " (bands: 95 % interval over seeds)" if has_bands else ""
    with _axes(path, title, f"Environment steps{note}", "Mean episode return") as axes:
        for index, (name, group) in enumerate(curves.items()):
            _draw_curves(axes, index, name, group)
        if target is not None:
            axes.axhline(target, color=MUTED, linewidth=1.0, linestyle=":", label="target")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.5M
        axes.xaxis.get_major_locator().set_params(steps=ROUND)
        axes.margins(x=0.01)
        # The range of every seed's values; a band may reach far beyond it and is cut.
        axes.set_ylim(*value_range([group.values for group in curves.values()]))


def _draw_curves(axes: Any, index: int, name: str, group: Curves) -> None:
    # Another line style when the colors repeat.
    look = {"color": color(index), "linestyle": _LINES[index // len(COLORS) % len(_LINES)]}
    label = f"{name} ({seed_count(len(group.values))})"
    group = group.thinned()  # the eye sees no more points, and each takes a bootstrap
    drawn = band(group)
    if drawn is None:  # too few seeds for an interval, so each is shown
        for number, values in enumerate(group.values):
            axes.plot(
                group.steps, values, linewidth=1.2, label=label if not number else None, **look
            )
        return
    middle, low, high = drawn
    axes.fill_between(group.steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.plot(group.steps, middle, linewidth=1.8, label=label, **look)


def plot_standings(path: Path, standings: Sequence[Standing], *, title: str) -> None:
    """Draw each seed's score as a dot, with interquartile mean and interval, as PNG."""
    label = "Return: seeds (dots), interquartile mean and its 95 % interval (bar)"
    with _rows(path, title, label, [standing.experiment for standing in standings]) as axes:
        for row, standing in enumerate(standings):
            _draw_estimate(axes, row, standing.iqm, standing.interval, color(row))
            dot = {"markersize": 4.5, "alpha": 0.8, "mec": "white", "mew": 0.6}
            axes.plot(standing.scores, [row] * len(standing.scores), "o", color=color(row), **dot)


def plot_improvements(path: Path, improvements: Sequence[Improvement], *, title: str) -> None:
    """Draw the probability that one experiment is better than another, with its interval."""
    names = [f"{improvement.better}  >  {improvement.than}" for improvement in improvements]
    label = "Probability that a run of the first does better"
    with _rows(path, title, label, names) as axes:
        for row, improvement in enumerate(improvements):
            _draw_estimate(axes, row, improvement.probability, improvement.interval, color(0))
        axes.axvline(0.5, color=MUTED, linewidth=1.0, linestyle=":")  # no difference
        axes.set_xlim(-0.02, 1.02)


def _draw_estimate(
    axes: Any, row: int, value: float, interval: tuple[float, float] | None, shade: str
) -> None:
    """Draw a value as a stroke, and its interval, where there is one, as a bar behind it."""
    if interval is not None:
        bar = {"alpha": 0.35, "linewidth": 9.0, "solid_capstyle": "butt"}
        axes.plot(interval, [row, row], color=shade, **bar)
    axes.plot([value], [row], color=shade, marker="|", markersize=16, markeredgewidth=2.5)


@contextlib.contextmanager
def _rows(path: Path, title: str, x_label: str, names: Sequence[str]) -> Iterator[Any]:
    """Yield axes with a row for each name, the first at the top, and write them as PNG."""
    height = 1.15 + _ROW * max(len(names), 1)
    with _axes(path, title, x_label, "", height=height, grid="x") as axes:
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        yield axes


def _bins(returns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return bin edges by Freedman and Diaconis; equal returns get one visible bin."""
    low, high = float(returns.min()), float(returns.max())
    if high - low <= 1e-9 * max(1.0, abs(high)):
        half = max(0.5, abs(high) * 0.05)
        return np.linspace(low - half, high + half, 12)
    # The quartiles of very uneven returns may coincide; then there is no width to divide by.
    quarter, three_quarters = np.quantile(returns, [0.25, 0.75])
    width = 2.0 * (three_quarters - quarter) / np.cbrt(len(returns))
    count = int(np.ceil((high - low) / width)) if width > 0 else _MOST_BINS
    return np.linspace(low, high, min(max(count, 5), _MOST_BINS) + 1)


def _number(value: float) -> str:
    """Format four significant digits, with a proper minus sign."""
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def color(index: int) -> str:
    """Return the color of the series with this number."""
    return COLORS[index % len(COLORS)]


def seed_count(n: int) -> str:
    """Return how many seeds there are, in words for a label."""
    return f"{n} seed{'s' if n > 1 else ''}"


@contextlib.contextmanager
def _axes(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    *,
    height: float = SIZE[1],
    grid: Literal["x", "y"] = "y",
) -> Iterator[Any]:
    """Yield empty axes in our style, not the user's, and write them as PNG."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(SIZE[0], height), dpi=_DPI, layout="constrained")
        # Without pyplot, which would look for a display and keep every figure in memory.
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_axisbelow(True)
        axes.grid(axis=grid)
        yield axes
        handles, _ = axes.get_legend_handles_labels()
        if handles:  # below the axes, where a legend covers no data
            n_columns = min(3 if len(handles) > 4 else 2, len(handles))
            figure.legend(loc="outside lower left", ncols=n_columns, frameon=False)
        content = io.BytesIO()
        # The default metadata names matplotlib's version, which would change the bytes.
        figure.savefig(content, format="png", metadata={"Software": None})
        files.write_whole(path, content.getvalue())


def value_range(values: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Return a range that holds all finite values with a margin; (0, 1) without any."""
    present = np.concatenate([group[np.isfinite(group)] for group in values] or [np.zeros(0)])
    if not len(present):
        return 0.0, 1.0
    low, high = float(present.min()), float(present.max())
    margin = 0.06 * (high - low) or max(0.5, 0.05 * abs(high))
    return low - margin, high + margin
