"""This interpreter in a process of its own, with everything that is on the path here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def variables(*first: Path, **more: str) -> dict[str, str]:
    """This process's variables and `more`; modules are looked for in `first`, then as here."""
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
        arguments: which begin with -c, -m or a file.
        first: folders in which modules are looked for before those of this process.
        before: a command that starts it, such as a shell.
        cwd: where it runs.
        check: whether it must end with code 0.
        timeout: seconds after which it is killed.
        more: variables.
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
