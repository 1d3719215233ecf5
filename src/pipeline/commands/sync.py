"""`pipeline sync`: make one engine agree after the other has run.

Neither engine knows of the other, and each can be told to take whatever lies there for its own
result. That blesses stale results too, so it is done only when the engine that ran is itself up to
date with the code, the parameters and the inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands import engines
from pipeline.errors import StageError
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan

if TYPE_CHECKING:
    import argparse

    from pipeline.commands.parser import Parser

_SHOWN = 8


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline sync`."""
    parser.add_argument(
        "--from",
        dest="source",
        choices=("dvc", "snakemake"),
        help="the engine that has run; found out when not given",
    )


def run(arguments: argparse.Namespace) -> str:
    """Make the engines agree in the working folder."""
    return sync(Path.cwd(), arguments.source)


def sync(root: Path, source: str | None) -> str:
    """Make the other engine agree with `source`, or with whichever is up to date if it is None."""
    check_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    # Before asking DVC, which reads no file that is cut off.
    engines.mend_lock(root)
    if source is None:
        dvc, snakemake = engines.dvc_state(root), engines.snakemake_state(root)
        if dvc.up_to_date and snakemake.up_to_date:
            return "DVC and Snakemake agree already."
        if not dvc.up_to_date and not snakemake.up_to_date:
            raise StageError(
                f"neither engine is up to date: {_what('dvc', dvc)}; "
                f"{_what('snakemake', snakemake)}. Run `dvc repro` or `snakemake --cores 1` first."
            )
        return _follow(root, "dvc" if dvc.up_to_date else "snakemake")
    state = engines.dvc_state(root) if source == "dvc" else engines.snakemake_state(root)
    if not state.up_to_date:
        run = "dvc repro" if source == "dvc" else "snakemake --cores 1"
        raise StageError(f"{_what(source, state)}. Run `{run}` first.")
    return _follow(root, source)


def _follow(root: Path, source: str) -> str:
    if source == "dvc":
        engines.bless_snakemake(root)
        # Asked again afterwards: neither `--touch` nor `commit` says whether it did the whole.
        left = engines.snakemake_state(root)
    else:
        engines.bless_dvc(root)
        left = engines.dvc_state(root)
    other = "snakemake" if source == "dvc" else "dvc"
    if not left.up_to_date:
        raise StageError(f"after syncing, still: {_what(other, left)}. Run that engine.")
    return f"{other} now agrees with {source}."


def _what(name: str, state: engines.State) -> str:
    parts = []
    if state.pending:
        parts.append(f"would run {_some(state.pending)}")
    if state.unrecorded:
        parts.append(f"has no record of {_some(state.unrecorded)}")
    return f"{name} {' and '.join(parts)}"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
