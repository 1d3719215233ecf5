"""Fixtures to run commands as users do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main as cli


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """Run a command that must fail with one line; return the line without `error: `."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == 2
        out, error = capsys.readouterr()
        (line,) = [one for one in error.splitlines() if "[INFO]" not in one]
        assert (out, line[:7]) == ("", "error: "), error
        return line[7:]

    return run
