"""`sweeps.<name>`: one experiment under many configurations, and the best of them once more.

Each configuration is a *trial*, called `<sweep>/001` and so on. What a trial changes depends on the
block alone: a longer random sweep begins with the trials of the shorter one, and a parameter more
leaves the values of the others as they were.
"""

import itertools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.settings.nodes import Node, fail, to_plain
from pipeline.settings.reader import ContradictionError, read_dataclass, shown
from pipeline.settings.schema.kinds import Count, CountOrZero

MOST_TRIALS = 999
"""Trials of one sweep; their names have three digits."""

Metric = Literal["mean_return", "median_return", "min_return", "max_return", "mean_length"]
_DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Where a random value comes from: an interval."""

    min: float
    """Least value."""
    max: float
    """Greatest value."""
    scale: Literal["linear", "log"] = "linear"
    """`log` draws the logarithm evenly, for values over several orders of magnitude."""
    integer: bool = False
    """Draw whole numbers."""

    def __post_init__(self) -> None:
        """Refuse an empty interval, and logarithms of what has none."""
        if self.min >= self.max:
            raise ContradictionError("max", f"must be above min ({self.min}), got {self.max}")
        if self.scale == "log" and self.min <= 0:
            raise ContradictionError("min", f"must be above 0 for scale log, got {self.min}")

    def draw(self, source: random.Random) -> float | int:
        """A value, with few enough digits to be read."""
        if self.scale == "log":
            value = math.exp(source.uniform(math.log(self.min), math.log(self.max)))
        else:
            value = source.uniform(self.min, self.max)
        value = min(max(float(f"{value:.{_DIGITS}g}"), self.min), self.max)
        return round(value) if self.integer else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """What one swept key may be: some values, or an interval."""

    values: tuple[Any, ...] = ()
    spread: Spread | None = None

    @staticmethod
    def from_node(node: Node, path: str) -> "Axis":
        """A list of values, or a map with `min` and `max`.

        Raises:
            SettingsError: It is something else, or an empty list.
        """
        if isinstance(node.value, dict):
            return Axis(spread=read_dataclass(Spread, node, path))
        if not isinstance(node.value, list) or not node.value:
            raise fail(
                node, path, f"needs a list of values, or a map with min and max, got {shown(node)}"
            )
        return Axis(values=tuple(to_plain(node)))

    def draw(self, source: random.Random) -> Any:
        """One value."""
        return self.spread.draw(source) if self.spread is not None else source.choice(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestParams:
    """`sweeps.<name>.best`: the best configuration, run as the experiment `<name>_best`."""

    seeds: tuple[CountOrZero, ...]
    """Seeds that the sweep has not seen, since the best of many is partly luck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepParams:
    """`sweeps.<name>`: trials of one experiment, and how the best is found."""

    experiment: str
    """A name under `experiments`, which says all that the sweep does not."""
    method: Literal["grid", "list", "random"]
    """Every combination of the values; the configurations as listed; or drawn ones."""
    parameters: dict[str, Axis] = field(default_factory=dict)
    """For grid and random: by dotted key of the trainer file, what it may be."""
    configurations: tuple[dict[str, Any], ...] = ()
    """For list: dotted keys and their values."""
    runs: Count | None = None
    """For random: how many configurations to draw."""
    seed: CountOrZero | None = None
    """For random: what is drawn."""
    seeds: tuple[CountOrZero, ...]
    """Seeds that each trial is run with."""
    metric: Metric = "mean_return"
    """The number of `evaluate` that trials are ranked by, as its mean over the seeds."""
    behavior: str | None = None
    """Whose number; needed when the experiment has several behaviors."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Which end of the metric is the good one."""
    best: BestParams | None = None
    """Run the best once more; without it the sweep ends with the ranking."""

    def __post_init__(self) -> None:
        """Refuse keys of another method, too many trials, and seeds that are not fresh."""
        _check_method(self)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ContradictionError(
                "seeds", f"needs one seed or more, each once, got {list(self.seeds)}"
            )
        if self.best is not None:
            _check_fresh(self.best.seeds, self.seeds)

    def trials(self) -> dict[str, dict[str, Any]]:
        """Changes of each trial by its number, `001` on: dotted keys and values."""
        if self.method == "list":
            found = [dict(one) for one in self.configurations]
        elif self.method == "grid":
            axes = [axis.values for axis in self.parameters.values()]
            found = [
                dict(zip(self.parameters, values, strict=True))
                for values in itertools.product(*axes)
            ]
        else:
            found = [
                {key: axis.draw(self._source(key, run)) for key, axis in self.parameters.items()}
                for run in range(self.runs or 0)
            ]
        return {f"{number:03}": one for number, one in enumerate(found, start=1)}

    def _source(self, key: str, run: int) -> random.Random:
        return random.Random(f"{self.seed}/{key}/{run}")  # noqa: S311  # a search, no secret


def best_name(sweep: str) -> str:
    """The experiment that the best configuration of a sweep becomes."""
    return f"{sweep}_best"


def best_file(sweep: str) -> Path:
    """Where the stage `sweep` writes which configuration is the best."""
    return Path("results/sweep") / sweep / "best.json"


def _check_method(sweep: SweepParams) -> None:
    used = {
        "parameters": bool(sweep.parameters),
        "configurations": bool(sweep.configurations),
        "runs": sweep.runs is not None,
        "seed": sweep.seed is not None,
    }
    needed = {
        "grid": ("parameters",),
        "list": ("configurations",),
        "random": ("parameters", "runs", "seed"),
    }[sweep.method]
    for key, given in used.items():
        if given != (key in needed):
            what = "needs the key" if key in needed else "does not use the key"
            remedy = "add it" if key in needed else "remove it"
            raise ContradictionError(
                key if given else "method", f"the method {sweep.method} {what} {key!r}; {remedy}"
            )
    for key, axis in sweep.parameters.items():
        if sweep.method == "grid" and axis.spread is not None:
            raise ContradictionError(
                "parameters",
                f"the method grid needs a list of values for {key!r}, not an interval; "
                "list them, or choose the method random",
            )
    n_trials = _count(sweep)
    if n_trials > MOST_TRIALS:
        raise ContradictionError(
            "method", f"makes {n_trials} trials, more than {MOST_TRIALS}; sweep fewer values"
        )


def _count(sweep: SweepParams) -> int:
    if sweep.method == "grid":
        return math.prod(len(axis.values) for axis in sweep.parameters.values())
    return len(sweep.configurations) if sweep.method == "list" else sweep.runs or 0


def _check_fresh(fresh: tuple[int, ...], used: tuple[int, ...]) -> None:
    if not fresh or len(set(fresh)) != len(fresh):
        raise ContradictionError(
            "best", f"seeds needs one seed or more, each once, got {list(fresh)}"
        )
    if again := sorted(set(fresh) & set(used)):
        raise ContradictionError(
            "best",
            f"seeds has {again}, which chose the best configuration and so flatter it; "
            f"take seeds that are not among {list(used)}",
        )
