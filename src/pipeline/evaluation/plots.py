"""Figures for reports: returns of episodes, and learning curves over seeds.

Equal data give equal bytes with one version of matplotlib: no dates, a fixed size and resolution,
the fonts that come with it, and a style that a user's own settings do not reach. No
display is used.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.evaluation.statistics import interval_over_seeds, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_SIZE = (7.0, 3.9)
_DPI = 150
_INK, _MUTED, _GRID = "#22272e", "#6b7280", "#e5e7eb"
_COLORS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#57534e")
_LINES = ("-", "--", "-.", ":")
_MOST_BINS = 30
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "legend.fontsize": 9.5,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curves:
    """Learning curves of one configuration, one per seed, on common steps."""

    steps: NDArray[np.float64]
    """[points] ascending."""
    values: NDArray[np.float64]
    """[seeds, points]; NaN where a seed has no value."""


def align_curves(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Curves:
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
    from matplotlib import style

    summary = summarize(returns)
    with style.context(["default", _STYLE]):
        axes = _axes(title, "Episode return", "Episodes")
        bins = _bins(np.asarray(returns, dtype=np.float64))
        axes.hist(returns, bins=bins, color=_COLORS[0], alpha=0.55, edgecolor="white")
        label = f"mean {_number(summary.mean)}"
        if summary.ci_low is not None and summary.ci_high is not None:
            axes.axvspan(summary.ci_low, summary.ci_high, color=_COLORS[1], alpha=0.35, linewidth=0)
            label += f" (95 % interval {_number(summary.ci_low)} to {_number(summary.ci_high)})"
        axes.axvline(summary.mean, color=_COLORS[1], linewidth=2.0, label=label)
        axes.yaxis.get_major_locator().set_params(integer=True)
        _legend(axes)
        _save(axes, path)


def plot_learning_curves(
    path: Path,
    curves: Mapping[str, Curves],
    *,
    title: str,
    y_label: str = "Mean episode return",
) -> None:
    """Mean over seeds with its 95 % interval, one line per configuration, as PNG.

    With a single seed the line is that seed's curve and there is no band.
    """
    from matplotlib import style

    with style.context(["default", _STYLE]):
        has_bands = any(len(group.values) > 1 for group in curves.values())
        note = " (bands: 95 % interval over seeds)" if has_bands else ""
        axes = _axes(title, f"Environment steps{note}", y_label)
        for index, (name, group) in enumerate(curves.items()):
            color = _COLORS[index % len(_COLORS)]
            line = _LINES[index // len(_COLORS) % len(_LINES)]
            middle, low, high = interval_over_seeds(group.values)
            n_seeds = len(group.values)
            label = f"{name} ({n_seeds} seed{'s' if n_seeds > 1 else ''})"
            axes.fill_between(group.steps, low, high, color=color, alpha=0.18, linewidth=0)
            axes.plot(group.steps, middle, color=color, linestyle=line, linewidth=1.8, label=label)
        axes.xaxis.set_major_formatter(_step_formatter())
        axes.margins(x=0.01)
        _fit_to_values(axes, [group.values for group in curves.values()])
        _legend(axes)
        _save(axes, path)


def _axes(title: str, x_label: str, y_label: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    return axes


def _fit_to_values(axes: Any, values: Sequence[NDArray[np.float64]]) -> None:
    """Show every seed's values; a band of two seeds may reach far beyond and is cut."""
    present = np.concatenate([group[np.isfinite(group)] for group in values] or [np.zeros(0)])
    if len(present):
        low, high = float(present.min()), float(present.max())
        margin = 0.06 * (high - low) or max(0.5, 0.05 * abs(high))
        axes.set_ylim(low - margin, high + margin)


def _legend(axes: Any) -> None:
    """Below the axes, where it covers no data."""
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return
    axes.figure.legend(
        loc="outside lower left",
        ncols=min(3 if len(handles) > 4 else 2, len(handles)),
        frameon=False,
    )


def _save(axes: Any, path: Path) -> None:
    content = io.BytesIO()
    # The default metadata names matplotlib's version, which would change the bytes.
    axes.figure.savefig(content, format="png", metadata={"Software": None})
    files.write_whole(path, content.getvalue())


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


def _step_formatter() -> Any:
    """1500000 as 1.5M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")
