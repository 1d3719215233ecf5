"""Which commit has given files with given content."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MOST_COMMITS = 300
_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The newest commit that has all of the files, if there is one."""

    commit: str | None
    """Full id; None when no commit that was looked at has them."""
    told: str
    """For a person."""


def commit_with(root: Path, blobs: Mapping[str, str]) -> Found:
    """Look for files in the history of the repository at `root`, all branches, newest first.

    Args:
        root: a folder of the repository's work tree.
        blobs: git's id of each file's content, by path.
    """
    log = _git(root, "log", "--all", f"-n{_MOST_COMMITS}", "--format=%H %cs %s", "--", "src")
    if log is None:
        return Found(commit=None, told="not known: there is no git repository here")
    lines = log.splitlines()
    for line in lines:
        commit = line.partition(" ")[0]
        if _holds(root, commit, blobs):
            return Found(
                commit=commit, told=f"{line} (the newest change of src with these sources)"
            )
    return Found(
        commit=None,
        told=f"none of the last {len(lines)} that changed src has these sources: they were not "
        "committed, or elsewhere",
    )


def _holds(root: Path, commit: str, blobs: Mapping[str, str]) -> bool:
    listed = _git(root, "ls-tree", "-r", "--full-tree", commit, "--", "src") or ""
    held = {}
    for line in listed.splitlines():
        facts, _, path = line.partition("\t")
        held[path] = facts.split()[2]
    return all(held.get(path) == blob for path, blob in blobs.items())


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None when there is no git, or no repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(  # noqa: S603  # git, with ids from its own log
            command, capture_output=True, text=True, check=False, timeout=_WAIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
