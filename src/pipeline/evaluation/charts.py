"""The contents of a comparison's charts, in the units of the data.

`plots` draws a chart with matplotlib into a file; the report's page draws it as interactive SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline import seeding
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import EVALUATED, ExperimentScore, Task
from pipeline.evaluation.statistics import FEWEST_SEEDS, interquartile_means, iqm_band

Floats = NDArray[np.float64]

COLORS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#57534e")
# Lengths of strokes and gaps, as in SVG's `stroke-dasharray`; empty is a solid line.
DASHES = ("", "7 4", "2 4", "8 3 2 3")
"""Dash patterns of lines: when all colors are used, they repeat with the next pattern."""
ROUND = (1, 2, 5, 10)
"""The distance between two ticks of an axis is one of these numbers times a power of ten."""
SCORES = (
    "Scores. A dot is the score of a seed, the upright line the interquartile mean over seeds, the "
    "wide bar its 95 % interval, if there are enough seeds."
)
LEARNING = (
    "Learning curves. Mean return of the episodes that ended in each summary period, over "
    "environment steps: the interquartile mean over seeds with its 95 % interval as a band, or "
    "the curve of each seed if there are too few seeds. Actions in training are sampled"
)
IMPROVEMENTS = (
    "Probability that a run of the first experiment has a higher score than a run of the second; "
    "at the dotted line neither is better."
)
_MOST_POINTS = 200


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """Learning curves of one experiment: one for each seed, and their interquartile mean."""

    name: str
    color: str
    dash: str
    steps: Floats
    """[points] environment steps, ascending; the same for all seeds."""
    seeds: tuple[int, ...]
    values: Floats
    """[seeds, points] mean episode returns."""
    middle: Floats
    """[points] interquartile mean over the seeds."""
    band: tuple[Floats, Floats] | None
    """95 % interval of `middle`; None with too few seeds: each seed then has a thick line."""

    @property
    def label(self) -> str:
        """Name of the experiment and its number of seeds."""
        return f"{self.name} ({len(self.seeds)} seed{'s' * (len(self.seeds) > 1)})"

    @property
    def lines(self) -> list[tuple[str, Floats, bool]]:
        """(name, values [points], whether the line is thin) of each line to draw."""
        thin = self.band is not None
        rows = zip(self.seeds, self.values, strict=True)
        lines = [(f"{self.name}, seed {seed}", values, thin) for seed, values in rows]
        return [*lines, (f"{self.name}, IQM", self.middle, False)] if thin else lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One estimate in a chart, with its interval and the values from which it was computed."""

    name: str
    color: str
    text: str
    value: float
    interval: tuple[float, float] | None
    wider: tuple[float, float] | None = None
    """Tolerance interval, drawn as a thin line; None if it is unknown."""
    dots: tuple[tuple[float, str], ...] = ()
    """(value, text) of each value from which the estimate was computed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chart:
    """The content of a chart: learning curves over environment steps, or rows of estimates."""

    file: str
    """Name of this chart in file names."""
    what: str
    title: str
    caption: str
    x: tuple[float, float]
    x_label: str
    mark: float | None = None
    """A value to draw as a dotted line, on the y axis of curves or the x axis of estimates."""
    rows: tuple[Row, ...] = ()
    series: tuple[Series, ...] = ()
    y: tuple[float, float] = (0.0, 1.0)
    """Range of the y axis of curves; rows of estimates do not use it."""
    y_label: str = ""

    @property
    def heading(self) -> str:
        """Title of the chart, with the name of the task."""
        return f"{self.what} on {self.title}"


def charts_of(task: Task) -> list[Chart]:
    """Return a task's charts: scores and, if it has the data, learning curves and improvements."""
    charts = (scores(task), learning(task), improvements(task))
    return [chart for chart in charts if chart is not None]


def scores(task: Task) -> Chart:
    """Return the chart of a task's scores."""
    rows = tuple(_standing(index, standing) for index, standing in enumerate(task.standings))
    values = [np.array([row.value, *(dot for dot, _ in row.dots)]) for row in rows]
    # The axis also has to contain the intervals, or they would be cut off.
    values += [np.array(ends) for row in rows for ends in (row.interval, row.wider) if ends]
    wider = " The thin line is the 90 % tolerance interval." * any(row.wider for row in rows)
    return Chart(
        file="returns",
        what="Returns",
        title=task.name,
        caption=f"{SCORES}{wider}",
        x=value_range(values),
        rows=rows,
        x_label="Return",
    )


def improvements(task: Task) -> Chart | None:
    """Return the chart of a task's probabilities of improvement; None with too few seeds."""
    rows = tuple(
        Row(
            name=f"{improvement.better}  >  {improvement.than}",
            color=color(0),
            text=f"{improvement.better} better than {improvement.than}: "
            f"{improvement.probability:.2f}, 95 % interval {tables.spread(improvement)}",
            value=improvement.probability,
            interval=improvement.interval,
        )
        for improvement in task.estimates
    )
    if not rows:
        return None
    return Chart(
        file="improvement",
        what="Probability of improvement",
        title=task.name,
        caption=IMPROVEMENTS,
        # The axis has the whole range of a probability, so that charts can be compared.
        x=(0.0, 1.0),
        rows=rows,
        x_label="Probability that a run of the first does better",
        mark=0.5,
    )


