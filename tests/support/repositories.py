"""Git repositories of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """What git prints, without the blanks around it."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, *arguments]
    completed = subprocess.run(  # noqa: S603  # git, with the tests' own arguments
        command, cwd=root, check=True, capture_output=True, text=True
    )
    return completed.stdout.strip()


def commit(root: Path, message: str) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message)
