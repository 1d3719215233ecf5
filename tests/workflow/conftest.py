import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from learn_command import Learning
from project import ROOT, copy_project, run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project without results."""
    return copy_project(tmp_path / "project")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Learning]]:
    """Start Python modules in `tmp_path`; their processes end with the test."""
    begun: list[Learning] = []

    def start(*command: str) -> Learning:
        begun.append(Learning(tmp_path, *command))
        return begun[-1]

    yield start
    for learning in begun:
        if learning.process.poll() is None:
            learning.process.kill()
            learning.end()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel of these sources, the wheel built from the sdist."""
    tree = tmp_path_factory.mktemp("tree") / "project"
    shutil.copytree(
        ROOT,
        tree,
        ignore=shutil.ignore_patterns(
            *("__pycache__", "*.egg-info", ".venv*", ".git", ".*_cache", "build", "results"),
            *("logs", "tests", "mlruns", "mlartifacts", "mlflow.db", ".snakemake", "cache", "tmp"),
        ),
    )
    target = tree.parent / "dist"
    build = "import sys; from setuptools import build_meta as b; b.build_{0}(sys.argv[1])"
    run(tree, sys.executable, "-c", build.format("sdist"), str(target))
    (sdist,) = target.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree.parent / "unpacked", filter="data")
    (unpacked,) = (tree.parent / "unpacked").iterdir()
    run(unpacked, sys.executable, "-c", build.format("wheel"), str(target))
    return target
