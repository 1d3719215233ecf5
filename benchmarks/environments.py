"""Run every environment as a real executable over the wire, and write the table of them.

    python benchmarks/environments.py [NAME ...] [--steps 10000] [--write]

Each is packed, started without an unpacked cache, played at random within its masks with three
resets in between, and closed; then nothing of it may be left. The step's time is that of the
exchange without a trainer: the lower quartile over blocks of 20 steps, because other work on the
machine only ever adds time. Scores are those of `scores.py`. The exit code is 1 if one fails.
With --write the table goes into docs/reference/environments/README.md; with NAMEs only their rows
do.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import scores
from catalogue import ALL, Listed, chosen
from conformance import Outcome, drive
from tables import put, table

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/environments/README.md"
_WORKS = ("starts", "steps", "resets", "closes", "none left")
_HEADER = ("environment", "exercises", *_WORKS, "start, s", "steps/s", "agent steps/s")
_HEADER += ("random", "scripted", "solved at")
_N_DIGITS = 2


def run(listed: Listed, folder: Path, *, n_steps: int, timeout_s: float = 60.0) -> Outcome:
    """Pack one environment and play it; what cannot be packed has not started."""
    try:
        executable = listed.build(folder)
    except PipelineError as error:
        return Outcome(n_wanted=n_steps, problem=str(error).splitlines()[0])
    before = os.environ.get("PIPELINE_CACHE")
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ["PIPELINE_CACHE"] = cache
        try:
            return drive(executable, n_steps=n_steps, timeout_s=timeout_s)
        finally:
            os.environ.pop("PIPELINE_CACHE")
            if before is not None:
                os.environ["PIPELINE_CACHE"] = before


def score(listed: Listed, kind: str) -> str:
    """Mean returns when all behaviors are played by `kind`."""
    if kind == scores.Scripted.kind and listed.env_id:
        return ""
    behaviors = scores.action_specs(listed.name, **listed.options)
    summaries = scores.play(
        listed.name, dict.fromkeys(behaviors, kind), listed.n_episodes, **listed.options
    )
    if len(summaries) == 1:
        return f"{summaries[0].mean:.2f}"
    return ", ".join(
        f"{summary.behavior.replace('?', ' ')} {summary.mean:.2f}" for summary in summaries
    )


def row(listed: Listed, outcome: Outcome, reached: Mapping[str, str]) -> list[str]:
    """The cells of one environment."""
    works = (
        _yes(outcome.start_s is not None),
        f"{outcome.n_steps:,}" if outcome.n_steps == outcome.n_wanted else f"**{outcome.n_steps}**",
        str(outcome.n_resets - 1) if outcome.n_resets else "**0**",
        _yes(outcome.closed),
        _yes(outcome.n_left == 0),
    )
    return [
        f"[{listed.env_id or listed.name}]({listed.page})",
        listed.exercises,
        *works,
        "" if outcome.start_s is None else f"{outcome.start_s:.1f}",
        _rate(outcome.env_rate),
        _rate(outcome.agent_rate),
        reached.get("random", ""),
        reached.get("scripted", ""),
        listed.threshold(),
    ]


def _yes(is_well: bool) -> str:
    return "yes" if is_well else "**no**"


def _rate(rate: float) -> str:
    if math.isnan(rate):
        return ""
    digits = max(0, math.floor(math.log10(rate)) + 1 - _N_DIGITS)
    return f"{round(rate / 10**digits) * 10**digits:,}"


def main() -> int:
    """Run the named environments, print the results, and write the table on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all environments if none")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--write", action="store_true", help="the table into its page")
    arguments = parser.parse_args()
    rows, has_failed = [], False
    with tempfile.TemporaryDirectory() as name:
        for listed in chosen(arguments.names):
            outcome = run(listed, Path(name), n_steps=arguments.steps)
            kinds = () if outcome.start_s is None else ("random", "scripted")
            rows.append(row(listed, outcome, {kind: score(listed, kind) for kind in kinds}))
            sys.stdout.write(f"{table(_HEADER, rows[-1:]).splitlines()[-1]}\n")
            for failure in outcome.failures:
                has_failed = True
                sys.stdout.write(f"  {listed.name}: {failure}\n")
            sys.stdout.flush()
    if arguments.write:
        put(PAGE, "environments", _HEADER, rows, keep=bool(arguments.names))
    sys.stdout.write(f"{len(rows)} of {len(ALL)} environments\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
