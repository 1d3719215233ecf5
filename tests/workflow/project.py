"""A copy of the project in a git repository of its own, and commands that run in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import forking
from only_our_parts import search_path
from repositories import commit, git

from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import write_plan

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ("Snakefile", "dvc.yaml", "params.yaml", "constraints.txt", ".dvcignore", ".gitignore")
STAGES = ("env", "demos", "pretrain", "train", "export", "evaluate", "sweep", "report")
REPRO = {"dvc": ("dvc", "repro"), "snakemake": ("snakemake", "--cores", "2", "--quiet", "all")}
FOLDERS = ("src", "workflow", "config", "profiles", "locks", ".dvc")
# Importing these libraries takes engines and stages longer than the work of the tests.
LIBRARIES = (
    *("torch", "onnx", "grpc", "matplotlib.figure", "scipy.stats", "pandas"),
    *("mlflow.onnx", "mlflow.pyfunc", "mlflow.tracing.client", "mlflow.store.tracking"),
    *("mlflow.store.model_registry.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_store"),
    *("snakemake.cli", "dvc.repo", "dvc.cli.parser", "dvc.repo.experiments"),
)


def copy_project(target: Path) -> Path:
    """Make a git repository with the project's present files, without results."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "tmp", "cache")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in PROJECT:
        shutil.copy(ROOT / name, target / name)
    git(target, "init", "-q")
    commit(target, "start")
    return target


def tiny(*experiments: str, **sections: object) -> dict[str, Any]:
    """Return the content of tiny.yaml with only some experiments, and with further sections."""
    content = yaml.safe_load((Path(__file__).with_name("tiny.yaml")).read_text())
    chosen = {name: content["experiments"][name] for name in experiments}
    return content | {"experiments": chosen} | sections


def ball(**sections: object) -> dict[str, Any]:
    """Return the content of params.yaml with one experiment, `ball`, and further sections."""
    content = tiny("plain", demonstrations={}, **sections)
    ball = content["experiments"]["plain"]
    ball["overrides"]["behaviors.3DBall.max_steps"] = 2000
    ball["resources"] = {"threads": 2, "memory_mb": 1500, "minutes": 30}
    return content | {"experiments": {"ball": ball}}


def set_params(root: Path, content: str | dict[str, Any]) -> None:
    """Write the params.yaml of a copy, and plan its runs."""
    path = root / "params.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    write_plan(load_params(path), root / "workflow/runs.yaml")


def init_dvc(root: Path) -> None:
    """Let DVC keep the copy's data, with the project's own settings."""
    run(root, "dvc", "init", "--force", "--quiet")
    for name in (".dvc/config", ".dvcignore"):
        shutil.copy(ROOT / name, root / name)


def fast_stages(root: Path) -> Path:
    """Replace all stages by a script that writes its outputs at once and logs to `ran.log`."""
    fast = Path(__file__).with_name("fake_stage.py")
    for stage in STAGES:
        shutil.copy(fast, root / f"workflow/scripts/{stage}.py")
    with (root / ".gitignore").open("a") as file:
        file.write("ran.log\n")
    commit(root, "with fast stages")
    return root


def ran(root: Path, *command: str) -> list[str]:
    """Return the stages that a command ran, in a copy with fast stages."""
    log = root / "ran.log"
    log.unlink(missing_ok=True)
    run(root, *command)
    return sorted(log.read_text().splitlines()) if log.exists() else []


def environment(root: Path) -> dict[str, str]:
    """Return variables for a command in a copy of the project, with the copy's sources."""
    scripts = str(Path(sys.executable).parent)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_"))}
    return inherited | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": search_path(root / "src"),
        "PIPELINE_MLFLOW": "off",
    }


def run(
    root: Path, *command: str, check: bool = True, hash_seed: str = "1", **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy of the project; a failure shows what it printed.

    The engines, and the stages that they start, have the libraries imported already.
    """
    variables = environment(root)
    commands = forking(*LIBRARIES, hash_seed=hash_seed).commands(
        python=(), dvc=("-m", "dvc"), snakemake=("-m", "snakemake"), pipeline=("-m", "pipeline")
    )
    variables["PATH"] = f"{commands}{os.pathsep}{variables['PATH']}"
    result = subprocess.run(  # noqa: S603  # the tests' own commands
        command,
        cwd=root,
        env=variables | extra,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    if check and result.returncode != 0:
        pytest.fail(
            f"{' '.join(command)}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        )
    return result
