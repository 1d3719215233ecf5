"""The folder of the project that a stage works in, its code, and entries in its params.yaml."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pipeline.dag import process
from pipeline.errors import StageError
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import RUNS_FILE, check_plan

T = TypeVar("T")

PROJECT = "PIPELINE_PROJECT"
"""Environment variable with the project's folder, for stages outside a checkout."""
CARRIED = "project"
"""Folder of the installed package with the repository's files outside `src`; setup.py fills it."""


def checkout() -> Path:
    """Return the repository of this code, or the folder that replaces it in an installed package.

    A wheel has `workflow`, `dvc.yaml` and `constraints.txt` in a folder of the package.
    """
    package = Path(__file__).resolve().parents[1]
    return package / CARRIED if (package / CARRIED).is_dir() else package.parents[1]


def project() -> Path:
    """Return the folder of params.yaml and of all results: PIPELINE_PROJECT, else the checkout."""
    elsewhere = os.environ.get(PROJECT)
    return Path(elsewhere).resolve() if elsewhere else checkout()


def code_of(root: Path) -> Path:
    """Return the folder of the code that makes the results in `root`: `root` or `checkout()`."""
    # A project of `pipeline init` has dvc.yaml but no sources: the installed package is its code.
    without = (root / "dvc.yaml").is_file() and not (root / "src/pipeline").is_dir()
    return checkout() if without or os.environ.get(PROJECT) else root


def pinned(root: Path) -> Path:
    """Return the path of constraints.txt in the project, relative to `root`, or in the package."""
    constraints = Path("constraints.txt")
    return constraints if (root / constraints).is_file() else checkout() / constraints


def planned(root: Path) -> Params:
    """Return the parameters of params.yaml, after a check that its table of runs is up to date.

    Raises:
        PipelineError: params.yaml has a mistake, or has changed since `pipeline plan`.
    """
    params = load_params(root / "params.yaml")
    # A checkout, and a project with a dvc.yaml, have a table of runs, which must fit params.yaml.
    if code_of(root) == root or (root / "dvc.yaml").is_file():
        check_plan(params, root / RUNS_FILE)
    return params


def main(
    description: str | None,
    work: Callable[..., None],
    argv: Sequence[str],
    *,
    name: str = "",
    short: bool = False,
) -> int:
    """Run a stage that belongs to no experiment, with command-line arguments; see `process.run`.

    If the stage has instances, `name` is the help text of the argument that names one, and `work`
    is called with that name and the project's folder; else `name` is empty, and `work` is called
    with the folder alone.
    """
    parser = argparse.ArgumentParser(description=description)
    if name:
        parser.add_argument("name", help=name)
    # `words` has the instance's name if the stage has instances, and is otherwise empty.
    words = vars(parser.parse_args(argv)).values()
    return process.run(lambda: work(*words, project()), short=short)


def named(table: Mapping[str, T], name: str, section: str) -> T:
    """Return the entry `name` of a section in params.yaml.

    Raises:
        StageError: The section has no entry of this name.
    """
    if name not in table:
        raise StageError(
            f"params.yaml has no {section}.{name}; it has {', '.join(table) or 'none'}"
        )
    return table[name]
