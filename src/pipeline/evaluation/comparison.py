"""Comparison of experiments on each task: scores, speed of learning, probability of improvement."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline import seeding
from pipeline.evaluation import statistics

EVALUATED = "evaluated"
TRAINING = "training"
# The fraction is below 1, because the best end (see `scale_of`) is a mean over seeds, and many
# seeds do not reach this mean.
FRACTION = 0.9
"""Default of `fraction` in `compare`, which sets the target return."""
# The final return is the mean of the last tenth, because a single summary is noisy.
_END = 0.1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """The learning curve of one run."""

    steps: NDArray[np.float64]
    """[points] environment steps, ascending."""
    returns: NDArray[np.float64]
    """[points] mean return of the episodes that ended since the previous point of the curve."""

    def __post_init__(self) -> None:
        """Refuse a curve without points, or with steps that do not ascend."""
        if not len(self.steps) or len(self.steps) != len(self.returns):
            raise ValueError("a curve needs at least one point, and a return for each step")
        if (np.diff(self.steps) <= 0).any():
            raise ValueError("a curve's steps must ascend")

    @property
    def final(self) -> float:
        """Mean return over the last tenth of the steps, including at least the last point."""
        first = self.steps[-1] - _END * (self.steps[-1] - self.steps[0])
        return float(self.returns[self.steps >= first].mean())

    def steps_to(self, target: float) -> float | None:
        """Return the steps of the first point with a return of at least `target`, or None."""
        reached = self.returns >= target
        return float(self.steps[int(np.argmax(reached))]) if reached.any() else None

    def area(self, first: float, last: float) -> float:
        """Return the mean height between two steps: the area under the curve divided by its width.

        The curve is linear between its points, and constant outside them.
        """
        if last <= first:
            return float(np.interp(first, self.steps, self.returns))
        inside = (self.steps > first) & (self.steps < last)
        steps = np.concatenate([[first], self.steps[inside], [last]])
        returns = np.interp(steps, self.steps, self.returns)
        return float(np.trapezoid(returns, steps) / (last - first))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Results of one run, which is an experiment with one seed, for one behavior."""

    experiment: str
    environment: str
    behavior: str
    seed: int
    evaluated: float | None = None
    """Mean return of the exported policy's episodes; None without an evaluation."""
    curve: Curve | None = None
    """Learning curve; None if the run was not trained, or no episode ended."""
    steps: int | None = None
    """Environment steps of training; None if not recorded."""
    seconds: float | None = None
    """Wall-clock time of training; None if not recorded."""
    exact: bool = True
    """Whether the training was never interrupted, or always resumed exactly."""
    outdated: bool = False
    """Whether the run was trained again after its evaluation, so that the evaluation is ignored."""
    stochastic: bool = False
    """Whether the evaluation drew actions instead of taking the most probable actions."""

    @property
    def budget(self) -> float | None:
        """Environment steps of training, at least the curve's last step; None if unknown."""
        known = [] if self.curve is None else [float(self.curve.steps[-1])]
        return max(known if self.steps is None else [*known, self.steps], default=None)

    @property
    def task(self) -> tuple[str, str]:
        """Environment and behavior, which must be equal for returns to be comparable."""
        return self.environment, self.behavior


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExperimentScore:
    """The scores of an experiment on a task, and statistics of its training."""

    experiment: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    """Score of each seed, in the order of `seeds`."""
    iqm: float
    """Interquartile mean of the scores."""
    interval: tuple[float, float] | None
    """95 % interval of `iqm`; None with too few seeds."""
    budgets: tuple[float, ...]
    """Environment steps of each seed's training; seeds with unknown steps are left out."""
    reached: int
    """Number of seeds whose learning curve reached the task's target."""
    steps_to_target: float | None
    """Median number of steps to the target over the seeds.

    None if the median seed did not reach the target, or if there are no curves.
    """
    area: float | None
    """Mean return over the steps that all curves have, averaged over seeds; None without curves."""
    seconds: float | None
    """Mean wall-clock time of training over the seeds; None if unknown for a seed."""
    curves: tuple[Curve, ...]
    """Learning curves of the seeds in `trained`."""
    trained: tuple[int, ...] = ()
    """Seeds with a learning curve, in the order of `curves`."""
    not_exact: tuple[int, ...] = ()
    """Seeds whose training was interrupted and not resumed exactly."""
    outdated: tuple[int, ...] = ()
    """Seeds that were trained again since their evaluation."""
    stochastic: bool = False
    """Whether an evaluation of this experiment drew actions at random."""

    @property
    def mean(self) -> float:
        """Arithmetic mean of the scores."""
        return float(np.mean(self.scores))

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """Interval that contains a new seed's score in 90 % of cases; None with too few seeds."""
        return statistics.tolerance_interval(np.array(self.scores))


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """The probability that a run of `better` has a higher score than a run of `than`."""

    better: str
    than: str
    probability: float
    interval: tuple[float, float] | None
    """95 % interval of `probability`; None with too few seeds, or if `probability` is 1."""
    chance: float
    """Probability (p-value) that two equal experiments would differ at least as clearly."""
    seeds: tuple[int, int]
    """Number of seeds of `better`, and of `than`."""

    @property
    def is_estimate(self) -> bool:
        """Whether the probability of improvement is also an estimate for further seeds.

        Both experiments need enough seeds for that.
        """
        return min(self.seeds) >= statistics.ENOUGH_SEEDS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Comparison of all experiments with the same environment and behavior."""

    environment: str
    behavior: str
    score: str
    """`evaluated`, or `training` if a run has no evaluation: scores are then final returns."""
    target: float | None
    """Mean return at which the task counts as learned; None without curves."""
    fraction: float
    """Position of `target` between the lowest start (0) and the best end (1); see `scale_of`."""
    scale: tuple[float, float] | None
    """Lowest start and best end of the experiments, in units of the return; None without curves."""
    standings: tuple[ExperimentScore, ...]
    """Scores of each experiment, in the order in which the experiments were given."""
    improvements: tuple[Improvement, ...]
    """Improvement for each pair of experiments."""

    @property
    def detectable(self) -> float | None:
        """Smallest detectable difference of two experiments' mean scores; None if unknown."""
        return statistics.detectable_difference(
            [np.array(standing.scores) for standing in self.standings]
        )

    @property
    def estimates(self) -> tuple[Improvement, ...]:
        """Improvements of those pairs of experiments in which both have enough seeds."""
        return tuple(pair for pair in self.improvements if pair.is_estimate)

    @property
    def has_unequal_budgets(self) -> bool:
        """Whether a run was trained for over 5 % more steps than another."""
        budgets = [steps for standing in self.standings for steps in standing.budgets]
        # The limit is 5 %, because training ends at a whole rollout, not at an exact step.
        return bool(budgets) and max(budgets) > 1.05 * min(budgets)

    @property
    def differences(self) -> list[float]:
        """Differences between the mean scores of experiments with several seeds, ascending."""
        # Only experiments with several seeds are compared, as in `detectable`, which needs their
        # spread.
        means = [standing.mean for standing in self.standings if len(standing.seeds) > 1]
        return sorted(abs(a - b) for a, b in itertools.combinations(means, 2))

    @property
    def name(self) -> str:
        """The task's name in headings."""
        return f"{self.environment}: {self.behavior}" if self.environment else self.behavior


