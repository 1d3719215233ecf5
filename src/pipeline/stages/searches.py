"""What the report says of sweeps: trials by rank, and the best on seeds that did not choose it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.settings.sweeps import best_name
from pipeline.stages.sweep import Trial, rank, score_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.settings.params import Params
    from pipeline.settings.sweeps import SweepParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A sweep as a table and sentences."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """One for each trial, best first: rank, name, score, and the values that it changed."""
    notes: list[str]


def inputs(params: Params) -> tuple[Path, ...]:
    """The evaluations of all trials, relative to the repository."""
    return tuple(
        _metrics(f"{name}/{number}", seed)
        for name, sweep in params.sweeps.items()
        for number in sweep.trials()
        for seed in sweep.seeds
    )


def searches(root: Path, params: Params) -> list[Search]:
    """What each sweep found.

    Raises:
        StageError: An evaluation does not say what the sweep is ranked by.
    """
    return [_search(root, params, name, sweep) for name, sweep in params.sweeps.items()]


def _search(root: Path, params: Params, name: str, sweep: SweepParams) -> Search:
    trials = [
        Trial(
            name=f"{name}/{number}",
            values=values,
            scores=_scores(root, f"{name}/{number}", sweep.seeds, sweep),
        )
        for number, values in sweep.trials().items()
    ]
    ranked = rank(trials, goal=sweep.goal)
    keys = list(dict.fromkeys(key for one in trials for key in one.values))
    first = "greatest" if sweep.goal == "maximize" else "least"
    over = f", its mean over {_seeds(sweep.seeds)}" if len(sweep.seeds) > 1 else ""
    notes = [
        f"{len(trials)} configurations of {sweep.experiment} with {_seeds(sweep.seeds)}, ranked by "
        f"{sweep.metric} of the evaluation{over}, {first} first."
    ]
    n_best = sum(one.score == ranked[0].score for one in ranked)
    if n_best > 1:
        notes.append(
            f"{n_best} trials share the best score, so the sweep does not tell them apart; the "
            "first of them counts as the best. A harder measure would: fewer steps, say, or more "
            "seeds and episodes."
        )
    if sweep.best is not None:
        notes.append(_fresh(root, params, best_name(name), sweep, ranked[0], len(trials)))
    return Search(
        title=f"Sweep {name}",
        header=("Trial", "Rank", sweep.metric, *_short(keys)),
        rows=[
            (one.name, str(place), f"{one.score:.4g}", *(_told(one.values.get(k)) for k in keys))
            for place, one in enumerate(ranked, start=1)
        ],
        notes=notes,
    )


def _fresh(
    root: Path, params: Params, best: str, sweep: SweepParams, chosen: Trial, n_trials: int
) -> str:
    """How the best did on seeds that had no part in choosing it."""
    scores = _scores(root, best, params.experiments[best].seeds, sweep)
    again = Trial(name=best, values=chosen.values, scores=scores)
    each = f" ({', '.join(f'{one:.4g}' for one in scores.values())})" if len(scores) > 1 else ""
    return (
        f"The best, {chosen.name}, came to {again.score:.4g} on the fresh {_seeds(list(scores))}"
        f"{each}, after {chosen.score:.4g} in the sweep. The best score of {n_trials} is partly "
        f"luck: quote the one on fresh seeds. It is the experiment {best}."
    )


def _scores(
    root: Path, experiment: str, seeds: Sequence[int], sweep: SweepParams
) -> dict[int, float]:
    return {seed: score_of(root / _metrics(experiment, seed), sweep) for seed in seeds}


def _metrics(experiment: str, seed: int) -> Path:
    return Path(f"results/evaluate/{experiment}/seed{seed}/metrics.json")


def _seeds(seeds: Sequence[int]) -> str:
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {', '.join(map(str, seeds))}"


def _short(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, or all of it where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def _told(value: Any) -> str:
    return "-" if value is None else str(value)
