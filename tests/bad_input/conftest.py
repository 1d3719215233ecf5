"""Fixtures: a separate folder for each test, a project, and a trained run."""

import shutil
from pathlib import Path

import pytest
from command import ROOT, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path)


@pytest.fixture
def project(place: Place) -> Place:
    """A copy of the project, without parameters."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "workflow"):
        shutil.copytree(ROOT / name, place.folder / name, ignore=ignore)
    shutil.copy(ROOT / "constraints.txt", place.folder)
    return place


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with a run in the fake environment; tests only read it."""
    place = Place(folder=tmp_path_factory.mktemp("trained"))
    result = place.learn(place.fake())
    assert result.code == 0, result.err
    return place
