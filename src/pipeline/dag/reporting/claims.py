"""Check of the present results against `claims.yaml`, and of their files against `claims.lock`.

`claims.lock` has what the claims were written from: the digest of each result file, and the records
of what made each policy. Values that runs share, such as the sources, are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline import files
from pipeline.dag.reporting import results
from pipeline.errors import SettingsError
from pipeline.evaluation import statistics
from pipeline.evaluation.comparison import EVALUATED, Task, compare
from pipeline.evaluation.tables import ends, number
from pipeline.settings.project.claims import CLAIMS, LOCK, Claim, load_claims
from pipeline.settings.project.params import Params

Lock = dict[str, dict[str, Any]]
"""For each experiment and seed (as text): in `files` the digest of each result file, by path, and
in `history` a list with the record of each stage."""
HEADER = ("Claim", "Claimed", "Here", "Answer")
SHARED = ("parameters", "inputs", "versions", "sources", "machine")
"""Parts of a record that many runs have in common."""
_FORMAT = "shared, format 1"
FILES = {"train": ("metrics.json", "progress.csv"), "evaluate": ("metrics.json", "episodes.csv")}
"""The result files of a run that contain its scores and curves, by stage. A digest of the policy in
these files makes a check of the policy itself unnecessary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a claim."""

    name: str
    claim: Claim
    verdict: Literal["identical", "reproduced", "not"]
    here: str
    """The present value as text, or why there is none."""
    changed: tuple[str, ...] | None = None
    """Result files that differ from the recorded files; None if there is no present value."""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the answer's row in the table with the header `HEADER`."""
        claim = self.claim
        spread = f"({ends(claim.interval)})" if claim.interval else f"+/- {claim.tolerance}"
        text = f"{claim.metric} of {claim.experiment}: {number(claim.value or 0)} {spread}"
        if claim.better_than is not None:
            text = f"P({claim.experiment} > {claim.better_than}) at least {claim.probability}"
        return self.name, text, self.here, self.verdict


class NoValueError(Exception):
    """The results have no value for a claim; the message says why."""


def answers(root: Path, params: Params) -> list[Answer]:
    """Return the answer to each claim of a project, from its result files alone.

    Raises:
        PipelineError: claims.yaml, claims.lock or a result file cannot be read.
    """
    recorded = read_lock(root)
    claims = load_claims(root).items()
    return [_answer(root, params, name, claim, recorded) for name, claim in claims]


def _answer(root: Path, params: Params, name: str, claim: Claim, recorded: Lock) -> Answer:
    names = [one for one in (claim.experiment, claim.better_than) if one is not None]
    try:
        # The scores of each experiment are computed without the other experiments, so that they do
        # not depend on which other experiments params.yaml has.
        tasks = [_task(tasks_of(root, params, one), claim, name) for one in names]
        here, holds = _judged(claim, tasks)
    except NoValueError as reason:
        return Answer(name=name, claim=claim, verdict="not", here=str(reason))
    # The files of both experiments of a comparison are compared, because a change in either of them
    # may have changed the answer.
    then, now = dict[str, str](), dict[str, str]()
    for one in names:
        for run in recorded.get(one, {}).values():
            then |= run["files"]
        for seed in params.experiments[one].seeds:
            now |= digests(root, params, one, seed)
    changed = tuple(path for path in {**then, **now} if then.get(path) != now.get(path))
    # Equal bytes are not enough: the value in claims.yaml may have been edited.
    verdict: Any = "not" if not holds else "reproduced" if changed else "identical"
    return Answer(name=name, claim=claim, verdict=verdict, here=here, changed=changed)


def tasks_of(root: Path, params: Params, name: str) -> list[Task]:
    """Return the scores of an experiment over all its seeds, for each of its behaviors.

    Raises:
        NoValueError: A seed lacks results, or an evaluation of its present policy.
    """
    if name not in params.experiments:
        raise NoValueError(f"params.yaml has no experiment {name}")
    experiment = params.experiments[name]
    outcomes = [one for one in results.outcomes(root, params) if one.experiment == name]
    tasks = compare(outcomes)
    # Without this check the ends of the learning curves would stand in for missing evaluations.
    has_scores = "evaluate" not in experiment.stages or {task.score for task in tasks} <= {
        EVALUATED
    }
    if not tasks or not has_scores or {*experiment.seeds} != {one.seed for one in outcomes}:
        raise NoValueError(f"{name} has seeds without results; run `pipeline run {name}`")
    return tasks


