"""Ours and `mlagents-learn` on the same executables with the same settings, at equal steps.

    python benchmarks/learning.py [--case NAME ...] [--seeds 1 2 3] [--programs ours peer]
        [--results FOLDER] [--steps N] [--threaded] [--curves] [--write]

Every case trains with each program and seed. Then its final ONNX policy plays in the environment,
the peer's as ours: sampled actions, as Unity takes them unless told otherwise, and deterministic
ones. In a duel the two also play against each other. Runs that FOLDER already holds with the same
settings are read, not repeated. With --threaded both programs learn while the environment steps.
--curves prints the mean reward at each summary as well, --write puts the table into
docs/evidence/comparison.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from cases import CASES, Case
from peer import ROOT
from runs import NAMES, Runs, interval, n_digits, say
from scipy.stats import ttest_ind
from tables import put, table

from pipeline.evaluation.statistics import CONFIDENCE, Summary, summarize

if TYPE_CHECKING:
    from runs import Outcome

PAGE = ROOT / "docs/evidence/comparison.md"
_HEADER = (
    *("case", "environment", "settings", "steps", "seeds", "random", "best known"),
    *("mlagents-learn", "ours", "ours is", "difference"),
    *("deterministic: mlagents-learn", "ours"),
    *("while training: mlagents-learn", "ours"),
)


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--programs", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--results", type=Path, help="kept between calls; a new one if not given")
    parser.add_argument("--steps", type=int, help="instead of the settings' max_steps")
    parser.add_argument("--sources", type=Path, default=ROOT / "src", help="of ours")
    parser.add_argument("--threaded", action="store_true", help="learn while environments step")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    folder = options.results or Path(tempfile.mkdtemp())
    rows = []
    for name in options.case:
        run_options = {"steps": options.steps, "threaded": options.threaded}
        runs = Runs(CASES[name], folder, sources=options.sources, **run_options)
        outcomes = {
            program: [runs.outcome(program, seed) for seed in options.seeds]
            for program in options.programs
        }
        rows.append(row(CASES[name], runs.max_steps, outcomes))
        if CASES[name].duel and len(outcomes) > 1:
            matches = interval(summarize(runs.matches(options.seeds)))
            cell = _HEADER.index("ours is")
            parts = [rows[-1][cell], f"against the peer {matches}"]
            rows[-1][cell] = "; ".join(part for part in parts if part)
        say(table(_HEADER, rows[-1:]).splitlines()[-1])
        if options.curves:
            for line in curves(outcomes):
                say(line)
    if options.write:
        put(PAGE, "learning", _HEADER, rows, keep=True)


def row(case: Case, steps: int, found: dict[str, list[Outcome]]) -> list[str]:
    """The cells of one case."""
    sampled = {program: summarize([run.sampled for run in runs]) for program, runs in found.items()}
    fixed = {
        program: summarize([run.deterministic for run in runs]) for program, runs in found.items()
    }
    during_training = {
        program: summarize([mean_reward(run) for run in runs]) for program, runs in found.items()
    }
    environment = case.environment
    return [
        case.title,
        f"[{environment.env_id or environment.name}](environments/{environment.page})",
        f"`{case.file}`",
        f"{steps:,}",
        str(max(len(runs) for runs in found.values())),
        case.untrained,
        environment.solved,
        interval(sampled.get("peer")),
        interval(sampled.get("ours")),
        verdict(sampled.get("ours"), sampled.get("peer")),
        difference(
            *([run.sampled for run in found.get(program, [])] for program in ("ours", "peer"))
        ),
        interval(fixed.get("peer")),
        interval(fixed.get("ours")),
        interval(during_training.get("peer")),
        interval(during_training.get("ours")),
    ]


def mean_reward(run: Outcome) -> float:
    """Mean of the rewards of all summaries of a run, which says how early it learned."""
    return float(np.mean([reward for reward in run.curve.rewards if reward is not None]))


def verdict(ours: Summary | None, peer: Summary | None) -> str:
    """Where the mean of ours lies: below, within or above the peer's interval."""
    if ours is None or peer is None or peer.ci_low is None or peer.ci_high is None:
        return ""
    if ours.mean < peer.ci_low:
        return "**below**"
    return "above" if ours.mean > peer.ci_high else "within"


def difference(ours: list[float], peer: list[float]) -> str:
    """Mean of ours minus the peer's, with its 95 % interval (Welch 1947); "" if not defined."""
    if min(len(ours), len(peer)) < 2 or np.ptp(ours) == np.ptp(peer) == 0:
        return ""
    bounds = ttest_ind(ours, peer, equal_var=False).confidence_interval(CONFIDENCE)
    n = n_digits(float(np.mean(peer)))
    return f"{np.mean(ours) - np.mean(peer):+.{n}f} [{bounds.low:+.{n}f}, {bounds.high:+.{n}f}]"


def curves(found: dict[str, list[Outcome]]) -> list[str]:
    """Return a table of each program's mean reward over seeds, at the steps of all its runs."""
    by_step: dict[str, dict[int, Summary]] = {}
    for program, runs in found.items():
        run_curves = [dict(zip(run.curve.steps, run.curve.rewards, strict=True)) for run in runs]
        shared = sorted(set.intersection(*(set(curve) for curve in run_curves)))
        values = {step: [curve[step] for curve in run_curves] for step in shared}
        by_step[program] = {
            step: summarize([value for value in rewards if value is not None])
            for step, rewards in values.items()
            if None not in rewards
        }
    steps = sorted(set.union(*(set(summaries) for summaries in by_step.values())))
    lines = ["step".rjust(9) + "".join(NAMES[name].rjust(26) for name in by_step)]
    for step in steps:
        cells = [
            interval(summaries[step]) if step in summaries else "" for summaries in by_step.values()
        ]
        lines.append(f"{step:>9}" + "".join(cell.rjust(26) for cell in cells))
    return lines


if __name__ == "__main__":
    main()
