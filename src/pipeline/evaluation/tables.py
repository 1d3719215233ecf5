"""A comparison as tables of text, as CSV and as JSON."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.evaluation import statistics
from pipeline.evaluation.comparison import EVALUATED, ExperimentScore, Improvement, Task

TOLERANCE = "90 % tolerance"
HEADER = (
    *("Experiment", "Seeds", "IQM", "95 % interval", TOLERANCE),
    *("Mean", "Trained steps", "Steps to target", "Mean height"),
)
WALL_CLOCK = "Training time"
_UNKNOWN = (None, None)
PAIRS_HEADER = ("More probably better", "Than", "Probability", "95 % interval", "By chance")


def rows(task: Task, *, wall_clock: bool = False) -> list[tuple[str, ...]]:
    """Return a row of cells per experiment, with the columns `HEADER`.

    With `wall_clock` there is a further column, `WALL_CLOCK`.
    """
    table: list[tuple[str, ...]] = []
    for standing in task.standings:
        cells = (
            standing.experiment,
            str(len(standing.seeds)),
            number(standing.iqm),
            ends(standing.interval),
            ends(standing.tolerance),
            number(standing.mean),
            budget(standing),
            _steps(standing),
            "-" if standing.area is None else number(standing.area),
        )
        table.append((*cells, duration(standing.seconds)) if wall_clock else cells)
    return table


def pairs(task: Task) -> list[tuple[str, ...]]:
    """Return a row of cells per pair of experiments, with the columns `PAIRS_HEADER`."""
    return [
        (
            improvement.better,
            improvement.than,
            _probability(improvement),
            spread(improvement),
            percent(improvement.chance),
        )
        for improvement in task.improvements
    ]


def conclusion(task: Task) -> str:
    """Return sentences that say which experiment is best, and how certain this is."""
    best = max(task.standings, key=lambda standing: standing.iqm)
    iqms = {standing.experiment: standing.iqm for standing in task.standings}
    name = best.experiment
    against = [pair for pair in task.improvements if name in (pair.better, pair.than)]
    if not against:
        return f"{name} has an IQM of {number(best.iqm)}; there is no other experiment to compare."
    # The limit has a Bonferroni correction: of many comparisons some are significant by chance.
    limit = (1 - statistics.CONFIDENCE) / len(against)
    shown = [pair for pair in against if pair.better == name and pair.chance <= limit]
    equal = [pair for pair in against if iqms[pair.better] == iqms[pair.than]]
    unclear = [pair for pair in against if pair not in (*shown, *equal)]
    others = ", ".join(pair.than if pair.better == name else pair.better for pair in equal)
    sentences = [f"{name} ({number(best.iqm)}) and {others} do equally well."] if equal else []
    for group, verb, doubt, end in (
        (shown, "does better than", "", "."),
        (unclear, "did better than", " on these seeds, which may be luck", ". Run more seeds."),
    ):
        if group:
            names = [pair.than if pair.better == name else pair.better for pair in group]
            others = ", ".join(f"{other} ({number(iqms[other])})" for other in names)
            chances = [pair.chance for pair in group]
            if min(chances) >= 1.0:  # this is so, for example, with one seed each
                sentences.append(
                    f"{name} ({number(best.iqm)}) is above {others}, but so few seeds cannot show "
                    f"a difference{end}"
                )
                continue
            cases = " to ".join(dict.fromkeys(map(percent, (min(chances), max(chances)))))
            sentences.append(
                f"{name} ({number(best.iqm)}) {verb} {others}{doubt}: experiments that are equally "
                f"good would be apart as clearly in {cases} of cases{end}"
            )
    if task.has_unequal_budgets:
        sentences.append(
            "The experiments' trained steps differ, so this is no comparison of equal budgets."
        )
    return " ".join(sentences)


def notes(task: Task) -> list[str]:
    """Return sentences that explain the numbers of the tables."""
    drawn = drew_actions(task)
    how = "stochastic" if drawn else "deterministic"
    of = f" of {', '.join(drawn)}, and deterministic ones of the others" * _is_mixed(task)
    sentences = [
        f"Returns are of the exported policies, with {how} actions{of}."
        if task.score == EVALUATED
        else "Returns are those of the last tenth of training: not every run was evaluated."
    ]
    if task.target is not None and task.scale is not None:
        low, high = map(number, task.scale)
        sentences.append(
            f"Target: a mean return of {number(task.target)} in training, "
            f"{task.fraction * 100:.0f} % of the way from {low}, the lowest first return of an "
            f"experiment, to {high}, the best final one."
        )
    if task.detectable is not None:
        seen = dict.fromkeys((task.differences[0], task.differences[-1]))
        fewest = min(len(standing.seeds) for standing in task.standings if len(standing.seeds) > 1)
        sentences.append(
            f"With {fewest} seeds, a difference of means below {number(task.detectable)} would not "
            f"be seen; here it is {' to '.join(map(number, seen))} (t-test at 5 %, power 80 %, "
            "spread as within these experiments)."
        )
    return sentences


def cautions(task: Task) -> list[str]:
    """Return warnings about unequal budgets, few seeds, inexact resumes, outdated evaluations."""
    by_caution: dict[str, list[str]] = {}
    for standing in task.standings:
        if caution := statistics.caution(len(standing.seeds)):
            by_caution.setdefault(caution, []).append(standing.experiment)
    sentences = [f"{', '.join(names)}: {caution}." for caution, names in by_caution.items()]
    if task.has_unequal_budgets:
        budgets = ", ".join(f"{one.experiment} {budget(one)}" for one in task.standings)
        sentences.insert(
            0,
            f"Trained steps differ: {budgets}. Train all equally long, or compare the mean "
            "heights, which are over the steps that all curves share.",
        )
    if task.score == EVALUATED and _is_mixed(task):
        sentences.append(
            "Some evaluations sampled actions and some did not, which changes returns; give "
            "`evaluation.stochastic` the same value in all experiments."
        )
    inexact = "interrupted and not resumed exactly, so a repeated run gives other numbers"
    outdated = "trained again since its evaluation, which does not count; evaluate it again"
    return sentences + [
        f"{standing.experiment}, seed {', '.join(map(str, seeds))}: {caution}."
        for standing in task.standings
        for seeds, caution in ((standing.not_exact, inexact), (standing.outdated, outdated))
        if seeds
    ]


def drew_actions(task: Task) -> list[str]:
    """Return the names of experiments in which an evaluation drew actions at random."""
    return [standing.experiment for standing in task.standings if standing.stochastic]


def _is_mixed(task: Task) -> bool:
    return 0 < len(drew_actions(task)) < len(task.standings)


def standing_records(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a flat record for each experiment and task; unknown values are None."""
    records = []
    for task in tasks:
        for standing in task.standings:
            budgets = standing.budgets
            values = (
                *(task.environment, task.behavior, standing.experiment, len(standing.seeds)),
                *(task.score, standing.iqm, *(standing.interval or _UNKNOWN)),
                *(*(standing.tolerance or _UNKNOWN), standing.mean),
                *(sum(budgets) / len(budgets) if budgets else None, task.target, standing.reached),
                *(standing.steps_to_target, standing.area, standing.seconds),
            )
            columns = (*STANDING_COLUMNS, WALL_CLOCK_COLUMN)
            records.append(dict(zip(columns, values, strict=True)))
    return records