def _task(tasks: Sequence[Task], claim: Claim, name: str) -> Task:
    found = [task for task in tasks if claim.behavior in (None, task.behavior)]
    if len(found) != 1:
        known = ", ".join(task.behavior for task in tasks)
        raise SettingsError(f"{CLAIMS}: {name}.behavior: needs one of {known}")
    return found[0]


def _judged(claim: Claim, tasks: Sequence[Task]) -> tuple[str, bool]:
    """Return the present value as text, and whether it agrees with the claim."""
    one, other = tasks[0].standings[0], tasks[-1].standings[0]
    if claim.better_than is not None:
        # Returns of different environments or behaviors have different units.
        if tasks[0].name != tasks[1].name:
            raise NoValueError(
                f"{claim.experiment} and {claim.better_than} have different environments or "
                "behaviors, so their scores cannot be compared"
            )
        share = statistics.probability_of_improvement(np.array(one.scores), np.array(other.scores))
        n_seeds = f"{len(one.seeds)} and {len(other.seeds)} seeds"
        return f"{number(share)}, {n_seeds}", share >= (claim.probability or 0.0)
    value, interval = one.iqm, one.interval
    if claim.metric == "mean":
        # The interval of the mean is Student's t interval; the bootstrap interval is for the
        # interquartile mean.
        summary = statistics.summarize(one.scores)
        value, low, high = summary.mean, summary.ci_low, summary.ci_high
        interval = None if low is None or high is None else (low, high)
    text = f"{number(value)}{f' ({ends(interval)})' if interval else ''}, {len(one.seeds)} seeds"
    if claim.interval is None:
        # Both values are shortened, so that a tolerance of 0 holds for a value that `pipeline
        # claims write` has rounded.
        far = abs(shortened(value) - shortened(claim.value or 0.0))
        return text, far <= (claim.tolerance or 0.0)
    # If the present results have too few seeds for an interval, their value alone has to be inside
    # the claimed interval.
    low, high = map(shortened, interval or (value, value))
    return text, low <= claim.interval[1] and high >= claim.interval[0]


def shortened(value: float) -> float:
    """Return a number rounded to six significant digits, as `pipeline claims write` writes it."""
    return float(f"{value:.6g}")


def digests(root: Path, params: Params, name: str, seed: int) -> dict[str, str]:
    """Return the SHA-256 of each file of a run that `FILES` lists, by its path in the project."""
    paths = [
        Path("results", stage, name, f"seed{seed}", file)
        for stage in params.experiments[name].stages
        for file in FILES.get(stage, ())
    ]
    return {str(path): files.sha256_of(root / path) for path in paths if (root / path).is_file()}


def read_lock(root: Path) -> Lock:
    """Return the content of `claims.lock`; {} without the file.

    The file stores values that several records share only once; the result has them in each record.

    Raises:
        SettingsError: The file is damaged, or has another format.
    """
    path = root / LOCK
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # A file of another format has another key, so that it is refused here.
        shared: Mapping[str, Any] = content[_FORMAT]
        for run in (run for seeds in content["runs"].values() for run in seeds.values()):
            run["files"] = dict(run["files"])
            for record in run["history"]:
                record |= {part: shared[record[part]] for part in SHARED}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = "take it from git again, or write it with `pipeline claims write`"
        raise SettingsError(f"{path}: cannot be read ({error!r}); {remedy}") from error
    runs: Lock = content["runs"]
    return runs


def lock_text(recorded: Lock) -> str:
    """Return the text of `claims.lock`."""
    shared: dict[str, Any] = {}

    def packed(record: Mapping[str, Any]) -> dict[str, Any]:
        # 16 hex digits of SHA-256 tell the few values of a project apart.
        keys = {part: files.fingerprint(record[part])[:16] for part in SHARED}
        shared.update({key: record[part] for part, key in keys.items()})
        return {**record, **keys}

    runs = {
        name: {
            seed: {"files": run["files"], "history": [*map(packed, run["history"])]}
            for seed, run in seeds.items()
        }
        for name, seeds in recorded.items()
    }
    return json.dumps({"runs": runs, _FORMAT: shared}, indent=1, sort_keys=True) + "\n"
