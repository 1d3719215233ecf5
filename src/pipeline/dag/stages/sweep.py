"""The `sweep` stage: rank the trials of a sweep, and write the best configuration."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.dag import project
from pipeline.dag.attempt import Job, attempt_at
from pipeline.dag.project import named, planned
from pipeline.dag.reporting.results import is_outdated, read_evaluation
from pipeline.errors import StageError
from pipeline.settings.project.sweeps import SweepParams, best_file, proposal_file

OUTPUTS = ("best.json", "metrics.json", "trials.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A trial's configuration and scores."""

    name: str
    """Name of the trial: `<sweep>/<number>`."""
    values: Mapping[str, Any]
    """The changed settings, by dotted key."""
    scores: Mapping[int, float]
    """Score of the trial by seed: the value of the metric by which the sweep is ranked."""

    @property
    def score(self) -> float:
        """Mean of the scores over the seeds."""
        return sum(self.scores.values()) / len(self.scores)


def rank_named(name: str, root: Path) -> None:
    """Rank a sweep's trials, and write `best.json`, `metrics.json` and `trials.csv`."""
    params = planned(root)
    sweep = named(params.sweeps, name, "sweeps")
    proposed = [proposal_file(f"{name}/{number}") for number in sweep.proposed()]
    job = Job(
        stage="sweep",
        instance=name,
        params={"metric": sweep.metric, "behavior": sweep.behavior, "goal": sweep.goal}
        | {"trials": sweep.trials()},
        inputs=(*metrics_files(name, sweep), *proposed),
        outputs=tuple(best_file(name).with_name(output) for output in OUTPUTS),
    )
    with attempt_at(job, root) as attempt:
        trials = trials_of(root, name, sweep)
        ranked = rank(trials, goal=sweep.goal)
        best = ranked[0]
        # NaN ranks last, so NaN in the first place means that no trial has a score.
        if math.isnan(best.score):
            raise StageError(
                f"sweeps.{name}: no trial has a {sweep.metric}; evaluate more episodes"
            )
        # best.json has no score: the experiment with the best values depends on this file, and must
        # not run again if the same trial gets another score.
        files.write_json(attempt.out("best.json"), {"trial": best.name, "values": best.values})
        metrics = {sweep.metric: best.score, "trials": len(ranked)}
        files.write_json(attempt.out("metrics.json"), metrics)
        files.write_whole(attempt.out("trials.csv"), table(ranked, sweep.metric))


main = partial(project.main, __doc__, rank_named, name="a name under `sweeps` in params.yaml")


def metrics_files(name: str, sweep: SweepParams) -> list[Path]:
    """Return the evaluation files of all trials, relative to the project."""
    return [
        metrics_file(f"{name}/{number}", seed) for number in sweep.trials() for seed in sweep.seeds
    ]


def metrics_file(experiment: str, seed: int) -> Path:
    """Return the path of the metrics.json with a run's evaluation, relative to the project."""
    return Path(f"results/evaluate/{experiment}/seed{seed}/metrics.json")


def trials_of(root: Path, name: str, sweep: SweepParams) -> list[Trial]:
    """Return each trial of a sweep with its scores.

    Raises:
        StageError: An evaluation lacks the metric by which the sweep is ranked.
    """
    trials = []
    for number, drawn in sweep.trials().items():
        trial = f"{name}/{number}"
        # The values of a proposed trial are in its proposal's file, and not in params.yaml.
        values = drawn or json.loads((root / proposal_file(trial)).read_text("utf-8"))["values"]
        scores = scores_of(root, trial, sweep.seeds, sweep)
        trials.append(Trial(name=trial, values=values, scores=scores))
    return trials


def scores_of(
    root: Path, experiment: str, seeds: Sequence[int], sweep: SweepParams
) -> dict[int, float]:
    """Return the metric by which the sweep is ranked, for each seed of an experiment.

    Raises:
        StageError: An evaluation lacks the metric or is of an earlier policy, or has several
            behaviors and the sweep names none.
    """
    scores = {}
    for seed in seeds:
        path = root / metrics_file(experiment, seed)
        if is_outdated(path, root / f"results/train/{experiment}/seed{seed}/policy.pt"):
            raise StageError(
                f"{path}: belongs to an earlier policy: {experiment} was trained again with "
                f"seed {seed}; evaluate the policy again"
            )
        scores[seed] = score_of(path, sweep)
    return scores


def score_of(path: Path, sweep: SweepParams) -> float:
    """Return the sweep's metric in the `metrics.json` of an evaluation."""
    metrics = read_evaluation(path)
    behavior = sweep.behavior
    if behavior is None and len(metrics) > 1:
        raise StageError(
            f"{path}: has the behaviors {', '.join(metrics)}; set the sweep's key 'behavior' to "
            "the behavior to rank by"
        )
    if behavior is not None and behavior not in metrics:
        raise StageError(
            f"{path}: has no behavior {behavior!r}; set the sweep's key 'behavior' to one of "
            f"{', '.join(metrics)}"
        )
    try:
        return metrics[behavior or next(iter(metrics))][sweep.metric]
    except (StopIteration, KeyError) as error:
        raise StageError(
            f"{path}: cannot be read as an evaluation that has {sweep.metric} ({error!r}); "
            "evaluate the policy again"
        ) from error


def rank(trials: Sequence[Trial], *, goal: str) -> list[Trial]:
    """Return the trials, best first; equal scores keep their order, and NaN comes last."""
    sign = -1 if goal == "maximize" else 1
    # All comparisons with NaN are false, so NaN would be sorted to any place. `sorted` is stable,
    # so equal scores stay in the order of the trials.
    return sorted(
        trials, key=lambda trial: math.inf if math.isnan(trial.score) else sign * trial.score
    )


def table(ranked: Sequence[Trial], metric: str) -> str:
    """Return CSV with a row per trial, best first, and a column per swept key."""
    # Columns follow the trials' numbers, so that another ranking does not reorder them.
    in_order = sorted(ranked, key=lambda trial: trial.name)
    keys = list(dict.fromkeys(key for trial in in_order for key in trial.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "rank", "score", "metric", *keys])
    for place, trial in enumerate(ranked, start=1):
        values = [trial.values.get(key, "") for key in keys]
        writer.writerow([int(trial.name.rpartition("/")[2]), place, trial.score, metric, *values])
    return text.getvalue()
