"""The state of the results as DVC and Snakemake each see it, and ways to correct it."""

from __future__ import annotations

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

from pipeline.errors import PipelineError, StageError, shell_command
from pipeline.files import write_whole
from pipeline.settings.nodes import find, respelled, to_plain
from pipeline.settings.yaml_file import read_yaml
from pipeline.stages.shared import sources
from pipeline.stages.shared.project import code_of

_log = logging.getLogger(__name__)

MOST_COMMITS = 300
"""How far back the commands look in git's history."""
_LOCK_BEGINS = "schema: '2.0'\nstages:\n"
_OUTPUT = re.compile(r"\w+/(?!report/)\w+/(.+?)(?:/seed(\d+))?(?:[./][^/]*)?")
"""A stage's output: its name, and its seed if it has one. The report belongs to no run."""
_LOG_HEADER = re.compile(r"\A.*?^  Config MD5: \S+$", re.MULTILINE | re.DOTALL)
"""The lines about itself with which Snakemake's log begins."""
_UPDATED = re.compile(r"Updated input files: ([^;\n]+)")
_STAGE = re.compile(r"^  \S", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """An engine's view of the results."""

    pending: tuple[str, ...]
    """Jobs that the engine would run."""
    unrecorded: tuple[str, ...] = ()
    """Jobs whose results exist without the engine's record of how they were made."""
    changed: tuple[str, ...] = ()
    """Files that are other than when results were made from them, as far as the engine says."""

    @property
    def up_to_date(self) -> bool:
        """Whether the engine would run nothing and has a record of every result."""
        return not self.pending and not self.unrecorded


def dvc_state(root: Path) -> State:
    """Ask DVC which stages have changed."""
    # By its command line, because dvc.api, the public part of DVC in Python, has no status.
    result = _call(["dvc", "status", "--json"], root)
    if result.returncode != 0:
        raise StageError(f"`dvc status` failed:\n{result.stderr.strip()}")
    try:
        stages = json.loads(result.stdout or "{}")
        # DVC says this of the first stage of a project without `src`, whose results are all noted
        stages = {
            name: reasons for name, reasons in stages.items() if reasons != ["always changed"]
        }
        changes = (reason for reasons in stages.values() for reason in reasons)
        deps = [change.get("changed deps", {}) for change in changes if isinstance(change, dict)]
        changed = {name for names in deps for name, how in names.items() if how == "modified"}
        if edited := _edited_sources(root):
            changed = {*changed, *edited} - {"src/pipeline", "workflow/scripts"}
        return State(pending=tuple(stages), changed=tuple(sorted(changed)))
    except ValueError:
        raise StageError(f"`dvc status` printed no JSON:\n{result.stdout.strip()}") from None


def _edited_sources(root: Path) -> set[str]:
    """Return the source files that are other than DVC's stages have noted."""
    code, edited = code_of(root), set()
    for path in (root / sources.CODE).glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            noted, _, name = line.partition("  ")
            file = sources.place(code, name)
            if not file.is_file() or sources.git_id(file) != noted:
                edited.add(name)
    return edited


def snakemake_state(root: Path) -> State:
    """Ask Snakemake which jobs it would run, and for which it has no record."""
    # Without the profile, an incomplete output is an error here, and is not just made again.
    _must(["snakemake", "--dry-run", "--quiet", "all", "--workflow-profile", "none"], root)
    state = snakemake_summary(root)
    if not state.pending:
        return state
    output = _must(["snakemake", "--dry-run", "--workflow-profile", "none"], root)
    changed = {name for names in _UPDATED.findall(output) for name in names.split(", ")}
    return replace(state, changed=tuple(sorted(changed)))


def snakemake_summary(root: Path) -> State:
    """Return the state by Snakemake's table of outputs, incomplete ones included."""
    command = ["snakemake", "--detailed-summary", "--workflow-profile", "none"]
    output = _must([*command, "--rerun-incomplete"], root)
    # one line for each output, with a dash where no record says how it was made
    rows = list(csv.DictReader(output.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    return State(
        pending=_jobs(row for row in rows if row["plan"] != "no update"),
        unrecorded=_jobs(row for row in rows if row["shellcmd"] == "-"),
    )


def unseen(results: Sequence[str]) -> str:
    """Return the line about results that Snakemake has not made."""
    return (
        f"{len(results)} results are DVC's, or were copied ({results[0]} first), and Snakemake has "
        "no record of them: it sees edited files, and edited settings of what dvc.lock names. "
        "`pipeline sync` gives it a record."
    )


def edited_since_dvc(root: Path) -> list[str]:
    """Return the outputs of stages whose parameters differ from those in DVC's record."""
    try:
        stages = to_plain(read_yaml(root / "dvc.lock"))["stages"].values()
        noted = [(stage, stage.get("params", {})) for stage in stages]
        now = {name: read_yaml(root / name) for name in {name for _, of in noted for name in of}}
        return [
            output["path"]
            for stage, files in noted
            if any(
                respelled(to_plain(find(now[name], key))) != respelled(value)
                for name, values in files.items()
                for key, value in values.items()
            )
            for output in stage.get("outs", ())
        ]
    except (PipelineError, KeyError, TypeError, AttributeError):  # no record that can be read
        return []


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
    """Cut a `dvc.lock` after its last whole stage, if a killed DVC has left it incomplete.

    DVC rewrites the file in place after each stage, and cannot read an incomplete one. A file with
    a mistake elsewhere than at its end, as after a merge, is left alone.
    """
    path = root / "dvc.lock"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if _stages_in(text) is not None:
        return
    readable = text[: text.rfind("\n") + 1]
    # Still not readable: the last stage is incomplete, so all of it goes.
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
        "dvc.lock was cut off, by a DVC that was killed while it wrote the file; %d stages are in "
        "it now. What the others have made comes from DVC's cache, or is made again.",
        n_left,
    )


def drop_from_lock(root: Path, names: set[str]) -> None:
    """Take stages out of `dvc.lock`, as text: DVC's own order and spelling stay."""
    path = root / "dvc.lock"
    if not names:
        return
    head, *blocks = re.split(r"^(?=  \S)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kept = [block for block in blocks if not names & yaml.safe_load(block).keys()]
    if kept:
        write_whole(path, head + "".join(kept))
    else:
        path.unlink()


def _stages_in(lock: str) -> int | None:
    """Return the number of stages in the text of a dvc.lock; None if DVC could not read it."""
    # Without its final line break, a number may be cut off and read as a smaller one.
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
    """Write down the source files of each stage, as DVC's first stage does."""
    code = code_of(root)
    for stage in sources.stages(code):
        sources.note(root, stage, code)


def bless_dvc(root: Path) -> None:
    """Make DVC record the present results as up to date, although it has not made them."""
    note_sources(root)
    # relinked outputs would look newer to Snakemake than the results made from them
    _must(["dvc", "--wait-for-lock", "commit", "--force", "--no-relink", "--quiet"], root)


def bless_snakemake(root: Path) -> None:
    """Make Snakemake record the present results as up to date, although it has not made them."""
    # With `--forceall`: `--touch` alone skips files whose times look right, and would leave them
    # without a record of how they were made.
    command = ["snakemake", "--touch", "--forceall", "--rerun-incomplete", "--cores", "1"]
    _must([*command, "--quiet", "progress", "rules"], root)


def environment() -> dict[str, str]:
    """Return an engine's environment variables, with this Python's programs first in PATH."""
    # Stages call `python`, which must be this environment's even where it is not activated.
    bin_folder = os.path.dirname(sys.executable)  # noqa: PTH120  # no need for a path object
    return {**os.environ, "PATH": os.pathsep.join((bin_folder, os.environ.get("PATH", "")))}


def _must(command: Sequence[str], root: Path) -> str:
    """Run an engine and return what it printed."""
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
