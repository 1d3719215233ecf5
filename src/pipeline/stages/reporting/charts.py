"""Charts of the report's page: what `charts.html.j2` draws as SVG, and where.

Inline SVG, because a plotting library in JavaScript would take megabytes: any browser shows the
page, even from a file, without network and with scripts switched off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.evaluation.plots import COLORS, ROUND, Curves, band, color, seed_count, value_range
from pipeline.evaluation.tables import ends, number, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.evaluation.comparison import Standing, Task

WIDTH = 760
_HEIGHT = 370
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 28, 46
ROW = 46
_TICKS = 5
_DASHES = ("", "7 4", "2 4", "8 3 2 3")
"""Dash patterns of the lines; the next one is used when the colors repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Values along one side, and the pixels at which they lie."""

    low: float
    high: float
    first: float
    """Pixel of `low`."""
    last: float
    """Pixel of `high`."""

    def at(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the pixels of values."""
        share = (np.asarray(values, dtype=np.float64) - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def place(self, value: float) -> str:
        """Return the pixel of one value as text."""
        return f"{float(self.at(value)):.1f}"

    def ticks(self, *, steps: bool = False) -> list[tuple[str, str]]:
        """Return pixel and text of round values between the ends."""
        from matplotlib.ticker import EngFormatter, MaxNLocator

        text = EngFormatter(sep="") if steps else number  # 1.5M
        ticks = MaxNLocator(_TICKS, steps=ROUND).tick_values(self.low, self.high)
        return [
            (self.place(value), text(float(value)))
            for value in ticks
            # The locator goes beyond the ends, and a tick at an end may miss it by a rounding.
            if self.low - 1e-9 <= value <= self.high + 1e-9
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A learning curve of one seed, or the middle of several."""

    name: str
    points: str
    """Points of an SVG polyline."""
    values: str
    """Returns at these points, separated by spaces."""
    is_middle: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """An experiment in a chart of learning curves."""

    label: str
    color: str
    dash: str
    steps: str
    """Steps at the points of its lines, separated by spaces."""
    lines: tuple[Line, ...]
    band: str
    """Outline of the 95 % interval; empty with too few seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveChart:
    """Learning curves over environment steps."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    target: float | None
    height: int = _HEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An estimate with its interval, over single values."""

    name: str
    color: str
    text: str
    value: float
    interval: tuple[float, float] | None
    wider: tuple[float, float] | None = None
    """The tolerance interval."""
    dots: tuple[tuple[float, str], ...] = ()
    """Each single value, and its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChart:
    """Estimates, one row below the other."""

    x: Axis
    rows: tuple[Row, ...]
    label: str
    mark: float | None = None
    """A value to compare with."""

    @property
    def height(self) -> int:
        """In pixels."""
        return ROW * len(self.rows) + _BOTTOM


def scores(task: Task) -> RowChart:
    """Return the chart of a task's scores."""
    rows = tuple(_standing(index, standing) for index, standing in enumerate(task.standings))
    return RowChart(x=_around(rows), rows=rows, label="Return")


def improvements(task: Task) -> RowChart:
    """Return the chart of the probabilities of improvement; without rows where seeds are few."""
    rows = tuple(
        Row(
            name=f"{improvement.better}  >  {improvement.than}",
            color=color(0),
            text=f"{improvement.better} better than {improvement.than}: "
            f"{improvement.probability:.2f}, 95 % interval {spread(improvement)}",
            value=improvement.probability,
            interval=improvement.interval,
        )
        for improvement in task.estimates
    )
    label = "Probability that a run of the first does better"
    return RowChart(x=_axis(0.0, 1.0), rows=rows, label=label, mark=0.5)


def learning(task: Task, curves: Mapping[str, Curves]) -> CurveChart:
    """Return the chart of a task's learning curves; `curves` has at least one."""
    steps = [group.steps for group in curves.values()]
    x = _axis(min(s[0] for s in steps), max(s[-1] for s in steps))
    low, high = value_range([group.values for group in curves.values()])
    # SVG counts pixels from the top, so the low end has the greater pixel.
    y = Axis(low=low, high=high, first=_HEIGHT - _BOTTOM, last=_TOP)
    seeds = {standing.experiment: standing.trained for standing in task.standings}
    return CurveChart(
        x=x,
        y=y,
        series=tuple(
            # Thinned, since the page holds every point twice, as a pixel and as a number.
            _series(index, name, seeds[name], group.thinned(), x, y)
            for index, (name, group) in enumerate(curves.items())
        ),
        # The axis fits the curves; a target outside of it would lie beside the chart.
        target=task.target if task.target is not None and low <= task.target <= high else None,
    )


def _series(
    index: int, name: str, seeds: Sequence[int], curves: Curves, x_axis: Axis, y_axis: Axis
) -> Series:
    """Return an experiment's curves as SVG lines; `seeds` are those of the curves' rows."""
    x = x_axis.at(curves.steps)

    def line(label: str, values: NDArray[np.float64], *, is_middle: bool = False) -> Line:
        text = " ".join(number(float(value)) for value in values)
        points = _points(x, y_axis.at(values))
        return Line(name=f"{name}, {label}", points=points, values=text, is_middle=is_middle)

    lines = [line(f"seed {k}", values) for k, values in zip(seeds, curves.values, strict=True)]
    outline, drawn = "", band(curves)
    if drawn is not None:
        middle, low, high = drawn
        lines.append(line("IQM", middle, is_middle=True))
        forward, back = _points(x, y_axis.at(low)), _points(x[::-1], y_axis.at(high[::-1]))
        outline = f"{forward} {back}"
    return Series(
        label=f"{name} ({seed_count(len(seeds))})",
        color=color(index),
        dash=_DASHES[index // len(COLORS) % len(_DASHES)],
        steps=" ".join(f"{step:.0f}" for step in curves.steps),
        lines=tuple(lines),
        band=outline,
    )


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return " ".join(f"{x_px:.1f},{y_px:.1f}" for x_px, y_px in zip(x, y, strict=True))


def _standing(index: int, standing: Standing) -> Row:
    text = (
        f"{standing.experiment}: IQM {number(standing.iqm)}, "
        f"95 % interval {ends(standing.interval)}"
    )
    wider = standing.tolerance
    return Row(
        name=standing.experiment,
        color=color(index),
        text=text if wider is None else f"{text}, 90 % tolerance {ends(wider)}",
        value=standing.iqm,
        interval=standing.interval,
        wider=wider,
        dots=tuple(
            (score, f"{standing.experiment}, seed {seed}: {number(score)}")
            for seed, score in zip(standing.seeds, standing.scores, strict=True)
        ),
    )


def _around(rows: Sequence[Row]) -> Axis:
    """Return an axis that holds everything in the rows."""
    values = [[row.value, *(dot for dot, _ in row.dots)] for row in rows]
    values += [list(interval) for row in rows for interval in (row.interval, row.wider) if interval]
    low, high = value_range([np.array(group) for group in values])
    return _axis(low, high)


def _axis(low: float, high: float) -> Axis:
    # A curve of one point has no width.
    return Axis(
        low=float(low),
        high=float(high if high > low else low + 1.0),
        first=_LEFT,
        last=WIDTH - _RIGHT,
    )
