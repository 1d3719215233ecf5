"""Ask DVC and Snakemake whether results are up to date, and correct the engines' records."""

import csv
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.dag import sources
from pipeline.dag.attempt import edited_stages
from pipeline.dag.project import code_of
from pipeline.errors import StageError, shell_command
from pipeline.files import write_whole
from pipeline.settings.nodes import respelled

_log = logging.getLogger(__name__)

MOST_COMMITS = 300
"""Maximum number of commits of git's history that a command searches."""
# The start of every lock file of DVC. A file that begins otherwise is not repaired.
_LOCK_BEGINS = "schema: '2.0'\nstages:\n"
_OUTPUT = re.compile(r"\w+/(?!report/)\w+/(.+?)(?:/seed(\d+))?(?:[./][^/]*)?")
"""Pattern of the path of a stage's output; its groups are the run's name and the seed. The report
belongs to no run.
"""
_LOG_HEADER = re.compile(r"\A.*?^  Config MD5: \S+$", re.MULTILINE | re.DOTALL)
"""Pattern of the lines about Snakemake's version and configuration at the start of its log."""
# The part of a job's reason in Snakemake's dry run that names its changed input files.
_UPDATED = re.compile(r"Updated input files: ([^;\n]+)")
# A stage's name in dvc.lock is indented by two spaces, and the stage's content by more spaces.
_STAGE = re.compile(r"^  \S", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state of the results according to one engine."""

    pending: tuple[str, ...]
    """Jobs that the engine would run."""
    unrecorded: tuple[str, ...] = ()
    """Jobs with results that the engine has no record of."""
    changed: tuple[str, ...] = ()
    """Files that have changed since results were made from them, as far as the engine reports."""

    @property
    def up_to_date(self) -> bool:
        """Whether the engine would run no job and has a record of every result."""
        return not self.pending and not self.unrecorded


def dvc_state(root: Path) -> State:
    """Return the stages that `dvc status` reports as changed, and the files that changed."""
    # The command line is used, because dvc.api, DVC's Python interface, has no status function.
    result = _call(["dvc", "status", "--json"], root)
    if result.returncode != 0:
        raise StageError(f"`dvc status` failed:\n{result.stderr.strip()}")
    try:
        stages = json.loads(result.stdout or "{}")
        # In a project without `src`, the stage `check` always runs; its only reason is
        # `always changed`.
        stages = {
            name: reasons for name, reasons in stages.items() if reasons != ["always changed"]
        }
        changes = (reason for reasons in stages.values() for reason in reasons)
        deps = [change.get("changed deps", {}) for change in changes if isinstance(change, dict)]
        # Files that are `new` or `deleted` are left out, because their content has not changed.
        changed = {name for names in deps for name, how in names.items() if how == "modified"}
        if edited := _edited_sources(root):
            # The edited files are listed in place of the two folders on which the stage `check`
            # depends.
            changed = {*changed, *edited} - {"src/pipeline", "workflow/scripts"}
        return State(pending=tuple(stages), changed=tuple(sorted(changed)))
    except ValueError:
        raise StageError(f"`dvc status` printed no JSON:\n{result.stdout.strip()}") from None


def _edited_sources(root: Path) -> set[str]:
    """Return the source files that have changed since DVC's stages recorded their digests."""
    code, edited = code_of(root), set()
    for path in (root / sources.CODE).glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            # Each line has git's id and the file's name, as `sources.note` writes them.
            noted, _, name = line.partition("  ")
            base = root if name in sources.claims_of(root) else code
            file = sources.place(base, name)
            if not file.is_file() or sources.git_id(file) != noted:
                edited.add(name)
    return edited


def snakemake_state(root: Path) -> State:
    """Return the jobs that Snakemake would run or has no record of, and changed input files."""
    # Incomplete outputs are an error here, because the profile that reruns them is left out.
    _checked_output(
        ["snakemake", "--dry-run", "--quiet", "all", "--workflow-profile", "none"], root
    )
    state = snakemake_summary(root)
    if not state.pending:
        return state
    # This second dry run, without `--quiet`, prints the reasons of the pending jobs.
    output = _checked_output(["snakemake", "--dry-run", "--workflow-profile", "none"], root)
    changed = {name for names in _UPDATED.findall(output) for name in names.split(", ")}
    return replace(state, changed=tuple(sorted(changed)))


def snakemake_summary(root: Path) -> State:
    """Return which jobs Snakemake would run and which have no record, without the changed files.

    The jobs are read from Snakemake's table of outputs, and include jobs with incomplete outputs.
    """
    command = ["snakemake", "--detailed-summary", "--workflow-profile", "none"]
    output = _checked_output([*command, "--rerun-incomplete"], root)
    # The table has one line for each output; a dash as the command means that Snakemake has no
    # record of this output. Quotation marks in commands do not quote the table's cells.
    rows = list(csv.DictReader(output.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    return State(
        pending=_jobs(row for row in rows if row["plan"] != "no update"),
        unrecorded=_jobs(row for row in rows if row["shellcmd"] == "-"),
    )


def unseen(results: Sequence[str]) -> str:
    """Return the warning that Snakemake has no record of `results`."""
    return (
        f"Snakemake has no record of {len(results)} results (the first is {results[0]}), because "
        "DVC made them or they were copied. For these results it notices edited files, but edited "
        "settings only if dvc.lock has the result; `pipeline sync` writes the records."
    )


def edited_since_dvc(root: Path) -> list[str]:
    """Return the outputs of each stage with a parameter that differs from its value in dvc.lock."""
    stages = edited_stages(root, respelled).values()
    return [output["path"] for stage in stages for output in stage.get("outs", ())]


def _jobs(rows: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Return DVC's names of the jobs that make the outputs in rows of Snakemake's summary."""
    jobs = set()
    for row in rows:
        output = _OUTPUT.fullmatch(row["output_file"])
        parts = [] if output is None else [part for part in output.groups() if part]
        # The output `results/train/walker/seed1/policy.pt` belongs to DVC's stage `train@walker-1`.
        instance = "-".join(parts).replace("/", "-")
        jobs.add(f"{row['rule']}@{instance}" if instance else row["rule"])
    return tuple(sorted(jobs))


def truncate_incomplete_dvc_lock(root: Path) -> None:
    """Shorten a `dvc.lock` that a killed DVC has left incomplete to its complete stages.

    DVC rewrites the file in place after each stage, and cannot read an incomplete file. A file with
    a mistake elsewhere than at its end, as after a merge, is not changed.
    """
    path = root / "dvc.lock"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if _stages_in(text) is not None:
        return
    # The last line may have been cut off, so only the lines with a line break are read.
    readable = text[: text.rfind("\n") + 1]
    # If the text is still not readable, its last stage is incomplete and is removed.
    if _stages_in(readable) is None:
        readable = readable[
            : max((match.start() for match in _STAGE.finditer(readable)), default=0)
        ]
    n_left = 0 if readable in ("", _LOCK_BEGINS) else _stages_in(readable)
    if n_left is None or not (text.startswith(_LOCK_BEGINS) or _LOCK_BEGINS.startswith(text)):
        return
    if n_left:
        write_whole(path, readable)
    else:
        path.unlink()
    _log.warning(
        "dvc.lock was incomplete, because DVC was killed while it wrote the file; it now has the "
        "%d complete stages. Results of other stages come from DVC's cache, or are made again.",
        n_left,
    )


def drop_from_lock(root: Path, names: set[str]) -> None:
    """Remove the stages `names` from the text of `dvc.lock`; the rest of the text is unchanged."""
    path = root / "dvc.lock"
    if not names:
        return
    # The file is split before the name of each stage, so that the text of kept stages is unchanged.
    head, *blocks = re.split(r"^(?=  \S)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kept = [block for block in blocks if not names & yaml.safe_load(block).keys()]
    if kept:
        write_whole(path, head + "".join(kept))
    else:
        path.unlink()


def _stages_in(lock: str) -> int | None:
    """Return the number of stages in the text of a dvc.lock; None if DVC cannot read it."""
    # Without a final line break the last number may be cut off, and read as a smaller number.
    stages = locked_stages(lock) if lock.endswith("\n") else None
    return None if stages is None else len(stages)


def locked_stages(lock: str) -> dict[str, Any] | None:
    """Return the stages in the text of a dvc.lock by name; None if DVC cannot read it."""
    # LibYAML's loader, where it is installed, is faster than the loader that is written in Python.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        stages: dict[str, Any] = yaml.load(lock, Loader=loader)["stages"]  # noqa: S506  # safe loaders
        for stage in stages.values():
            entries = [*stage.get("deps", ()), *stage.get("outs", ())]
            # A line cut off after its colon is valid YAML (None), but DVC fails on it later.
            values = [stage["cmd"], *(value for entry in entries for value in entry.values())]
            if None in [*values, *stage.get("params", {}).values()]:
                return None
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        return None
    return stages


def note_sources(root: Path) -> None:
    """Write the lists of the stages' source files and their digests, as the stage `check` does."""
    code = code_of(root)
    for stage in sources.stages(code):
        sources.note(root, stage, code)


def accept_in_dvc(root: Path) -> None:
    """Make DVC record the present results as up to date, although DVC has not made them."""
    note_sources(root)
    # Without `--no-relink`, DVC would link the outputs again: they would look newer to Snakemake
    # than the results that were made from them.
    _checked_output(["dvc", "--wait-for-lock", "commit", "--force", "--no-relink", "--quiet"], root)


def accept_in_snakemake(root: Path) -> None:
    """Make Snakemake record the present results as up to date, although DVC has made them."""
    # `--forceall` is needed, because `--touch` alone skips files with the right times, and writes
    # no record of them.
    command = ["snakemake", "--touch", "--forceall", "--rerun-incomplete", "--cores", "1"]
    _checked_output([*command, "--quiet", "progress", "rules"], root)


def environment() -> dict[str, str]:
    """Return the variables for starting an engine: the folder of this Python is first in PATH."""
    # Stages call `python`, which must be this Python even if the virtual environment of this Python
    # is not activated.
    bin_folder = os.path.dirname(sys.executable)  # noqa: PTH120  # no need for a path object
    return {**os.environ, "PATH": os.pathsep.join((bin_folder, os.environ.get("PATH", "")))}


def _checked_output(command: Sequence[str], root: Path) -> str:
    result = _call(command, root)
    if result.returncode != 0:
        output = _LOG_HEADER.sub("", result.stderr or result.stdout).strip()
        raise StageError(
            f"`{shell_command(*command)}` failed with exit code {result.returncode}:\n{output}"
        )
    return result.stdout


def _call(command: Sequence[str], root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # fixed commands
        list(command), cwd=root, env=environment(), capture_output=True, text=True, check=False
    )
