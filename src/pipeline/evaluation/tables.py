"""A comparison as tables: for people, as CSV, and as JSON."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from pipeline.evaluation import statistics
from pipeline.evaluation.comparison import EVALUATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.evaluation.comparison import Standing, Task

TOLERANCE = "90 % tolerance"
HEADER = (
    *("Experiment", "Seeds", "IQM", "95 % interval", TOLERANCE),
    *("Mean", "Steps to target", "Mean height"),
)
WALL_CLOCK = "Training time"
_UNKNOWN = (None, None)
PAIRS_HEADER = ("More probably better", "Than", "Probability", "95 % interval")


def rows(task: Task, *, wall_clock: bool = False) -> list[tuple[str, ...]]:
    """Return the cells below `HEADER`, and `WALL_CLOCK` where asked, a row per experiment."""
    table: list[tuple[str, ...]] = []
    for one in task.standings:
        cells = (
            one.experiment,
            str(len(one.seeds)),
            number(one.iqm),
            ends(one.interval),
            ends(one.tolerance),
            number(one.mean),
            _steps(one),
            "-" if one.area is None else number(one.area),
        )
        table.append((*cells, duration(one.seconds)) if wall_clock else cells)
    return table


def pairs(task: Task) -> list[tuple[str, ...]]:
    """Return the cells below `PAIRS_HEADER`."""
    return [
        (one.better, one.than, f"{one.probability:.2f}", ends(one.interval))
        for one in task.improvements
    ]


def notes(task: Task) -> list[str]:
    """Return sentences that say what the numbers are."""
    sentences = [
        "Returns are of the exported policies, with deterministic actions."
        if task.score == EVALUATED
        else "Returns are those of the last tenth of training: not every run was evaluated."
    ]
    if task.target is not None:
        sentences.append(
            f"Target: a mean return of {number(task.target)} in training, "
            f"{task.fraction * 100:.0f} % of the way from the lowest start to the best end."
        )
    if task.detectable is not None:
        fewest = min(len(one.seeds) for one in task.standings if len(one.seeds) > 1)
        sentences.append(
            f"With {fewest} seeds, a difference of means below {number(task.detectable)} would not "
            "be seen (t-test at 5 %, power 80 %, spread as within these experiments)."
        )
    return sentences


def cautions(task: Task) -> list[str]:
    """Return which experiments have few seeds or are not exact, and what that means."""
    by_caution: dict[str, list[str]] = {}
    for one in task.standings:
        if caution := statistics.caution(len(one.seeds)):
            by_caution.setdefault(caution, []).append(one.experiment)
    few = [f"{', '.join(names)}: {caution}." for caution, names in by_caution.items()]
    return few + [
        f"{one.experiment}, seed {', '.join(map(str, one.not_exact))}: interrupted and not resumed "
        "exactly, so another run of it gives other numbers."
        for one in task.standings
        if one.not_exact
    ]


def standing_records(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a flat record for each experiment and task; what is not known is None."""
    records = []
    for task in tasks:
        for one in task.standings:
            values = (
                *(task.environment, task.behavior, one.experiment, len(one.seeds), task.score),
                *(one.iqm, *(one.interval or _UNKNOWN), *(one.tolerance or _UNKNOWN), one.mean),
                *(task.target, one.reached, one.steps_to_target, one.area, one.seconds),
            )
            columns = (*STANDING_COLUMNS, WALL_CLOCK_COLUMN)
            records.append(dict(zip(columns, values, strict=True)))
    return records


def pair_records(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a flat record for each pair of experiments on a task."""
    records = []
    for task in tasks:
        for one in task.improvements:
            pair = (one.better, one.than, one.probability, *(one.interval or _UNKNOWN))
            values = (task.environment, task.behavior, *pair)
            records.append(dict(zip(PAIR_COLUMNS, values, strict=True)))
    return records


def csv_text(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Write these columns of records as CSV, numbers with six significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # An empty cell for None: "None" would make the column text for whoever reads the file.
    writer.writerows([_cell(record[name]) for name in columns] for record in records)
    return text.getvalue()


STANDING_COLUMNS = (
    "environment",
    "behavior",
    "experiment",
    "seeds",
    "score",
    "iqm",
    "iqm_low",
    "iqm_high",
    "tolerance_low",
    "tolerance_high",
    "mean",
    "target",
    "seeds_at_target",
    "steps_to_target",
    "mean_height",
)
WALL_CLOCK_COLUMN = "training_s"
PAIR_COLUMNS = ("environment", "behavior", "better", "than", "probability", "low", "high")


def number(value: float) -> str:
    """Format four significant digits."""
    return f"{value:.4g}"


def ends(interval: tuple[float, float] | None) -> str:
    """Format an interval, or say that there are too few seeds for one."""
    return "too few seeds" if interval is None else " to ".join(map(number, interval))


def duration(seconds: float | None) -> str:
    """Format seconds as a person says them."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


def _steps(one: Standing) -> str:
    if not one.curves:
        return "-"
    n = len(one.curves)
    if one.steps_to_target is None:
        return f"not reached ({one.reached} of {n} seeds)"
    shown = f"{one.steps_to_target:,.0f}"
    return shown if one.reached == n else f"{shown} ({one.reached} of {n} seeds)"


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
