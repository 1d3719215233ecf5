"""Runs this interpreter in a new process, with this process's module path."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def variables(*first: Path, **more: str) -> dict[str, str]:
    """Return this process's variables and `more`; PYTHONPATH is `first` and this process's path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, first), *sys.path])} | more


def python(
    *arguments: object,
    first: Sequence[Path] = (),
    before: Sequence[str] = (),
    cwd: Path | None = None,
    check: bool = True,
    timeout: float = 300.0,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` and return the ended process.

    Args:
        arguments: arguments of the interpreter; the first is -c, -m or a file.
        first: folders that are searched for modules before this process's folders.
        before: a command that starts the interpreter, such as a shell.
        cwd: folder in which the interpreter runs.
        check: whether the process must end with code 0.
        timeout: seconds after which the process is killed.
        more: further environment variables.
    """
    completed = subprocess.run(  # noqa: S603  # this interpreter
        [*before, sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=variables(*first, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert not check or completed.returncode == 0, completed.stderr
    return completed
