"""The `check` stage: params.yaml, its trainer files and the plan, before anything else is touched.

DVC deletes what a stage made before it runs the stage again. A stage that only then refuses its
parameters has lost its results, so the first stage refuses for all of them. It also writes down,
for each other stage, the source files that it imports and their contents: a stage depends on that
file alone, which is the same as before unless one of these has changed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import SettingsError, StageError, brief
from pipeline.settings.environments import BridgeSource, BuiltinSource, PathSource
from pipeline.settings.nodes import fail_at, find
from pipeline.settings.params import Params, load_params
from pipeline.settings.plan import RUNS_FILE, check_files, check_plan, check_settings
from pipeline.settings.yaml_file import read_yaml
from pipeline.stages.shared import project, sources

_WITH_RESULTS = (
    *("demos", "pretrain", "train", "propose", "sweep", "export", "evaluate", "report"),
)

_CLOCKS_DIFFER_S = 10.0
"""How far clocks of machines that share a disk may differ."""
_NAMED = 5
"""Files in a message."""


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    return project.main(argv, __doc__, check, short=True)


def check(root: Path) -> None:
    """Make the files on which the other stages depend.

    Raises:
        PipelineError: There is a mistake, or the plan is out of date.
    """
    params = load_params(root / "params.yaml")
    check_params(params)
    refuse_linked_results(root)
    check_plan(params, root / RUNS_FILE)
    code = project.code_of(root)
    for stage in sources.stages(code):
        sources.note(root, stage, code)


def check_params(params: Params) -> None:
    """Raise PipelineError for mistakes that a later stage would refuse."""
    check_settings(params)
    check_files(params)
    check_ids(params)


def refuse_linked_results(root: Path) -> None:
    """Refuse links that lead out of the project, of folders that DVC writes results into.

    DVC runs such a stage to its end before it refuses what the stage has made. Snakemake takes it.

    Raises:
        StageError: There is such a link.
    """
    folders = [root / "data", root / "data/demos", root / "results"]
    for stage in _WITH_RESULTS:
        for place, inside, _ in os.walk(root / "results" / stage):
            folders += [Path(place), *(Path(place, name) for name in inside)]
    for folder in folders:
        if folder.is_symlink() and not folder.resolve().is_relative_to(root.resolve()):
            linked = folder.relative_to(root)
            raise StageError(
                f"{linked}: is a link to {folder.resolve()}, outside of the project, where DVC "
                f"takes no results. Move its files back to {linked}; if they need another disk, "
                "move the whole project there (a link to it may stay here), or only DVC's copies: "
                "`dvc cache dir FOLDER` and `dvc config cache.type symlink`."
            )


def refuse_files_of_the_future(params: Params) -> None:
    """Refuse inputs and results that are dated in the future, by a clock that was wrong.

    Snakemake runs a job to its end, finds its outputs older than such an input, and deletes them.

    Raises:
        StageError: There are such files.
    """
    root, now = params.path.parent, time.time()
    places = ["constraints.txt", "config", "data", "src/pipeline", "workflow", "build/env"]
    places += [f"results/{stage}" for stage in _WITH_RESULTS]
    places += [experiment.trainer for experiment in params.experiments.values()]
    builds = (source for source in params.environments.values() if isinstance(source, PathSource))
    places += [build.found(root) for build in builds]
    late = set()
    for place in places:
        for file in (root / place, *(root / place).rglob("*")):
            with contextlib.suppress(OSError):
                if file.stat().st_mtime > now + _CLOCKS_DIFFER_S:
                    late.add(os.path.relpath(file, root))
    if late:
        names, more = sorted(late)[:_NAMED], len(late) - _NAMED
        rest = f"; so are {more} others" if more > 0 else ""
        raise StageError(
            f"{names[0]}: is dated in the future, so each job of Snakemake that reads it fails; "
            f"when the clock is right: `touch {shlex.join(names)}`{rest}"
        )


def refuse_absent_slurm(*, without_accounts: bool) -> None:
    """Refuse a machine from which SLURM takes no job, before Snakemake submits the first.

    Raises:
        StageError: A command of SLURM is missing, or its controller does not answer.
    """
    needed = ("sbatch", "sinfo", *(() if without_accounts else ("sacct",)))
    if missing := [command for command in needed if shutil.which(command) is None]:
        raise StageError(
            f"SLURM: no {' and no '.join(missing)} in PATH, so nothing was submitted or deleted: "
            "start Snakemake on a machine that has them; where SLURM keeps no accounts, with "
            "--slurm-no-account --slurm-status-command squeue"
        )
    asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=False)  # noqa: S607
    if asked.returncode:
        raise StageError(
            f"SLURM: `sinfo` failed ({brief(asked.stderr.strip())}), so nothing was submitted or "
            "deleted: try again when `sinfo` answers"
        )


def check_ids(params: Params) -> None:
    """Refuse unknown simulators and ids, and builds in the folder of the project itself.

    Modules may be in the folder of params.yaml.

    Raises:
        SettingsError: A name is unknown; the message has its place, and the nearest names.
    """
    folder = str(params.path.resolve().parent)
    for name, environment in params.environments.items():
        try:
            if isinstance(environment, BridgeSource):
                # Appended, not put first: a file beside params.yaml must not hide an installed
                # package.
                if folder not in sys.path:
                    sys.path.append(folder)
                from pipeline.simulators.bridges import naming

                checks = {"module": naming.function_of, "gymnasium": naming.registered}
                checks.get(environment.source, naming.full_name)(environment.id)
            elif isinstance(environment, BuiltinSource):
                from pipeline.simulators import registry

                registry.entry(environment.name or name)
            elif isinstance(environment, PathSource):
                environment.found(params.path.parent)
        except SettingsError as error:
            # The registry knows neither file nor line. The error names the key that the user
            # wrote, or the section if the key is missing.
            root, at = read_yaml(params.path), f"environments.{name}"
            section = find(root, at).value
            key = next((key for key in ("id", "name", "path") if key in section), None)
            at = f"{at}.{key}" if isinstance(section, dict) and key else at
            raise fail_at(root, at, str(error)) from error