def compare(
    outcomes: Iterable[Outcome], *, fraction: float = FRACTION, seed: int = 0
) -> list[Task]:
    """Compare the experiments on each task; return the tasks in the order of their first outcome.

    Args:
        outcomes: outcomes of all experiments; runs without evaluation and curve are left out.
        fraction: number in (0, 1]; the target return is this fraction of the way from the lowest
            start to the best end of the experiments (see `scale_of`).
        seed: seed of the bootstrap. Equal outcomes and seeds give equal results.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}, wanted more than 0 and at most 1")
    tasks: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        if outcome.evaluated is not None or outcome.curve is not None:
            tasks.setdefault(outcome.task, {}).setdefault(outcome.experiment, []).append(outcome)
    return [_task(*key, group, fraction, seed) for key, group in tasks.items()]


def _task(
    environment: str,
    behavior: str,
    experiments: dict[str, list[Outcome]],
    fraction: float,
    seed: int,
) -> Task:
    # Returns in training, with exploration, cannot be compared with returns of evaluations, so all
    # scores of a task are of one kind.
    evaluated = all(
        outcome.evaluated is not None for runs in experiments.values() for outcome in runs
    )
    groups: dict[str, list[Outcome]] = {}
    for name, runs in experiments.items():
        # If scores are final returns of training, runs without a curve have no score.
        if comparable := [outcome for outcome in runs if evaluated or outcome.curve is not None]:
            groups[name] = sorted(comparable, key=lambda outcome: outcome.seed)
    curves = {name: _curves_of(runs) for name, runs in groups.items()}
    scale = scale_of([group for group in curves.values() if group])
    target = None if scale is None else scale[0] + fraction * (scale[1] - scale[0])
    # Areas are compared over common steps, because longer training would look better.
    common = _common_steps([curve for group in curves.values() for curve in group])
    standings = []
    for name, runs in groups.items():
        # Each experiment has its own random stream, so that the intervals of experiments do not
        # depend on each other.
        rng = seeding.stream(seed, "comparison", environment, f"{behavior}/{name}")
        standings.append(_standing(runs, target, common, rng, evaluated=evaluated))
    rng = seeding.stream(seed, "improvement", environment, behavior)
    # The pairs have a fixed order, because all pairs draw from one random stream.
    pairs = itertools.combinations(standings, 2)
    return Task(
        environment=environment,
        behavior=behavior,
        score=EVALUATED if evaluated else TRAINING,
        target=target,
        fraction=fraction,
        scale=scale,
        standings=tuple(standings),
        improvements=tuple(_improvement(x, y, rng) for x, y in pairs),
    )


def _standing(
    outcomes: Sequence[Outcome],
    target: float | None,
    common: tuple[float, float],
    rng: np.random.Generator,
    *,
    evaluated: bool,
) -> ExperimentScore:
    """Return an experiment's scores: returns of evaluations if `evaluated`, else final returns."""
    curves = _curves_of(outcomes)
    ends = (
        [outcome.evaluated for outcome in outcomes]
        if evaluated
        else [curve.final for curve in curves]
    )
    scores = np.array(ends, np.float64)
    # One or two scores give at most three different bootstrap samples: too few for an interval.
    enough = len(scores) >= statistics.FEWEST_SEEDS
    steps = [] if target is None else [curve.steps_to(target) for curve in curves]
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return ExperimentScore(
        experiment=outcomes[0].experiment,
        seeds=tuple(outcome.seed for outcome in outcomes),
        scores=tuple(float(score) for score in scores),
        iqm=float(statistics.interquartile_means(scores)),
        interval=statistics.iqm_interval(scores, rng) if enough else None,
        budgets=tuple(outcome.budget for outcome in outcomes if outcome.budget is not None),
        reached=sum(step is not None for step in steps),
        steps_to_target=median_steps(steps) if steps else None,
        area=float(np.mean([curve.area(*common) for curve in curves])) if curves else None,
        # If the time of a run is unknown, there is no mean: the mean of the other runs could not be
        # compared with means of all runs.
        seconds=float(np.mean(seconds)) if len(seconds) == len(outcomes) else None,
        curves=tuple(curves),
        trained=tuple(outcome.seed for outcome in outcomes if outcome.curve is not None),
        not_exact=tuple(outcome.seed for outcome in outcomes if not outcome.exact),
        outdated=tuple(outcome.seed for outcome in outcomes if outcome.outdated),
        stochastic=any(outcome.stochastic for outcome in outcomes),
    )


