"""Figures as files: charts of a comparison, and a histogram of returns.

With the same version of matplotlib equal data give equal bytes: no dates, a fixed resolution,
matplotlib's own fonts, and a style that ignores the user's settings. No display is needed.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.evaluation.charts import ROUND, Chart, color
from pipeline.evaluation.statistics import summarize

SIZE = (7.0, 3.9)
_DPI = 150
INK, MUTED, GRID = "#22272e", "#6b7280", "#e5e7eb"
# DejaVu Sans comes with matplotlib, so figures look the same on every machine.
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.parse_math": False,  # a dollar sign in a name starts no formula
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
_MOST_BINS = 30
_ROW = 0.42


def plot(path: Path, chart: Chart) -> None:
    """Write a chart of a comparison as PNG."""
    (_plot_curves if chart.series else _plot_rows)(path, chart)


def _plot_curves(path: Path, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter

    with _axes(path, chart.title, chart.x_label, chart.y_label) as axes:
        for series in chart.series:
            # A chart's dash pattern is text, as in SVG; matplotlib takes numbers.
            dash = tuple(map(float, series.dash.split()))
            look = {"color": series.color, "linestyle": (0, dash) if dash else "-"}
            if (band := series.band) is not None:
                fill = {"color": series.color, "alpha": 0.18, "linewidth": 0}
                axes.fill_between(series.steps, *band, **fill)
            label: str | None = series.label
            thin, thick = {"linewidth": 0.6, "alpha": 0.3}, {"linewidth": 1.8 if band else 1.2}
            for _, values, is_thin in series.lines:
                width = thin if is_thin else thick
                axes.plot(series.steps, values, label=None if is_thin else label, **width, **look)
                # The legend has one entry for each experiment, not for each seed.
                label = label if is_thin else None
        if chart.mark is not None:
            axes.axhline(chart.mark, color=MUTED, linewidth=1.0, linestyle=":", label="target")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # ticks such as 1.5M
        axes.xaxis.get_major_locator().set_params(steps=ROUND)
        axes.margins(x=0.01)
        # The axis has the range of all seeds' values; a band that reaches outside it is clipped.
        axes.set_ylim(*chart.y)


def _plot_rows(path: Path, chart: Chart) -> None:
    names = [row.name for row in chart.rows]
    height = 1.15 + _ROW * len(names)
    with _axes(path, chart.title, chart.x_label, "", height=height, grid="x") as axes:
        axes.set_yticks(range(len(names)), names)
        # The axis is reversed, so that the first row is at the top, as in the table.
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        for y, row in enumerate(chart.rows):
            for ends, alpha, width in ((row.wider, 1.0, 1.0), (row.interval, 0.35, 9.0)):
                if ends is not None:
                    bar = {"alpha": alpha, "linewidth": width, "solid_capstyle": "butt"}
                    axes.plot(ends, [y, y], color=row.color, **bar)
            stroke = {"marker": "|", "markersize": 16, "markeredgewidth": 2.5}
            axes.plot([row.value], [y], color=row.color, **stroke)
            dot = {"markersize": 4.5, "alpha": 0.8, "mec": "white", "mew": 0.6}
            axes.plot([x for x, _ in row.dots], [y] * len(row.dots), "o", color=row.color, **dot)
        if chart.mark is not None:
            axes.axvline(chart.mark, color=MUTED, linewidth=1.0, linestyle=":")
        margin = 0.02 * (chart.x[1] - chart.x[0])
        axes.set_xlim(chart.x[0] - margin, chart.x[1] + margin)


def plot_returns(path: Path, returns: Sequence[float], *, title: str) -> None:
    """Write a histogram of episode returns with their mean and its 95 % interval as PNG."""
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


def _bins(returns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of bins by the rule of Freedman and Diaconis (1981).

    There are at least 5 and at most 30 bins; equal returns get 11 bins around their value.
    """
    low, high = float(returns.min()), float(returns.max())
    if high - low <= 1e-9 * max(1.0, abs(high)):
        # Equal returns have no spread: the bins have a fixed range around the value.
        half = max(0.5, abs(high) * 0.05)
        return np.linspace(low - half, high + half, 12)
    # Quartiles may coincide, and the rule then gives a width of 0.
    quarter, three_quarters = np.quantile(returns, [0.25, 0.75])
    width = 2.0 * (three_quarters - quarter) / np.cbrt(len(returns))
    count = int(np.ceil((high - low) / width)) if width > 0 else _MOST_BINS
    return np.linspace(low, high, min(max(count, 5), _MOST_BINS) + 1)


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


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
    """Yield empty axes with the style `_STYLE`, and write the figure as PNG after the block."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(SIZE[0], height), dpi=_DPI, layout="constrained")
        # pyplot is not used, because it would look for a display and keep every figure in memory.
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_axisbelow(True)
        axes.grid(axis=grid)
        yield axes
        handles, _ = axes.get_legend_handles_labels()
        if handles:  # the legend is below the axes, where it covers no data
            n_columns = min(3 if len(handles) > 4 else 2, len(handles))
            figure.legend(loc="outside lower left", ncols=n_columns, frameon=False)
        content = io.BytesIO()
        # The default metadata has matplotlib's version, which would change the bytes.
        figure.savefig(content, format="png", metadata={"Software": None})
        files.write_whole(path, content.getvalue())
