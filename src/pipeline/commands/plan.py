"""`pipeline plan`: write the table of runs, or say whether it is up to date."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.engines import mend_lock
from pipeline.settings.params import load_params
from pipeline.settings.plan import RUNS_FILE, check_plan, write_plan
from pipeline.stages.check import check_ids

if TYPE_CHECKING:
    import argparse

    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline plan`."""
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")


def run(arguments: argparse.Namespace) -> str:
    """Write the table of the working folder's params.yaml."""
    params = load_params(Path("params.yaml"))
    check_ids(params)
    if arguments.check:
        check_plan(params)
        return f"{RUNS_FILE} is up to date."
    write_plan(params)
    # `dvc repro`, the usual next command, cannot read an incomplete dvc.lock.
    mend_lock(Path())
    # In a container fewer cores may be allowed than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"Wrote {RUNS_FILE}. Run `dvc repro` or `snakemake --cores {cores or 1}`."
