"""The `propose` stage: choose a sweep's next trial from the scores of earlier trials.

The file of a proposed trial has the scores that were known (`told`), and the trials that had no
score yet (`waiting`). The files together are the journal of the search: a stopped search continues
with the next trial, and engines know which trials a change affects. Optuna's own journal is one
file with time stamps for all trials, which cannot be the output of one job.
"""

import json
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.dag import project
from pipeline.dag.attempt import Job, attempt_at
from pipeline.dag.project import named
from pipeline.dag.reporting.results import read_curves
from pipeline.dag.stages.sweep import metrics_file, scores_of
from pipeline.envs import executable
from pipeline.errors import StageError
from pipeline.settings.project.params import Params
from pipeline.settings.project.sweeps import SweepParams, proposal_file

# With one or two curves, a single lucky trial would end most of the later trials.
_FEWEST_CURVES = 3
"""A step has a median only if at least this number of learning curves have a point at the step."""


def propose(trial: str, root: Path) -> None:
    """Choose the settings of a trial, and write `results/propose/<sweep>/<number>.json`.

    Raises:
        StageError: No sweep has this trial, or an earlier trial has not been evaluated.
    """
    params = project.planned(root)
    name, _, number = trial.partition("/")
    sweep = named(params.sweeps, name, "sweeps")
    # This proposal needs only the score of the trial `chosen`; later trials may still be running.
    chosen = named(sweep.proposed(), number, f"proposed trial sweeps.{name}")
    last = before(params, trial)
    job = Job(
        stage="propose",
        instance=trial,
        params={"search": sweep.search(), "number": number},
        inputs=(
            # Each proposal continues the journal of the previous proposal.
            last,
            *(metrics_file(f"{name}/{chosen}", seed) for seed in sweep.seeds),
            *(_curve_file(f"{name}/{chosen}", seed) for seed in sweep.seeds),
        ),
        outputs=(proposal_file(trial),),
    )
    with attempt_at(job, root) as attempt:
        # When the sweep begins, no trial has a score, and the trials with random values wait for
        # their scores.
        drawn = {trial_number: values for trial_number, values in sweep.trials().items() if values}
        # For the first proposal `last` is the environment's folder and not a proposal's file.
        first = {"told": {}, "waiting": drawn}
        journal: dict[str, Any] = first if (root / last).is_dir() else _journal(root / last)
        values = journal["waiting"].pop(chosen)
        journal["told"][chosen] = {"values": values, **_outcome(root, f"{name}/{chosen}", sweep)}
        results = {
            trial_number: (result["values"], result["score"])
            for trial_number, result in journal["told"].items()
        }
        proposed = sweep.propose(int(number), results, journal["waiting"].values())
        journal["waiting"][number] = proposed
        content = {"values": proposed, "prune_below": _medians(journal["told"], sweep), **journal}
        files.write_json(attempt.out(proposal_file(trial).name), content)


main = partial(
    project.main, __doc__, propose, name="<sweep>/<number>, of a sweep with the method optuna"
)


def before(params: Params, trial: str) -> Path:
    """Return the previous proposal's file; for the first proposal the environment's folder."""
    name, _, number = trial.partition("/")
    sweep = params.sweeps[name]
    earlier = f"{int(number) - 1:03}"
    if earlier in sweep.proposed():
        return proposal_file(f"{name}/{earlier}")
    return executable.folder_of(params.experiments[sweep.experiment].environment)


def _journal(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"told": content["told"], "waiting": content["waiting"]}
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(
            f"{path}: is not a proposal of this version; delete the file and run again"
        ) from error


def _outcome(root: Path, trial: str, sweep: SweepParams) -> dict[str, Any]:
    """Return a trial's score, and its learning curves as pairs of step and reward."""
    scores = scores_of(root, trial, sweep.seeds, sweep).values()
    curves = []
    for seed in sweep.seeds:
        by_behavior = read_curves(root / _curve_file(trial, seed))
        curve = by_behavior.get(sweep.behavior or next(iter(by_behavior), ""))
        if curve is not None:
            points = zip(curve.steps, curve.returns, strict=True)
            curves.append([[int(step), float(reward)] for step, reward in points])
    return {"score": sum(scores) / len(scores), "curves": curves}


def _curve_file(trial: str, seed: int) -> Path:
    return Path(f"results/train/{trial}/seed{seed}/progress.csv")


def _medians(results: Mapping[str, Any], sweep: SweepParams) -> list[list[float]]:
    """Return pairs of step and median reward of earlier trials.

    A new trial with a lower reward at such a step is ended.
    """
    if sweep.prune_after is None:
        return []
    at: dict[int, list[float]] = {}
    for result in results.values():
        for step, reward in (point for curve in result["curves"] for point in curve):
            at.setdefault(step, []).append(reward)
    return [
        [step, statistics.median(rewards)]
        for step, rewards in sorted(at.items())
        if step >= sweep.prune_after and len(rewards) >= _FEWEST_CURVES
    ]