def learning(task: Task) -> Chart | None:
    """Return the chart of a task's learning curves; None without curves."""
    aligned = [
        (standing, *align_curves([(curve.steps, curve.returns) for curve in standing.curves]))
        for standing in task.standings
        if standing.curves
    ]
    # Curves of seeds without common steps cannot be averaged.
    aligned = [(standing, steps, values) for standing, steps, values in aligned if len(steps)]
    if not aligned:
        return None
    low, high = value_range([values for _, _, values in aligned])
    series = tuple(_series(index, *entry) for index, entry in enumerate(aligned))
    caption = f"{LEARNING}."
    if task.score == EVALUATED and not tables.drew_actions(task):
        caption = (
            f"{LEARNING}; scores are of the most probable actions, and may be higher or lower."
        )
    thin = " Thin lines are seeds." * any(one.band is not None for one in series)
    first = min(float(one.steps[0]) for one in series)
    last = max(float(one.steps[-1]) for one in series)
    return Chart(
        file="learning",
        what="Learning curves",
        title=task.name,
        caption=f"{caption}{thin}",
        x=(first, last if last > first else first + 1.0),  # a curve of one point has no width
        x_label="Environment steps",
        y=(low, high),
        y_label="Mean episode return",
        series=series,
        # The axis fits the curves; a target outside its range is not drawn.
        mark=task.target if task.target is not None and low <= task.target <= high else None,
    )


def align_curves(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[Floats, Floats]:
    """Return the curves of several seeds, interpolated linearly at the same steps.

    Only steps within all curves are kept: where a curve starts or ends, the mean over seeds would
    jump although no policy has changed.

    Returns:
        Steps [points], and values [seeds, points].
    """
    arrays = [(np.asarray(s, dtype=np.float64), np.asarray(v, dtype=np.float64)) for s, v in curves]
    first = max(steps[0] for steps, _ in arrays)
    last = min(steps[-1] for steps, _ in arrays)
    # All steps of all seeds are used, because runs write their summaries at different steps.
    grid = np.unique(np.concatenate([steps for steps, _ in arrays]))
    grid = grid[(grid >= first) & (grid <= last)]
    return grid, np.stack([np.interp(grid, *curve) for curve in arrays])


def _series(index: int, standing: ExperimentScore, steps: Floats, values: Floats) -> Series:
    # More than 200 points cannot be seen, each point needs a bootstrap, and the report's page has
    # each point twice, as a pixel and as a number.
    if (n := len(steps)) > _MOST_POINTS:
        indices = np.unique(np.linspace(0, n - 1, _MOST_POINTS).round().astype(np.int64))
        steps, values = steps[indices], values[:, indices]
    band = None
    if (n := len(values)) >= FEWEST_SEEDS:
        # The seed is fixed, so that equal curves give equal pictures.
        band = iqm_band(values, seeding.stream(0, "curves", n))
    return Series(
        name=standing.experiment,
        color=color(index),
        dash=DASHES[index // len(COLORS) % len(DASHES)],
        steps=steps,
        seeds=tuple(standing.trained),
        values=values,
        # `values.T` has the seeds on the last axis, over which the mean is taken.
        middle=interquartile_means(values.T),
        band=band,
    )


def _standing(index: int, standing: ExperimentScore) -> Row:
    text = (
        f"{standing.experiment}: IQM {tables.number(standing.iqm)}, "
        f"95 % interval {tables.ends(standing.interval)}"
    )
    wider = standing.tolerance
    return Row(
        name=standing.experiment,
        color=color(index),
        text=text if wider is None else f"{text}, 90 % tolerance {tables.ends(wider)}",
        value=standing.iqm,
        interval=standing.interval,
        wider=wider,
        dots=tuple(
            (score, f"{standing.experiment}, seed {seed}: {tables.number(score)}")
            for seed, score in zip(standing.seeds, standing.scores, strict=True)
        ),
    )


def color(index: int) -> str:
    """Return the color of the series number `index`, counted from 0."""
    return COLORS[index % len(COLORS)]


def value_range(values: Sequence[Floats]) -> tuple[float, float]:
    """Return the range of all finite values with a margin; (0, 1) without values."""
    present = np.concatenate([group[np.isfinite(group)] for group in values] or [np.zeros(0)])
    if not len(present):
        return 0.0, 1.0
    low, high = float(present.min()), float(present.max())
    # Equal values have a range of 0, which no axis can show.
    margin = 0.06 * (high - low) or max(0.5, 0.05 * abs(high))
    return low - margin, high + margin
