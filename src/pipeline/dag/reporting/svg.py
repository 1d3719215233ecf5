"""Coordinates of charts in the report's page; `charts.html.j2` writes the SVG.

The page has inline SVG and no plotting library in JavaScript, which would take megabytes. So any
browser shows the page, even from a file, without network and with scripts switched off.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.charts import ROUND, Chart
from pipeline.evaluation.tables import number

Floats = NDArray[np.float64]

WIDTH = 760
_HEIGHT = 370
# Margins of the plotted area in pixels, with room for the labels at the left and the bottom.
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 28, 46
# Height in pixels of each row of a chart that has rows instead of curves.
ROW = 46
# Largest number of parts into which ticks divide an axis.
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart: its range of values, and the pixel coordinates of its ends."""

    low: float
    high: float
    first: float
    """Pixel coordinate of the value `low`."""
    last: float
    """Pixel coordinate of the value `high`."""

    def at(self, values: Floats | float) -> Floats:
        """Return the pixel coordinate of each value."""
        share = (np.asarray(values, dtype=np.float64) - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def place(self, value: float) -> str:
        """Return the pixel coordinate of one value as text."""
        return f"{float(self.at(value)):.1f}"

    def ticks(self, *, steps: bool = False) -> list[tuple[str, str]]:
        """Return round values on the axis, each as pixel coordinate and label."""
        from matplotlib.ticker import EngFormatter, MaxNLocator

        text = EngFormatter(sep="") if steps else number  # steps are written like 1.5M
        ticks = MaxNLocator(_TICKS, steps=ROUND).tick_values(self.low, self.high)
        return [
            (self.place(value), text(float(value)))
            for value in ticks
            # The locator also returns values outside the axis. The tolerance keeps ticks at the
            # ends of the axis in spite of rounding.
            if self.low - 1e-9 <= value <= self.high + 1e-9
        ]


@dataclass(frozen=True, slots=True)
class Canvas:
    """Height of a chart in pixels, and its axes."""

    height: int
    x: Axis
    y: Axis

    def points(self, steps: Floats, values: Floats) -> str:
        """Return the attribute `points` of an SVG polyline."""
        pairs = zip(self.x.at(steps), self.y.at(values), strict=True)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def canvas_of(chart: Chart) -> Canvas:
    """Return the canvas of a chart; without curves it is as high as the chart's rows need."""
    x = Axis(*chart.x, _LEFT, WIDTH - _RIGHT)
    if chart.series:
        # SVG counts pixels from the top, so the lowest value has the largest pixel coordinate.
        return Canvas(_HEIGHT, x, Axis(*chart.y, _HEIGHT - _BOTTOM, _TOP))
    bottom = ROW * len(chart.rows)
    return Canvas(bottom + _BOTTOM, x, Axis(0.0, 1.0, bottom, 0.0))


def words(values: Floats, *, steps: bool = False) -> str:
    """Return numbers as text, separated by spaces."""
    return " ".join(f"{value:.0f}" if steps else number(float(value)) for value in values)
