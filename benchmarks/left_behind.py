"""What a killed run has left: processes, temporary files, and files that cannot be read."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import yaml

from pipeline.demos.demo_file import read_demo
from pipeline.trainer.checkpoints.file import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARK = "PIPELINE_KILLS_MARK"
"""Environment variable that marks all processes of a start, whatever their parent is."""
ORPHANS_S = 10.0
SKIPPED = {".git", "src", "config", "profiles", "__pycache__"}
NUMBERS = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=/)[0-9a-f]{2}(?=/|$)|[0-9a-f]{30,}|\d+"
)
"""Identifiers and digests too."""
UNDECLARED = (".work", ".snakemake", ".dvc", "mlartifacts", "logs", "tmp", "cache", "site")
"""Parts of paths whose files need not all be there again."""


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes whose environment has the mark."""
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, psutil.Error):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield psutil.Process(int(folder.name))


def left_alive(mark: str) -> list[str]:
    """Kill the marked processes that do not end in time; return their command lines."""
    until = time.monotonic() + ORPHANS_S
    while (alive := list(marked(mark))) and time.monotonic() < until:
        time.sleep(0.05)
    commands = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            commands.append(f"pid {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return commands


def being_written(work: Path) -> bool:
    """Whether a file is being written: the temporary file of `files.whole` is there."""
    places = (work / name for name in ("results", "data", "build") if (work / name).is_dir())
    return any(True for place in places for _ in place.rglob(".*.tmp"))


def kinds(work: Path) -> set[str]:
    """Files and folders in a folder, with a # for numbers and digests in their names.

    Without the empty folder that Snakemake itself makes in the system's temporary folder.
    """
    all_kinds = set()
    for path, folders, names in os.walk(work):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in [*folders, *names]:
            relative = (Path(path) / name).relative_to(work).as_posix()
            relative = re.sub(r"^results/run\.\d+", "results/run", relative)  # moved by --force
            all_kinds.add(NUMBERS.sub("#", relative))
    ours = (kind for kind in all_kinds if not re.match(r"tmp/snakemake[^/]*$", kind))
    return set(ours) - {"killed.log", "next.log", "log"}


def declared(kind: str) -> bool:
    """Whether a run that has been killed must have the file in the end, too."""
    return not any(part in UNDECLARED for part in kind.split("/")) and "best" not in kind


def unreadable(work: Path, *, after_kill: bool = False) -> list[str]:
    """Return the files that cannot be read; after a kill, only of those written whole."""
    problems = []
    places = [work / name for name in ("results", "data", "build", "workflow")]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    for path in [*files, work / "mlflow.db", work / "dvc.lock"]:
        reader = READERS.get(path.suffix)
        unfinished = after_kill and (path.suffix in IN_PLACE or "out" in path.parts)
        if reader is None or unfinished or not path.is_file():
            continue
        try:
            reader(path)
        except Exception as error:  # noqa: BLE001  # a broken file may raise anything
            problems.append(f"{path.relative_to(work)}: {type(error).__name__}: {str(error)[:200]}")
    return problems


def read_arrays(path: Path) -> None:
    """Read every array of a file."""
    # numpy leaves a file open that it cannot read
    with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
        if not [saved[name] for name in saved.files]:
            raise ValueError("there is no array in it")


def read_model(path: Path) -> None:
    """Check an ONNX file as its own tools do."""
    import onnx

    onnx.checker.check_model(onnx.load(path), full_check=True)


def read_mapping(path: Path) -> None:
    """Read YAML, which JSON is as well, that is not empty."""
    if yaml.safe_load(path.read_text()) is None:
        raise ValueError("it is empty")


def read_table(path: Path) -> None:
    """Read a CSV file: all rows have all columns, and each behavior's steps rise."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    if path.read_text()[-1:] != "\n" or any(len(row) != len(header) for row in rows):
        raise ValueError("a row is cut off")
    latest: dict[str, int] = {}
    for row in (dict(zip(header, cells, strict=True)) for cells in rows if path.stem == "progress"):
        behavior, step = row.get("behavior", ""), int(row["step"])
        if step <= latest.get(behavior, -1):
            raise ValueError(f"step {step} of {behavior} comes again")
        latest[behavior] = step


def read_database(path: Path) -> None:
    """Let SQLite look for damage."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        (result,) = database.execute("PRAGMA integrity_check").fetchone()
        if result != "ok":
            raise ValueError(result)


READERS: dict[str, Callable[[Path], object]] = {
    ".pt": load_checkpoint,
    ".onnx": read_model,
    ".npz": read_arrays,
    ".yaml": read_mapping,
    ".json": read_mapping,
    ".lock": lambda path: path.name != "dvc.lock" or read_mapping(path),
    ".csv": read_table,
    ".demo": read_demo,
    ".db": read_database,
}
IN_PLACE = {".csv", ".lock", ".db"}
"""Kinds of files that a kill may cut off; the next start mends them."""


def saved_step(checkpoint: Path) -> int:
    """The step that the next start must continue from; 0 when nothing was saved."""
    with contextlib.suppress(Exception):  # unreadable files are reported elsewhere
        return int(load_checkpoint(checkpoint)["learner"]["step"])
    return 0


def lost(log: str, step: int) -> list[str]:
    """Return what the next start lost of the state that was saved at `step`."""
    if not step:
        return []
    problems = [line for line in log.splitlines() if "Replay buffer was unable" in line]
    if not re.search(rf"Resuming .* from step {step}\b", log):
        problems.append(f"it did not continue from step {step}")
    return problems


def ended_early(checkpoint: Path, max_steps: int) -> list[str]:
    """Return the missing steps, and the files that belong to no checkpoint."""
    state = load_checkpoint(checkpoint)
    step, folder = state["learner"]["step"], checkpoint.parent
    problems = [] if step >= max_steps else [f"ended at step {step} of {max_steps}"]
    replays = [path for path in folder.glob("*.npz") if path.name != state.get("replay")]
    policies = (path for path in folder.glob("*-[0-9]*.onnx"))
    unpaired = [path for path in policies if not path.with_suffix(".pt").exists()]
    return [*problems, *(f"{path.name} belongs to no checkpoint" for path in [*replays, *unpaired])]
