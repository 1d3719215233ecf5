"""What DVC and Snakemake each believe about the state of the results, and what git knows."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.errors import StageError
from pipeline.files import write_whole
from pipeline.stages.shared import sources
from pipeline.stages.shared.project import code_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)

MOST_COMMITS = 300
"""How far back the commands look in git's history."""
_LOCK_BEGINS = "schema: '2.0'\nstages:\n"
_OUTPUT = re.compile(r"\w+/(?!report/)\w+/(.+?)(?:/seed(\d+))?(?:[./][^/]*)?")
"""A stage's output: its name, and its seed if it has one. The report is of no run."""
_LOG_HEADER = re.compile(r"\A.*?^  Config MD5: \S+$", re.MULTILINE | re.DOTALL)
"""What Snakemake tells of itself before anything else."""
_STAGE = re.compile(r"^  \S", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """An engine's view of the results."""

    pending: tuple[str, ...]
    """Jobs that it would run."""
    unrecorded: tuple[str, ...] = ()
    """Jobs whose results lie there without its record of how they were made."""

    @property
    def up_to_date(self) -> bool:
        """Whether it would do nothing, and knows why."""
        return not self.pending and not self.unrecorded


def dvc_state(root: Path) -> State:
    """Ask DVC which stages have changed."""
    # By its command line, because dvc.api, the public part of DVC in Python, has no status.
    done = _call(["dvc", "status", "--json"], root)
    if done.returncode != 0:
        raise StageError(f"`dvc status` failed:\n{done.stderr.strip()}")
    try:
        stages = json.loads(done.stdout or "{}")
        # said of the first stage of a project without `src`, which makes nothing that is not noted
        stages = {name: why for name, why in stages.items() if why != ["always changed"]}
        return State(pending=tuple(stages))
    except ValueError:
        raise StageError(f"`dvc status` printed no JSON:\n{done.stdout.strip()}") from None


def snakemake_state(root: Path) -> State:
    """Ask Snakemake which jobs it would run, and of which it has no record."""
    # Without the profile, an incomplete output is an error here, and is not just made again.
    _must(["snakemake", "--dry-run", "--quiet", "all", "--workflow-profile", "none"], root)
    return snakemake_summary(root)


def snakemake_summary(root: Path) -> State:
    """Return what Snakemake's table of outputs says, incomplete ones included."""
    command = ["snakemake", "--detailed-summary", "--workflow-profile", "none"]
    done = _must([*command, "--rerun-incomplete"], root)
    # one line for each output, and a dash where no record of how it was made is kept
    rows = list(csv.DictReader(done.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    return State(
        pending=_jobs(row for row in rows if row["plan"] != "no update"),
        unrecorded=_jobs(row for row in rows if row["shellcmd"] == "-"),
    )


def _jobs(rows: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the jobs of outputs in Snakemake's summary, named as DVC names its stages."""
    jobs = set()
    for row in rows:
        output = _OUTPUT.fullmatch(row["output_file"])
        parts = [] if output is None else [part for part in output.groups() if part]
        instance = "-".join(parts).replace("/", "-")
        jobs.add(f"{row['rule']}@{instance}" if instance else row["rule"])
    return tuple(sorted(jobs))


def mend_lock(root: Path) -> None:
    """Cut a `dvc.lock` that DVC was killed at writing after its last whole stage.

    DVC writes the file anew after each stage, in place, and reads none that is cut off. Of a file
    with a mistake that is not at its end, as after a merge, nothing is touched.
    """
    path = root / "dvc.lock"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if _stages_in(text) is not None:
        return
    rest = text[: text.rfind("\n") + 1]
    # Still not readable: the last stage is a part of one, so it goes as a whole.
    if _stages_in(rest) is None:
        rest = rest[: max((match.start() for match in _STAGE.finditer(rest)), default=0)]
    n_left = 0 if rest in ("", _LOCK_BEGINS) else _stages_in(rest)
    if n_left is None or not (text.startswith(_LOCK_BEGINS) or _LOCK_BEGINS.startswith(text)):
        return
    if n_left:
        write_whole(path, rest)
    else:
        path.unlink()
    _log.warning(
        "dvc.lock was cut off, by a DVC that was killed while it wrote the file; %d stages are in "
        "it now. What the others have made comes from DVC's cache, or is made again.",
        n_left,
    )


def _stages_in(lock: str) -> int | None:
    """Return how many stages the text of a dvc.lock has; None when DVC would not read it."""
    # A number that is cut off would be read as a smaller one.
    stages = locked_stages(lock) if lock.endswith("\n") else None
    return None if stages is None else len(stages)


def locked_stages(lock: str) -> dict[str, Any] | None:
    """Return the stages in the text of a dvc.lock by name; None when it cannot be read."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        stages: dict[str, Any] = yaml.load(lock, Loader=loader)["stages"]  # noqa: S506  # safe ones
        for stage in stages.values():
            entries = [*stage.get("deps", ()), *stage.get("outs", ())]
            # A line that is cut after its colon is valid YAML with the value None, and DVC fails
            # on it later.
            values = [stage["cmd"], *(value for entry in entries for value in entry.values())]
            if None in [*values, *stage.get("params", {}).values()]:
                return None
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        return None
    return stages


def note_sources(root: Path) -> None:
    """Note which files each stage runs, as DVC's first stage does."""
    code = code_of(root)
    for stage in sources.stages(code):
        sources.note(root, stage, code)


def bless_dvc(root: Path) -> None:
    """Make DVC record the present results as up to date, although it has not made them."""
    note_sources(root)
    # with links made anew, outputs would look newer to Snakemake than what was made from them
    _must(["dvc", "--wait-for-lock", "commit", "--force", "--no-relink", "--quiet"], root)


def bless_snakemake(root: Path) -> None:
    """Make Snakemake record the present results as up to date, although it has not made them."""
    # With `--forceall`: `--touch` alone does nothing where the times of files look right, and
    # then there is no record of how they were made.
    command = ["snakemake", "--touch", "--forceall", "--rerun-incomplete", "--cores", "1"]
    _must([*command, "--quiet", "progress", "rules"], root)


def environment() -> dict[str, str]:
    """Return an engine's variables, with a PATH that begins at this Python's programs."""
    # Stages call `python`: it has to be this environment's also where that was not activated.
    here = os.path.dirname(sys.executable)  # noqa: PTH120  # no need for a path object
    return {**os.environ, "PATH": os.pathsep.join((here, os.environ.get("PATH", "")))}


def _must(command: Sequence[str], root: Path) -> str:
    """Run an engine and return what it printed."""
    done = _call(command, root)
    if done.returncode != 0:
        output = _LOG_HEADER.sub("", done.stderr or done.stdout).strip()
        raise StageError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{output}"
        )
    return done.stdout


def _call(command: Sequence[str], root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # fixed commands
        list(command), cwd=root, env=environment(), capture_output=True, text=True, check=False
    )
