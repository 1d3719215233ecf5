"""`pipeline sync`: make one engine agree after the other has run.

Neither engine knows of the other, and each can be told to accept the present results as its own.
That would also accept stale results, so it is done only when the engine that ran is itself up to
date with the code, the parameters and the inputs, or when each result is that for one of the two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import engines
from pipeline.commands.parser import Parser, option
from pipeline.errors import StageError, few
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan

_SHOWN = 8
_STATES = {"dvc": engines.dvc_state, "snakemake": engines.snakemake_state}
_BLESS = {"dvc": engines.bless_dvc, "snakemake": engines.bless_snakemake}
_COMMANDS = {"dvc": "dvc repro", "snakemake": "snakemake --cores 1"}


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline sync`."""
    text = "the engine that has run; found out when not given"
    option(parser, "--from ENGINE", text, dest="source", choices=("dvc", "snakemake"), metavar=None)


def run(arguments: argparse.Namespace) -> str:
    """Make the engines agree in the working folder."""
    return sync(Path.cwd(), arguments.source)


def sync(root: Path, source: str | None) -> str:
    """Make the other engine agree with `source`; None for the engine that is up to date."""
    check_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    # Before asking DVC, which cannot read an incomplete dvc.lock.
    engines.mend_lock(root)
    states = {name: _STATES[name](root) for name in ([source] if source else _STATES)}
    ready = [name for name, state in states.items() if state.up_to_date]
    if len(ready) == len(_STATES):
        return "DVC and Snakemake agree already."
    if ready:
        others = [name for name in _STATES if name not in ready]
        done = f"{others[0]} now agrees with {ready[0]}."
    elif not source and _made_together(**states):
        others = ["snakemake", "dvc"]
        done = "DVC and Snakemake agree now: each had made a part of the results."
    else:
        neither = "" if source else "neither engine is up to date: "
        reasons = "; ".join(_describe(name, state) for name, state in states.items())
        # An engine that would run nothing does not help.
        able = [name for name, state in states.items() if state.pending] or ["dvc"]
        commands = " or ".join(f"`{_COMMANDS[name]}`" for name in able)
        raise StageError(f"{neither}{reasons}. Run {commands} first.")
    for other in others:
        _BLESS[other](root)
    # Checked afterwards: neither `--touch` nor `commit` reports whether it covered everything.
    for other in others:
        remaining = _STATES[other](root)
        if not remaining.up_to_date:
            raise StageError(
                f"after syncing, still: {_describe(other, remaining)}. Run that engine."
            )
    return done


def _made_together(dvc: engines.State, snakemake: engines.State) -> bool:
    """Whether DVC is up to date with each result that Snakemake has no record of."""
    return not snakemake.pending and not {*snakemake.unrecorded} & {*dvc.pending}


def _describe(name: str, state: engines.State) -> str:
    parts = []
    if state.pending:
        parts.append(f"would run {few(state.pending, _SHOWN)}")
    if state.unrecorded:
        parts.append(f"has no record of {few(state.unrecorded, _SHOWN)}")
    changed = f" (changed: {few(state.changed, _SHOWN)})" if state.changed else ""
    return f"{name} {' and '.join(parts)}{changed}"
