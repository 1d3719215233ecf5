"""Experiments beside each other, task by task: what each reached, how fast, and which is better."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline import seeding
from pipeline.evaluation import bootstrap
from pipeline.evaluation.efficiency import FRACTION, Curve, median_steps, target_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

EVALUATED = "evaluated"
TRAINING = "training"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """What one behavior came to in one run: an experiment with one seed."""

    experiment: str
    environment: str
    behavior: str
    seed: int
    evaluated: float | None = None
    """Mean return of the exported policy's episodes; None when it was not evaluated."""
    curve: Curve | None = None
    """None when the run was not trained, or no episode ended."""
    seconds: float | None = None
    """Wall-clock of training; None when nobody wrote it down."""

    @property
    def task(self) -> tuple[str, str]:
        """What must be the same for returns to be comparable."""
        return self.environment, self.behavior

    @property
    def final(self) -> float | None:
        """Mean return at the end of training."""
        return None if self.curve is None else self.curve.final


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standing:
    """One experiment on one task."""

    experiment: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    """Of each seed, in the same order."""
    iqm: float
    """Interquartile mean of the scores."""
    low: float | None
    """Lower end of its 95 % interval; None with too few seeds."""
    high: float | None
    """Upper end of the same."""
    reached: int
    """Seeds that reached the task's target."""
    steps_to_target: float | None
    """Median over seeds; None when the median seed never got there, or there are no curves."""
    area: float | None
    """Mean over seeds of the mean return over the common steps; None without curves."""
    seconds: float | None
    """Mean wall-clock of training over the seeds; None when it is not known of all."""
    curves: tuple[Curve, ...]
    """Of the seeds that have one."""

    @property
    def mean(self) -> float:
        """Arithmetic mean of the scores."""
        return float(np.mean(self.scores))

    @property
    def caution(self) -> str:
        """What the number of seeds means; empty when there are enough."""
        return bootstrap.caution(len(self.seeds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """How probable it is that a run of one experiment does better than one of another."""

    better: str
    than: str
    probability: float
    low: float | None
    """Lower end of its 95 % interval; None when one of the two has too few seeds."""
    high: float | None
    """Upper end of the same."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """All experiments on one behavior of one environment."""

    environment: str
    behavior: str
    score: str
    """`evaluated`, or `training` when a run was not evaluated: then ends of learning curves."""
    target: float | None
    """Return that counts as learned; None without curves."""
    fraction: float
    """Of the way from the lowest start to the best end, where the target lies."""
    standings: tuple[Standing, ...]
    """In the order in which the experiments were given."""
    improvements: tuple[Improvement, ...]
    """Of each pair, the one that is more probably better first."""

    @property
    def name(self) -> str:
        """For headings."""
        return f"{self.environment}: {self.behavior}" if self.environment else self.behavior


def compare(trials: Iterable[Trial], *, fraction: float = FRACTION, seed: int = 0) -> list[Task]:
    """Compare experiments on each task.

    Args:
        trials: of all experiments; one without evaluation and without curve is left out.
        fraction: in (0, 1], of the way from the lowest start to the best end, as the target.
        seed: of the bootstrap. Equal trials and seeds give equal results.

    Returns:
        The tasks, in the order in which they first occur.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}, wanted more than 0 and at most 1")
    tasks: dict[tuple[str, str], dict[str, list[Trial]]] = {}
    for trial in trials:
        if trial.evaluated is not None or trial.curve is not None:
            tasks.setdefault(trial.task, {}).setdefault(trial.experiment, []).append(trial)
    return [_task(*key, found, fraction, seed) for key, found in tasks.items()]


def _task(
    environment: str,
    behavior: str,
    experiments: dict[str, list[Trial]],
    fraction: float,
    seed: int,
) -> Task:
    every = [trial for found in experiments.values() for trial in found]
    score = EVALUATED if all(one.evaluated is not None for one in every) else TRAINING
    if score == TRAINING:  # what has no curve cannot stand beside what has no evaluation
        experiments = {
            name: kept
            for name, found in experiments.items()
            if (kept := [one for one in found if one.curve is not None])
        }
    groups = [_Group.of(name, found, score) for name, found in experiments.items()]
    target = _target(groups, fraction)
    first, last = _common(groups)
    standings = [
        group.standing(target, first, last, seeding.stream(seed, "comparison", environment, name))
        for group in groups
        for name in (f"{behavior}/{group.name}",)
    ]
    pairs = itertools.combinations(groups, 2)
    rng = seeding.stream(seed, "improvement", environment, behavior)
    return Task(
        environment=environment,
        behavior=behavior,
        score=score,
        target=target,
        fraction=fraction,
        standings=tuple(standings),
        improvements=tuple(_improvement(x, y, rng) for x, y in pairs),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """The trials of one experiment on one task, by seed."""

    name: str
    trials: list[Trial]
    scores: NDArray[np.float64]
    """[seeds]."""

    @classmethod
    def of(cls, name: str, trials: Sequence[Trial], score: str) -> _Group:
        ordered = sorted(trials, key=lambda trial: trial.seed)
        values = [one.evaluated if score == EVALUATED else one.final for one in ordered]
        return cls(name=name, trials=ordered, scores=np.array(values, dtype=np.float64))

    @property
    def curves(self) -> list[Curve]:
        return [trial.curve for trial in self.trials if trial.curve is not None]

    def standing(
        self, target: float | None, first: float, last: float, rng: np.random.Generator
    ) -> Standing:
        ends = None
        if len(self.scores) >= bootstrap.FEWEST_SEEDS:
            ends = bootstrap.iqm_interval([self.scores], rng)
        curves = self.curves
        steps = [] if target is None else [curve.steps_to(target) for curve in curves]
        seconds = [one.seconds for one in self.trials if one.seconds is not None]
        return Standing(
            experiment=self.name,
            seeds=tuple(trial.seed for trial in self.trials),
            scores=tuple(float(score) for score in self.scores),
            iqm=float(bootstrap.interquartile_means(self.scores)),
            low=ends[0] if ends else None,
            high=ends[1] if ends else None,
            reached=sum(one is not None for one in steps),
            steps_to_target=median_steps(steps) if steps else None,
            area=float(np.mean([c.area(first, last) for c in curves])) if curves else None,
            seconds=float(np.mean(seconds)) if len(seconds) == len(self.trials) else None,
            curves=tuple(curves),
        )


def _target(groups: Sequence[_Group], fraction: float) -> float | None:
    learned = [group.curves for group in groups if group.curves]
    if not learned:
        return None
    starts = [float(np.mean([curve.returns[0] for curve in curves])) for curves in learned]
    finals = [np.array([curve.final for curve in curves]) for curves in learned]
    ends = [float(bootstrap.interquartile_means(values)) for values in finals]
    return target_of(starts=starts, ends=ends, fraction=fraction)


def _common(groups: Sequence[_Group]) -> tuple[float, float]:
    """From the earliest first step to the earliest last one: where all curves say something."""
    curves = [curve for group in groups for curve in group.curves]
    if not curves:
        return 0.0, 0.0
    return min(float(c.steps[0]) for c in curves), min(float(c.steps[-1]) for c in curves)


def _improvement(one: _Group, other: _Group, rng: np.random.Generator) -> Improvement:
    forward = bootstrap.probability_of_improvement(x=[one.scores], y=[other.scores])
    x, y = (one, other) if forward >= 0.5 else (other, one)
    ends = None
    if min(len(x.scores), len(y.scores)) >= bootstrap.FEWEST_SEEDS:
        ends = bootstrap.improvement_interval(x=[x.scores], y=[y.scores], rng=rng)
    return Improvement(
        better=x.name,
        than=y.name,
        probability=max(forward, 1.0 - forward),
        low=ends[0] if ends else None,
        high=ends[1] if ends else None,
    )
