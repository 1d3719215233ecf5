"""What DVC and Snakemake each believe about the state of the results."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What an engine says."""

    pending: tuple[str, ...]
    """Jobs that it would run."""
    unrecorded: tuple[str, ...] = ()
    """Jobs whose results lie there without its record of how they were made."""

    @property
    def up_to_date(self) -> bool:
        """Whether it would do nothing, and knows why."""
        return not self.pending and not self.unrecorded


def dvc_state(root: Path) -> State:
    """Stages that DVC calls changed.

    Raises:
        StageError: DVC cannot read the pipeline.
    """
    done = _call(["dvc", "status", "--json"], root)
    if done.returncode != 0:
        raise StageError(f"`dvc status` failed:\n{done.stderr.strip()}")
    import json

    try:
        return State(pending=tuple(json.loads(done.stdout or "{}")))
    except ValueError:
        raise StageError(f"`dvc status` printed no JSON:\n{done.stdout.strip()}") from None


def snakemake_state(root: Path) -> State:
    """Jobs that Snakemake would run, and those of which it has no record.

    Raises:
        StageError: Snakemake cannot read the workflow, or another one holds its lock.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import DAGSettings, OutputSettings, Quietness, ResourceSettings

    logging.getLogger("snakemake").setLevel(logging.WARNING)
    with _in_folder(root), contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
                given = api.workflow(
                    resource_settings=ResourceSettings(cores=1),
                    snakefile=root / "Snakefile",
                    workdir=root,
                )
                given.dag(DAGSettings())
                workflow = given._workflow  # the public API cannot list jobs
                workflow._prepare_dag(
                    forceall=False, ignore_incomplete=False, lock_warn_only=False, nolock=True
                )
                workflow._build_dag()
                needed = [_job_name(job) for job in workflow.dag.needrun_jobs() if job.output]
                unrecorded = [
                    _job_name(job)
                    for job in workflow.dag.jobs
                    if job.output and not workflow.persistence.has_metadata(job)
                ]
        except Exception as error:
            said = printed.getvalue().strip() or str(error)
            raise StageError(f"Snakemake cannot read the workflow: {said}") from error
    return State(pending=tuple(sorted(needed)), unrecorded=tuple(sorted(unrecorded)))


def bless_dvc(root: Path) -> None:
    """Make DVC take the results as they lie there for its own."""
    # with links made anew, outputs would look newer to Snakemake than what was made from them
    _must(["dvc", "--wait-for-lock", "commit", "--force", "--no-relink", "--quiet"], root)


def bless_snakemake(root: Path) -> None:
    """Make Snakemake take the results as they lie there for its own."""
    command = ["snakemake", "--touch", "--forceall", "--rerun-incomplete", "--cores", "1"]
    _must([*command, "--quiet", "progress", "rules"], root)


def environment() -> dict[str, str]:
    """Variables for an engine's process: its program may lie beside this Python only."""
    here = os.path.dirname(sys.executable)  # noqa: PTH120  # no need for a path object
    return {**os.environ, "PATH": os.pathsep.join((here, os.environ.get("PATH", "")))}


def _job_name(job: object) -> str:
    instance = "-".join(map(str, job.wildcards)).replace("/", "-")  # type: ignore[attr-defined]  # untyped
    name = str(job.rule.name)  # type: ignore[attr-defined]  # untyped
    return f"{name}@{instance}" if instance else name


def _must(command: Sequence[str], root: Path) -> None:
    done = _call(command, root)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise StageError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{said}")


def _call(command: Sequence[str], root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # fixed commands
        list(command), cwd=root, env=environment(), capture_output=True, text=True, check=False
    )


@contextlib.contextmanager
def _in_folder(root: Path) -> Iterator[None]:
    """Snakemake's API changes the working folder, so put it back."""
    with contextlib.chdir(root):
        yield
