"""The look of all figures, and how they are written.

Equal data give equal bytes with one version of matplotlib: no dates, a fixed resolution, the fonts
that come with it, and a style that a user's own settings do not reach. No display is used.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline import files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SIZE = (7.0, 3.9)
_DPI = 150
INK, MUTED, GRID = "#22272e", "#6b7280", "#e5e7eb"
_COLORS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#57534e")
_LINES = ("-", "--", "-.", ":")
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
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


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw with our style, whatever the user's own is."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


def color_of(index: int) -> str:
    """The color of the series with this number."""
    return _COLORS[index % len(_COLORS)]


def line_of(index: int) -> str:
    """Its line style, another one when the colors begin again."""
    return _LINES[index // len(_COLORS) % len(_LINES)]


def axes_of(
    title: str,
    x_label: str,
    y_label: str,
    *,
    height: float = SIZE[1],
    grid: Literal["x", "y"] = "y",
) -> Any:
    """Empty axes in a new figure.

    Args:
        title: above it, at the left.
        x_label: below it.
        y_label: beside it.
        height: of the figure in inches.
        grid: which axis has lines, `x` or `y`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_axisbelow(True)
    axes.grid(axis=grid)
    return axes


def fit_to_values(axes: Any, values: Sequence[NDArray[np.float64]]) -> None:
    """Show every seed's values; a band may reach far beyond and is cut."""
    present = np.concatenate([group[np.isfinite(group)] for group in values] or [np.zeros(0)])
    if len(present):
        low, high = float(present.min()), float(present.max())
        margin = 0.06 * (high - low) or max(0.5, 0.05 * abs(high))
        axes.set_ylim(low - margin, high + margin)


def legend(axes: Any) -> None:
    """Below the axes, where it covers no data."""
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return
    axes.figure.legend(
        loc="outside lower left",
        ncols=min(3 if len(handles) > 4 else 2, len(handles)),
        frameon=False,
    )


def save(axes: Any, path: Path) -> None:
    """Write the figure as PNG."""
    content = io.BytesIO()
    # The default metadata names matplotlib's version, which would change the bytes.
    axes.figure.savefig(content, format="png", metadata={"Software": None})
    files.write_whole(path, content.getvalue())


def step_formatter() -> Any:
    """1500000 as 1.5M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")
