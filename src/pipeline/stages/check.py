"""The `check` stage: params.yaml, its trainer files and the plan, before anything else is touched.

DVC deletes what a stage made before it runs the stage again. A stage that only then refuses its
parameters has lost its results, so the first stage refuses for all of them. What it makes is always
the same, so nothing runs again because it has.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.settings.params import load_params
from pipeline.settings.plan import RUNS_FILE, check_plan, check_settings
from pipeline.stages import bridged, common, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.settings.params import Params

CHECKED = Path("workflow/checked.txt")
_TEXT = "params.yaml, its trainer files and workflow/runs.yaml: no mistake.\n"


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    return process.run(lambda: check(common.checkout()), short=True)


def check(root: Path) -> None:
    """Make the file on which the other stages depend.

    Raises:
        PipelineError: There is a mistake, or the plan is out of date.
    """
    check_params(load_params(root / "params.yaml"), root / RUNS_FILE)
    files.write_whole(root / CHECKED, _TEXT)


def check_params(params: Params, runs_file: Path = RUNS_FILE) -> None:
    """Refuse what some stage would refuse later.

    Raises:
        PipelineError: There is a mistake, or the plan is out of date.
    """
    check_settings(params)
    bridged.check_ids(params)
    check_plan(params, runs_file)
