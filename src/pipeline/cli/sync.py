"""`pipeline sync`: make one engine accept the results of the other.

Neither engine reads the other's records, but each can be told to accept the present results. That
would also accept outdated results, so it is done only if the engine that ran finds all results up
to date with code, parameters and inputs, or if each result is up to date for one of the two
engines.
"""

import argparse
from pathlib import Path

from pipeline.cli.parser import Parser, option
from pipeline.dag import engines
from pipeline.errors import StageError, few
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_plan

_MAX_NAMES = 8
# These tables have functions and commands by engine, so that `sync` is written once for both
# directions.
_STATES = {"dvc": engines.dvc_state, "snakemake": engines.snakemake_state}
_ACCEPT = {"dvc": engines.accept_in_dvc, "snakemake": engines.accept_in_snakemake}
_COMMANDS = {"dvc": "dvc repro", "snakemake": "snakemake --cores 1"}


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline sync`."""
    text = "the engine that made the results (default: the engine that finds them up to date)"
    option(parser, "--from ENGINE", text, dest="source", choices=("dvc", "snakemake"), metavar=None)


def run(arguments: argparse.Namespace) -> str:
    """Make both engines accept the results in the working folder, and return what was done."""
    return sync(Path.cwd(), arguments.source)


def sync(root: Path, source: str | None) -> str:
    """Make the other engine accept the results of `source`, or of the engine that is up to date."""
    check_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    # An incomplete dvc.lock is repaired first, because DVC cannot read it.
    engines.truncate_incomplete_dvc_lock(root)
    states = {name: _STATES[name](root) for name in ([source] if source else _STATES)}
    ready = [name for name, state in states.items() if state.up_to_date]
    if len(ready) == len(_STATES):
        return "DVC and Snakemake already agree."
    if ready:
        others = [name for name in _STATES if name not in ready]
        # There are two engines, so `others` has one name.
        done = f"{others[0]} now agrees with {ready[0]}."
    elif not source and _made_together(**states):
        others = ["snakemake", "dvc"]
        done = "DVC and Snakemake now agree: each had made a part of the results."
    else:
        neither = "" if source else "neither engine is up to date: "
        reasons = "; ".join(_describe(name, state) for name, state in states.items())
        # An engine is proposed only if it has stages to run; if no engine has any, DVC is proposed.
        able = [name for name, state in states.items() if state.pending] or ["dvc"]
        commands = " or ".join(f"`{_COMMANDS[name]}`" for name in able)
        raise StageError(f"{neither}{reasons}. Run {commands} first.")
    for other in others:
        _ACCEPT[other](root)
    # Neither `--touch` nor `commit` reports results that it skipped.
    for other in others:
        remaining = _STATES[other](root)
        if not remaining.up_to_date:
            raise StageError(f"after the sync, {_describe(other, remaining)}. Run this engine.")
    return done


def _made_together(dvc: engines.State, snakemake: engines.State) -> bool:
    """Return whether each result is up to date for at least one of the two engines."""
    # Each result is then up to date in one of the engines, so the other engine can accept it.
    return not snakemake.pending and not {*snakemake.unrecorded} & {*dvc.pending}


def _describe(name: str, state: engines.State) -> str:
    parts = []
    if state.pending:
        parts.append(f"would run {few(state.pending, _MAX_NAMES)}")
    if state.unrecorded:
        parts.append(f"has no record of {few(state.unrecorded, _MAX_NAMES)}")
    changed = f" (changed: {few(state.changed, _MAX_NAMES)})" if state.changed else ""
    return f"{name} {' and '.join(parts)}{changed}"
