from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from learn_command import Learning
from project import copy_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, nothing built."""
    return copy_project(tmp_path / "project")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Learning]]:
    """Starts a module of Python in `tmp_path`, `within` another command; none outlives the test."""
    begun: list[Learning] = []

    def start(*command: str, within: Sequence[str] = ()) -> Learning:
        begun.append(Learning(tmp_path, *command, within=within))
        return begun[-1]

    yield start
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.end()
