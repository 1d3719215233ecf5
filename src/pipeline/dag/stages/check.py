"""The `check` stage: check params.yaml, its trainer files and the plan before any other stage.

DVC deletes a stage's results before it runs the stage again. If the stage then refused its
parameters, the results would be lost, so this first stage checks the parameters of all stages.

The stage also records the digests of the source files that each other stage imports. DVC's stages
depend on these records, which change only if a source file has changed.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from pipeline.dag import project
from pipeline.dag.engines import note_sources
from pipeline.errors import SettingsError, StageError, brief
from pipeline.settings.nodes import fail_at, find
from pipeline.settings.project.claims import load_claims
from pipeline.settings.project.environments import BridgeSource, BuiltinSource, PathSource
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import RUNS_FILE, check_files, check_plan, check_settings
from pipeline.settings.yaml_file import read_yaml

# Stages with a folder below `results`; `env` writes to `build`, and `check` to `workflow/code`.
_WITH_RESULTS = (
    *("demos", "pretrain", "train", "propose", "sweep", "export", "evaluate", "report"),
)

_CLOCKS_DIFFER_S = 10.0
"""Maximum difference, in seconds, between the clocks of machines that share a disk."""
_NAMED = 5
"""Maximum number of files that a message lists."""


def check(root: Path) -> None:
    """Check the project, and write the records on which the other stages depend.

    Raises:
        PipelineError: The parameters have a mistake, or the plan is out of date.
    """
    params = load_params(root / "params.yaml")
    check_params(params)
    refuse_linked_results(root)
    # The plan is made from the parameters, so a mistake in the parameters is reported first.
    check_plan(params, root / RUNS_FILE)
    note_sources(root)


main = partial(project.main, __doc__, check, short=True)


def check_params(params: Params) -> None:
    """Raise PipelineError for mistakes in the parameters that a later stage would refuse."""
    check_settings(params)
    check_files(params)
    check_ids(params)
    # Only the report, the last stage, needs the claims. They are read here, so that a mistake in
    # them is reported before the training.
    load_claims(params.path.parent)


def refuse_linked_results(root: Path) -> None:
    """Refuse folders of results that are links out of the project.

    DVC would run the stage to its end, and then refuse its results. Snakemake accepts such links.

    Raises:
        StageError: A folder of results is such a link.
    """
    folders = [root / "data", root / "data/demos", root / "results"]
    for stage in _WITH_RESULTS:
        # `os.walk` lists links to folders, but does not enter them.
        for place, inside, _ in os.walk(root / "results" / stage):
            folders += [Path(place), *(Path(place, name) for name in inside)]
    for folder in folders:
        if folder.is_symlink() and not folder.resolve().is_relative_to(root.resolve()):
            linked = folder.relative_to(root)
            raise StageError(
                f"{linked}: is a link to {folder.resolve()}, outside of the project, where DVC "
                f"takes no results. Move its files back to {linked}; if they need another disk, "
                "move the whole project there (a link to it may stay here), or only DVC's cache: "
                "`dvc cache dir FOLDER` and `dvc config cache.type symlink`."
            )


def refuse_files_of_the_future(params: Params) -> None:
    """Refuse inputs and results with modification times in the future, which a wrong clock has set.

    Snakemake would run a job that reads such a file, find the job's outputs older than the file,
    and delete the outputs.

    Raises:
        StageError: A file has a time in the future.
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
            # A place may not exist yet, and a file may be removed while the folders are read.
            with contextlib.suppress(OSError):
                if file.stat().st_mtime > now + _CLOCKS_DIFFER_S:
                    late.add(os.path.relpath(file, root))
    if late:
        names, more = sorted(late)[:_NAMED], len(late) - _NAMED
        rest = f"; {more} more files have such dates" if more > 0 else ""
        raise StageError(
            f"{names[0]}: is dated in the future, so each job of Snakemake that reads it fails; "
            f"when the clock is right, run `touch {shlex.join(names)}`{rest}"
        )


def refuse_absent_slurm(*, without_accounts: bool) -> None:
    """Refuse a machine that cannot submit SLURM jobs, before Snakemake submits the first job.

    Raises:
        StageError: A command of SLURM is missing, or its controller does not answer.
    """
    needed = ("sbatch", "sinfo", *(() if without_accounts else ("sacct",)))
    if missing := [command for command in needed if shutil.which(command) is None]:
        raise StageError(
            f"SLURM: no {' and no '.join(missing)} in PATH, so nothing was submitted or deleted: "
            "start Snakemake on a machine that has them; if SLURM has no accounting, use "
            "--slurm-no-account --slurm-status-command squeue"
        )
    asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=False)  # noqa: S607
    if asked.returncode:
        raise StageError(
            f"SLURM: `sinfo` failed ({brief(asked.stderr.strip())}), so nothing was submitted or "
            "deleted: try again when `sinfo` answers"
        )


def check_ids(params: Params) -> None:
    """Refuse unknown simulators and environment ids, and build folders that contain the project.

    An id may name a module that is a file in the folder of params.yaml.

    Raises:
        SettingsError: A name is unknown, or the folder of a build contains the project.
    """
    folder = str(params.path.resolve().parent)
    for name, environment in params.environments.items():
        try:
            if isinstance(environment, BridgeSource):
                # The folder comes last: a file next to params.yaml must not hide a package.
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
            # The registry's error has no file and line. They are added here, for the key that the
            # user has given, or for the section if the key is missing.
            root, at = read_yaml(params.path), f"environments.{name}"
            section = find(root, at).value
            key = next((key for key in ("id", "name", "path") if key in section), None)
            at = f"{at}.{key}" if isinstance(section, dict) and key else at
            raise fail_at(root, at, str(error)) from error
