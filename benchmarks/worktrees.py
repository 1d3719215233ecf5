"""Copies of the project that benchmarks run in, so that the checkout stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import write_plan

ROOT = Path(__file__).resolve().parents[1]
FILES = ("Snakefile", "dvc.yaml", "constraints.txt", ".dvcignore", ".gitignore")
FOLDERS = ("src", "workflow", "config", "profiles", ".dvc")


def copy_project(root: Path, params: str) -> Path:
    """Copy the project into a git repository with these contents of params.yaml, nothing built."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tmp", "cache", "*.local")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    change_params(root, params)
    git(root, "init", "-q")
    commit(root, "start")
    return root


def change_params(root: Path, params: str) -> None:
    """Write these contents of params.yaml into the copy, and plan them."""
    (root / "params.yaml").write_text(params)
    write_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")


def git(root: Path, *arguments: str) -> None:
    """Run git in the copy, with a made-up identity."""
    identity = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True)  # noqa: S603, S607  # fixed


def commit(root: Path, message: str) -> None:
    """Commit all that git does not ignore."""
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message)


def environment(root: Path) -> dict[str, str]:
    """Variables for commands in the copy: this Python, the copy's sources, a store of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    more = {"PATH": path, "PYTHONPATH": str(root / "src"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    return inherited | more | {"OMP_NUM_THREADS": "1"}


def shortened(steps: int) -> str:
    """params.yaml of the project, with so little work in each experiment that it takes seconds."""
    params: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    for demonstration in params["demonstrations"].values():
        demonstration["episodes"] = 2
    for experiment in params["experiments"].values():
        experiment["evaluation"]["episodes"] = 4
        if "pretrain" in experiment:
            experiment["pretrain"]["epochs"] = 1
        trainer = yaml.safe_load((ROOT / experiment["trainer"]).read_text())
        for behavior in trainer["behaviors"]:
            changes = experiment["overrides"].setdefault("behaviors", {}).setdefault(behavior, {})
            changes |= {"max_steps": steps, "summary_freq": steps // 4}
            changes.setdefault("hyperparameters", {})["buffer_size"] = steps // 2
    return yaml.safe_dump(params, sort_keys=False)


def processes_in(root: Path) -> list[psutil.Process]:
    """Processes that work in the copy or were started with a path in it."""
    root, processes = root.resolve(), []
    for process in psutil.process_iter():
        try:
            named = any(word.startswith(f"{root}/") for word in process.cmdline())
            is_inside = named or Path(process.cwd()).is_relative_to(root)
            if is_inside and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes
