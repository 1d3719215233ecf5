"""`sweeps.<name>`: trials of many configurations of an experiment, and a run of the best one.

Each configuration is a *trial*, named `<sweep>/001` and so on. Drawn values depend only on the
sweep's settings; Optuna's proposals also depend on earlier trials.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline import seeding
from pipeline.settings.nodes import Node, fail, join, respelled, to_plain
from pipeline.settings.project.experiments import check_seeds
from pipeline.settings.reader import ContradictionError, Count, CountOrZero, display, read_dataclass

MOST_TRIALS = 999
"""Maximum number of trials of a sweep; their names have three digits."""

Metric = Literal["mean_return", "median_return", "min_return", "max_return", "mean_length"]
# A drawn number has this many significant digits, so that params and tables stay readable.
_DIGITS = 6
_MOST_COMBINATIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The interval from which a random value is drawn."""

    min: float
    """Lower end of the interval."""
    max: float
    """Upper end of the interval."""
    scale: Literal["linear", "log"] = "linear"
    """`log`: uniform in the logarithm, for values over several orders of magnitude."""
    integer: bool = False
    """Whether to draw whole numbers."""

    def __post_init__(self) -> None:
        if self.min >= self.max:
            raise ContradictionError("max", f"must be above min ({self.min}), got {self.max}")
        if self.scale == "log" and self.min <= 0:
            raise ContradictionError("min", f"must be above 0 for scale log, got {self.min}")
        if self.integer and math.ceil(self.min) > math.floor(self.max):
            problem = f"there is no whole number from {self.min} to {self.max}"
            raise ContradictionError("integer", f"{problem}; widen the interval")

    def draw(self, source: random.Random) -> float | int:
        """Return a random value of the interval, rounded to a few digits."""
        if self.scale == "linear":
            return self.rounded(source.uniform(self.min, self.max))
        # The logarithm is uniform, so each order of magnitude is equally likely.
        return self.rounded(math.exp(source.uniform(math.log(self.min), math.log(self.max))))

    def rounded(self, value: float) -> float | int:
        """Return a number rounded to few digits, within the interval."""
        value = float(f"{value:.{_DIGITS}g}")
        if self.integer:
            return min(max(round(value), math.ceil(self.min)), math.floor(self.max))
        # Rounding may have moved the value out of the interval by one unit of its last digit.
        return min(max(value, self.min), self.max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The values that a sweep tries for one key: a list, or an interval."""

    values: tuple[Any, ...] = ()
    """The values, if given as a list."""
    interval: Interval | None = None
    """The interval, if given as a map with `min` and `max`."""

    @staticmethod
    def from_node(node: Node, path: str) -> "Axis":
        """Read a list of values, or a map with `min` and `max`."""
        if isinstance(node.value, dict):
            if "values" in node.value:
                text = f"write the list itself: {path.rpartition('.')[2]}: [...]"
                raise fail(node.value["values"], join(path, "values"), text)
            return Axis(interval=read_dataclass(Interval, node, path))
        if not isinstance(node.value, list) or not node.value:
            expected = "a list of values, or a map with min and max"
            raise fail(node, path, f"needs {expected}, got {display(node)}")
        # A value that is read from a trial's file must be found in the list.
        return Axis(values=tuple(respelled(to_plain(node))))

    def draw(self, source: random.Random) -> Any:
        """Return a random value of the list or the interval."""
        return self.interval.draw(source) if self.interval else source.choice(self.values)

    def samples(self) -> tuple[Any, ...]:
        """Return all values of a list, or both ends of an interval and a value between them."""
        if self.interval is None:
            return self.values
        low, high = self.interval.min, self.interval.max
        # The middle is often a whole number, which would hide that a setting refuses fractions.
        return tuple(map(self.interval.rounded, (low, high, low + 0.618 * (high - low))))

    def distribution(self) -> Any:
        """Return Optuna's distribution: numbers of the interval, or indices of the list."""
        import optuna

        if self.interval is None:
            # Choices of Optuna must be scalars, and the values may be lists or maps.
            return optuna.distributions.CategoricalDistribution(range(len(self.values)))
        low, high, log = self.interval.min, self.interval.max, self.interval.scale == "log"
        if self.interval.integer:
            return optuna.distributions.IntDistribution(math.ceil(low), math.floor(high), log=log)
        return optuna.distributions.FloatDistribution(low, high, log=log)

    def index(self, value: Any) -> Any:
        """Return Optuna's representation of a value: a number, or its index in the list."""
        return value if self.interval is not None else self.values.index(value)

    def value(self, given: Any) -> Any:
        """Return the value that Optuna's representation stands for, rounded as in `draw`."""
        return self.values[given] if self.interval is None else self.interval.rounded(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestParams:
    """`sweeps.<name>.best`: the best configuration, run as the experiment `<name>_best`."""

    seeds: tuple[CountOrZero, ...]
    """Seeds that the sweep does not use, because the best score of many trials is partly luck."""


@dataclass(frozen=True, kw_only=True)  # no slots, because they exclude `cached_property`
class SweepParams:
    """`sweeps.<name>`: trials of an experiment, and how the best of them is chosen."""

    experiment: str
    """Name of an experiment, which gives all settings that the sweep does not change."""
    method: Literal["grid", "list", "random", "optuna"]
    """`grid`: all combinations; `list`: the given configurations; `random`: drawn configurations;
    `optuna`: first drawn configurations, then Optuna's proposals from earlier results."""
    parameters: dict[str, Axis] = field(default_factory=dict)
    """For grid, random and optuna: the values to try, by dotted key of the trainer file."""
    configurations: tuple[dict[str, Any], ...] = ()
    """For list: the configurations, each a map from dotted keys to values."""
    runs: Count | None = None
    """For random and optuna: number of configurations. A sweep with more configurations begins with
    the trials of a sweep with fewer configurations."""
    seed: CountOrZero | None = None
    """For random and optuna: seed of the drawn and the proposed values."""
    startup: Count | None = None
    """For optuna: number of trials that are drawn as in random, before the first proposal; null for
    5."""
    parallel: Count | None = None
    """For optuna: number of trials that may run at the same time: trial k waits for trial k -
    parallel; null for 1."""
    prune_after: CountOrZero | None = None
    """For optuna: steps of training after which a trial ends when a summary's reward is below the
    median of at least three earlier trials at the same step; null for never. Not for minimize,
    for mean_length, or with several learners."""
    seeds: tuple[CountOrZero, ...]
    """Seeds of the runs of each trial."""
    metric: Metric = "mean_return"
    """The result of the stage evaluate that ranks the trials, by its mean over the seeds."""
    behavior: str | None = None
    """The behavior that is ranked; required if the experiment has several behaviors."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Whether a larger or a smaller value of the metric is better."""
    best: BestParams | None = None
    """Run of the best configuration with new seeds; without this key the sweep ends with the
    ranking."""

    def __post_init__(self) -> None:
        _check_method(self)
        check_seeds(self.seeds, "seeds")
        if self.best is None:
            return
        check_seeds(self.best.seeds, "best", "seeds ")
        if repeated := sorted(set(self.best.seeds) & set(self.seeds)):
            text = f"the sweep chooses the best configuration with the seeds {repeated}, so its "
            text += "score with them would be too good; take seeds that are not among"
            raise ContradictionError("best", f"{text} {list(self.seeds)}")

    def trials(self) -> dict[str, dict[str, Any]]:
        """Return the values by dotted key that each trial changes; empty for a proposed trial."""
        return dict(self._trials)

    @functools.cached_property
    def _trials(self) -> dict[str, dict[str, Any]]:
        # `Params.experiment` asks for all trials once per trial, so they are made only once.
        if self.method == "list":
            changes = [dict(configuration) for configuration in self.configurations]
        elif self.method == "grid":
            changes = _combinations({key: axis.values for key, axis in self.parameters.items()})
        else:
            proposed = self.proposed()
            runs = range(self.runs or 0)
            changes = [{} if _numbered(k + 1) in proposed else self.drawn(k) for k in runs]
        return {_numbered(number): change for number, change in enumerate(changes, start=1)}

    def drawn(self, run: int) -> dict[str, Any]:
        """Return the values that a random search draws for a trial; `run` counts trials from 0."""
        # Each key of each trial has its own stream, so that new trials or keys change no values.
        return {
            key: axis.draw(random.Random(f"{self.seed}/{key}/{run}"))  # noqa: S311  # no secret
            for key, axis in self.parameters.items()
        }

    def proposed(self) -> dict[str, str]:
        """Return the number of each trial that Optuna proposes, and of the trial it waits for."""
        return dict(self._proposed)

    @functools.cached_property
    def _proposed(self) -> dict[str, str]:
        # Trial k waits for trial k - lag, so that at most `lag` trials run at a time.
        lag = self.parallel or 1
        later = range(lag + 1, (self.runs or 0) + 1) if self.method == "optuna" else ()
        return {_numbered(number): _numbered(number - lag) for number in later}

    def samples(self) -> list[dict[str, Any]]:
        """Return examples of proposals, for a check before the sweep begins.

        These are all combinations of the keys' samples if there are few; else one key varies while
        the others have their first sample.
        """
        samples = {key: axis.samples() for key, axis in self.parameters.items()}
        if math.prod(map(len, samples.values())) <= _MOST_COMBINATIONS:
            return _combinations(samples)
        first = {key: values[0] for key, values in samples.items()}
        return [first | {key: value} for key, values in samples.items() for value in values]

    def search(self) -> dict[str, Any]:
        """Return the sweep's settings that affect proposals, without the number of trials."""
        # `runs` is not among the keys: a longer sweep must keep the proposals of a shorter one.
        keys = ("parameters", "seed", "startup", "prune_after", "goal", "metric", "behavior")
        return {key: repr(getattr(self, key)) for key in keys}

    def propose(
        self,
        number: int,
        told: Mapping[str, tuple[Mapping[str, Any], float]],
        waiting: Iterable[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return the values of a trial, by Optuna's TPE; the first `startup` trials are drawn.

        The same results give the same values.

        Args:
            number: number of the trial, counted from 1.
            told: values and score of each earlier trial that has been evaluated.
            waiting: values of the earlier trials that have not been evaluated yet.
        """
        # TPE needs a few results before its estimate is better than chance.
        if number <= (5 if self.startup is None else self.startup):
            return self.drawn(number - 1)
        import optuna

        # By default Optuna logs each new study, here one per proposal.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = {key: axis.distribution() for key, axis in self.parameters.items()}
        sampler = optuna.samplers.TPESampler(
            # Optuna's default is 10; the drawn trials above replace Optuna's random trials.
            n_startup_trials=1,
            multivariate=True,
            # Running trials count as bad trials, so that parallel trials try different values.
            constant_liar=True,
            seed=seeding.derive(self.seed or 0, "propose", number),
        )
        study = optuna.create_study(direction=self.goal, sampler=sampler)
        state = optuna.trial.TrialState
        # Optuna refuses a complete trial whose value is NaN.
        trials: list[tuple[Mapping[str, Any], Any, float | None]] = [
            (values, state.FAIL, None) if math.isnan(score) else (values, state.COMPLETE, score)
            for values, score in told.values()
        ]
        trials += [(pending, state.RUNNING, None) for pending in waiting]
        for values, is_at, score in trials:
            params = {key: axis.index(values[key]) for key, axis in self.parameters.items()}
            trial = optuna.trial.create_trial(
                params=params, distributions=space, state=is_at, value=score
            )
            study.add_trial(trial)
        # TPE, the tree-structured Parzen estimator, proposes values that are frequent among the
        # good trials and rare among the other trials.
        proposal = study.ask(space).params
        return {key: axis.value(proposal[key]) for key, axis in self.parameters.items()}


def best_name(sweep: str) -> str:
    """Return the name of the experiment that runs the best configuration of a sweep."""
    return f"{sweep}_best"


def best_file(sweep: str) -> Path:
    """Return the file to which the stage `sweep` writes the best configuration."""
    return Path("results/sweep") / sweep / "best.json"


def proposal_file(trial: str) -> Path:
    """Return the file to which the stage `propose` writes the values of `<sweep>/<number>`."""
    return Path("results/propose") / f"{trial}.json"


def _numbered(number: int) -> str:
    return f"{number:03}"


def _combinations(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


_NEEDED = {
    "grid": ("parameters",),
    "list": ("configurations",),
    "random": ("parameters", "runs", "seed"),
    "optuna": ("parameters", "runs", "seed"),
}


def _check_method(sweep: SweepParams) -> None:
    method = sweep.method
    minimizes = sweep.goal == "minimize"
    if sweep.prune_after is not None and (minimizes or sweep.metric == "mean_length"):
        looks_for = f"the {'least' if minimizes else 'greatest'} {sweep.metric}"
        text = f"ends trials with low rewards, but the sweep looks for {looks_for}; remove the key"
        raise ContradictionError("prune_after", text)
    for key in ("startup", "parallel", "prune_after"):
        if getattr(sweep, key) is not None and method != "optuna":
            text = f"belongs to the method optuna, not to {method}; remove it"
            raise ContradictionError(key, text)
    for key in ("parameters", "configurations", "runs", "seed"):
        is_given = getattr(sweep, key) not in (None, {}, ())
        if is_given and key not in _NEEDED[method]:
            text = f"the method {method} does not use the key {key!r}; remove it"
            raise ContradictionError(key, text)
        if key in _NEEDED[method] and not is_given:
            text = f"the method {method} needs the key {key!r}; add it"
            raise ContradictionError("method", text)
    for key, axis in sweep.parameters.items():
        if method == "grid" and axis.interval is not None:
            text = f"the method grid needs a list of values for {key!r}, not an interval; list"
            raise ContradictionError("parameters", f"{text} them, or choose the method random")
    # The grid may be too large to list, so its trials are counted by a product.
    grid = math.prod(len(axis.values) for axis in sweep.parameters.values())
    n_trials = grid if method == "grid" else sweep.runs or len(sweep.configurations)
    if n_trials > MOST_TRIALS:
        text = f"{method} makes {n_trials} trials, more than {MOST_TRIALS}; sweep fewer values"
        raise ContradictionError("method", text)