def _improvement(
    first: ExperimentScore, second: ExperimentScore, rng: np.random.Generator
) -> Improvement:
    """Return the improvement of the better experiment over the other; in a tie, of `first`."""
    forward = statistics.probability_of_improvement(np.array(first.scores), np.array(second.scores))
    better, than = (first, second) if forward >= 0.5 else (second, first)
    x, y = np.array(better.scores), np.array(than.scores)
    # An interval needs enough seeds, and scores that overlap: if they do not overlap, every
    # bootstrap sample gives the same probability.
    enough = min(len(x), len(y)) >= statistics.ENOUGH_SEEDS and 0.0 < forward < 1.0
    return Improvement(
        better=better.experiment,
        than=than.experiment,
        # Ties count half, so both directions add up to 1.
        probability=max(forward, 1.0 - forward),
        interval=statistics.improvement_interval(x, y, rng) if enough else None,
        chance=statistics.chance_of_separation(x, y),
        seeds=(len(x), len(y)),
    )


def scale_of(groups: Sequence[Sequence[Curve]]) -> tuple[float, float] | None:
    """Return the lowest start and the best end of the experiments; None without curves.

    `groups` has the curves of each experiment. An experiment's start is the mean of its runs' first
    returns; its end is the interquartile mean of their final returns.
    """
    if not groups:
        return None
    # The scale does not begin at zero, because returns may be negative or have any offset.
    low = min(float(np.mean([curve.returns[0] for curve in group])) for group in groups)
    ends = [np.array([curve.final for curve in group]) for group in groups]
    high = max(float(statistics.interquartile_means(values)) for values in ends)
    return low, high


def median_steps(steps: Sequence[float | None]) -> float | None:
    """Return the median steps to the target; None if the median run never reached it."""
    # A run that did not reach the target counts as later than all others; leaving it out would
    # favour experiments that often fail.
    median = float(np.median([np.inf if step is None else step for step in steps]))
    return median if np.isfinite(median) else None


def _common_steps(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the first and the last step of the range in which areas under curves are computed."""
    if not curves:
        return 0.0, 0.0
    # The range ends at the earliest of the last steps, because no curve has ended before it.
    return min(float(c.steps[0]) for c in curves), min(float(c.steps[-1]) for c in curves)


def _curves_of(outcomes: Iterable[Outcome]) -> list[Curve]:
    return [outcome.curve for outcome in outcomes if outcome.curve is not None]
