"""Ours and `mlagents-learn` on the same executables with the same settings, at equal steps.

    python benchmarks/learning.py [--case NAME ...] [--seeds 1 2 3] [--programs ours peer]
        [--results FOLDER] [--steps N] [--curves] [--write]

Every case trains with each program and seed. Then its final ONNX policy plays in the environment,
the peer's as ours: sampled actions, as Unity takes them unless told otherwise, and deterministic
ones. Runs that FOLDER already holds with the same settings are read, not repeated. --curves prints
the mean reward at each summary as well, --write puts the table into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from cases import CASES, Case
from final import returns
from peer import ROOT, Curve, train
from tables import put, table

from pipeline.evaluation.statistics import Summary, summarize
from pipeline.files import write_whole

PAGE = ROOT / "docs/comparison.md"
PROGRAMS = ("ours", "peer")
_NAMES = {"ours": "ours", "peer": "mlagents-learn"}
_HEADER = (
    *("case", "environment", "settings", "steps", "random", "best known"),
    *("mlagents-learn", "ours", "ours is", "deterministic: mlagents-learn", "ours"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One training run and what its policy is worth."""

    settings: str
    """Digest of what was trained."""
    curve: Curve
    """What the run printed."""
    sampled: float
    """Mean return of the final policy with sampled actions."""
    deterministic: float
    """The same with its most probable ones."""


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--results", type=Path, help="kept between calls; a new one if not given")
    parser.add_argument("--steps", type=int, help="instead of the settings' max_steps")
    parser.add_argument("--sources", type=Path, default=ROOT / "src", help="of ours")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    folder = options.results or Path(tempfile.mkdtemp())
    rows = []
    for name in options.case:
        place = folder / (f"{name}-{options.steps}" if options.steps else name)
        runs = Runs(CASES[name], place, steps=options.steps, sources=options.sources)
        found = {
            program: [runs.outcome(program, seed) for seed in options.seeds]
            for program in options.programs
        }
        rows.append(row(CASES[name], runs.max_steps, found))
        say(table(_HEADER, rows[-1:]).splitlines()[-1])
        if options.curves:
            for line in curves(found):
                say(line)
    if options.write:
        put(PAGE, "learning", _HEADER, rows, keep=True)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Runs:
    """The runs of one case, trained when they are asked for and not there yet."""

    def __init__(self, case: Case, folder: Path, *, steps: int | None, sources: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._case, self._folder, self._sources = case, folder.resolve(), sources
        content = case.settings(steps, Path("expert.demo"))
        described = json.dumps([content, case.environment.name, case.environment.options])
        self._digest = hashlib.sha256(described.encode()).hexdigest()
        (behavior,) = content["behaviors"].values()
        self.max_steps: int = behavior["max_steps"]

    def outcome(self, program: str, seed: int) -> Outcome:
        """What a program made of the case with a seed."""
        kept = self._folder / f"{program}-{seed}.json"
        if kept.exists():
            content = json.loads(kept.read_text())
            if content["settings"] == self._digest:
                return Outcome(**{**content, "curve": Curve(**content["curve"])})
        config = self._folder / "trainer.yaml"
        demo = self._case.demonstrations(self._folder)
        config.write_text(
            yaml.safe_dump(self._case.settings(self.max_steps, demo), sort_keys=False)
        )
        env = self._case.environment.build(self._folder)
        curve = train(program, config, env, seed=seed, folder=self._folder, sources=self._sources)
        models = self._folder / f"{program}-{seed}"
        outcome = Outcome(
            settings=self._digest,
            curve=curve,
            sampled=returns(self._case, models, deterministic=False),
            deterministic=returns(self._case, models, deterministic=True),
        )
        write_whole(kept, json.dumps(asdict(outcome)))
        sys.stderr.write(
            f"{self._case.name}, {_NAMES[program]}, seed {seed}: {outcome.sampled:.3f} sampled, "
            f"{outcome.deterministic:.3f} deterministic, {curve.wall_s:.0f} s\n"
        )
        return outcome


def row(case: Case, steps: int, found: dict[str, list[Outcome]]) -> list[str]:
    """The cells of one case."""
    sampled = {one: summarize([run.sampled for run in runs]) for one, runs in found.items()}
    fixed = {one: summarize([run.deterministic for run in runs]) for one, runs in found.items()}
    own = case.environment
    return [
        case.title,
        f"[{own.env_id or own.name}](environments/{own.page})",
        f"`{case.name}.yaml`",
        f"{steps:,}",
        case.untrained,
        own.solved,
        interval(sampled.get("peer")),
        interval(sampled.get("ours")),
        verdict(sampled.get("ours"), sampled.get("peer")),
        interval(fixed.get("peer")),
        interval(fixed.get("ours")),
    ]


def interval(summary: Summary | None) -> str:
    """Mean over seeds and its 95 % interval."""
    if summary is None:
        return "not run"
    if summary.ci_low is None or summary.ci_high is None:
        return f"{summary.mean:.2f} (one seed)"
    return f"{summary.mean:.2f} [{summary.ci_low:.2f}, {summary.ci_high:.2f}]"


def verdict(ours: Summary | None, peer: Summary | None) -> str:
    """Where the mean of ours lies: below, within or above the peer's interval."""
    if ours is None or peer is None or peer.ci_low is None or peer.ci_high is None:
        return ""
    if ours.mean < peer.ci_low:
        return "**below**"
    return "above" if ours.mean > peer.ci_high else "within"


def curves(found: dict[str, list[Outcome]]) -> list[str]:
    """Mean reward of each program's seeds by steps, where all of a program's runs have one."""
    by_step: dict[str, dict[int, Summary]] = {}
    for program, runs in found.items():
        each = [dict(zip(run.curve.steps, run.curve.rewards, strict=True)) for run in runs]
        shared = sorted(set.intersection(*(set(one) for one in each)))
        values = {step: [one[step] for one in each] for step in shared}
        by_step[program] = {
            step: summarize([value for value in some if value is not None])
            for step, some in values.items()
            if None not in some
        }
    steps = sorted(set.union(*(set(one) for one in by_step.values())))
    lines = ["step".rjust(9) + "".join(_NAMES[one].rjust(26) for one in by_step)]
    for step in steps:
        cells = [interval(one[step]) if step in one else "" for one in by_step.values()]
        lines.append(f"{step:>9}" + "".join(cell.rjust(26) for cell in cells))
    return lines


if __name__ == "__main__":
    main()