def pair_records(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Return a flat record for each pair of experiments on a task."""
    records = []
    for task in tasks:
        for improvement in task.improvements:
            pair = (
                improvement.better,
                improvement.than,
                improvement.probability,
                *(improvement.interval or _UNKNOWN),
                improvement.chance,
            )
            values = (task.environment, task.behavior, *pair)
            records.append(dict(zip(PAIR_COLUMNS, values, strict=True)))
    return records


def csv_text(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return the given `columns` of records as CSV text; numbers have six significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # The cell of an unknown value is empty: with the text "None", programs would take the whole
    # column for text.
    writer.writerows([_cell(record[name]) for name in columns] for record in records)
    return text.getvalue()


STANDING_COLUMNS = (
    *("environment", "behavior", "experiment", "seeds", "score", "iqm", "iqm_low", "iqm_high"),
    *("tolerance_low", "tolerance_high", "mean", "trained_steps", "target", "seeds_at_target"),
    *("steps_to_target", "mean_height"),
)
WALL_CLOCK_COLUMN = "training_s"
PAIR_COLUMNS = ("environment", "behavior", "better", "than", "probability", "low", "high", "chance")


def number(value: float) -> str:
    """Return a number as text with four significant digits."""
    return f"{value:.4g}"


def ends(interval: tuple[float, float] | None) -> str:
    """Return both ends of an interval as text, or the text `too few seeds` for None."""
    return "too few seeds" if interval is None else " to ".join(map(number, interval))


def spread(improvement: Improvement) -> str:
    """Return a probability's interval as text, or the reason why it has no interval."""
    # If the probability is 1, every bootstrap sample gives 1, so there is no interval.
    return "no overlap" if improvement.probability == 1.0 else ends(improvement.interval)


def _probability(improvement: Improvement) -> str:
    """Return a probability as text; with few seeds, the number of seed pairs that `better` wins."""
    if improvement.is_estimate:
        return f"{improvement.probability:.2f}"
    # With few seeds there are few pairs; a count shows this, and a probability would hide it.
    n = math.prod(improvement.seeds)
    wins = round(2 * improvement.probability * n) / 2
    return f"{wins:g} of {n} pair{'s' * (n > 1)}"


def seeds(numbers: Sequence[int]) -> str:
    """Return seeds as text, such as `seeds 1, 2`."""
    return f"seed{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def percent(share: float) -> str:
    """Return a probability as text, in percent with two significant digits."""
    return f"{100 * share:{'.0f' if share >= 0.1 else '.2g'}} %"


def duration(seconds: float | None) -> str:
    """Return seconds as text, such as `2 h 05 min`."""
    if seconds is None:
        return "-"
    rounded = round(seconds)
    if rounded < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(rounded // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rounded % 60:02d} s"


def budget(standing: ExperimentScore) -> str:
    """Return an experiment's environment steps as text; a range if seeds differ by over 5 %."""
    if not standing.budgets:
        return "-"
    low, high = min(standing.budgets), max(standing.budgets)
    # The limit is the same as in `Task.has_unequal_budgets`.
    return f"{low:,.0f} to {high:,.0f}" if high > 1.05 * low else f"{high:,.0f}"


def _steps(standing: ExperimentScore) -> str:
    if not standing.curves:
        return "-"
    n = len(standing.curves)
    if standing.steps_to_target is None:
        return f"reached by {standing.reached} of {n} seeds" if standing.reached else "not reached"
    text = f"{standing.steps_to_target:,.0f}"
    return text if standing.reached == n else f"{text} ({standing.reached} of {n} seeds)"


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
