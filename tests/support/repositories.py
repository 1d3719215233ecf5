"""Git commands in repositories of tests."""

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """Run git, and return its output without surrounding blanks."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, *arguments]
    completed = subprocess.run(  # noqa: S603  # git with arguments of tests
        command, cwd=root, check=True, capture_output=True, text=True
    )
    return completed.stdout.strip()


def commit(root: Path, message: str) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message)
