"""Both descriptions of the DAG as comparable nodes, read without building anything."""

import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from pipeline.dag.graph import graph_of
from pipeline.dag.sources import CODE, claims_of, watched
from pipeline.settings.project.params import load_params

CHECK = "check"
"""DVC's first stage; Snakemake does the same when it reads the rules."""


@dataclass
class Node:
    name: str
    outs: set[str]
    deps: set[str]
    params: dict[str, Any] = field(default_factory=dict)
    cmd: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    """The resources that Snakemake reserves for the job."""


def dvc_nodes(root: Path) -> list[Node]:
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import Repo

    nodes = []
    written = load_params(root / "params.yaml").in_one_spelling()
    with Repo(str(root)) as repo:
        for stage in repo.index.stages:
            if stage.name == CHECK:
                continue
            deps: set[str] = set()
            params: dict[str, Any] = {}
            for dep in stage.deps:
                if isinstance(dep, ParamsDependency):
                    values = dep.read_params()
                    if dep.def_path == "params.yaml":  # Snakemake has these in one spelling
                        values = {key: at(written, key) for key in dep.params}
                    params |= {key: values[key] for key in dep.params}
                elif Path(dep.def_path).parent == CODE:
                    noted = Path(dep.def_path).stem
                    deps |= {*watched(root, noted), *(claims_of(root) if noted == "report" else ())}
                else:
                    deps.add(dep.def_path)
            outs = {out.def_path for out in stage.outs}
            nodes.append(Node(stage.name, outs, deps, params, plain_command(stage.cmd)))
    return nodes


def at(values: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for part in key.split("."):
        values = values[part]
    return values


def dvc_before(root: Path) -> dict[str, set[str]]:
    """Return the stages that DVC runs before each stage, directly or indirectly."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of DVC's pygtrie
        return {
            stage.name: {upstream.name for upstream in nx.descendants(repo.index.graph, stage)}
            for stage in repo.index.stages
        }


def counted_before(root: Path) -> dict[str, set[str]]:
    """Return the stages that `pipeline run` counts before each stage, by DVC's names."""
    graph = graph_of(load_params(root / "params.yaml"), root)
    names = {job: name for name, job in graph.names.items()}
    return {
        name: {names[needed_job] for needed_job in graph.before[job]}
        for name, job in graph.names.items()
    }


def snakemake_nodes(root: Path) -> list[Node]:
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import DAGSettings, OutputSettings, Quietness, ResourceSettings

    previous_folder = Path.cwd()
    nodes = []
    try:
        with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
            workflow_api = api.workflow(
                resource_settings=ResourceSettings(cores=1),
                snakefile=root / "Snakefile",
                workdir=root,
            )
            workflow_api.dag(DAGSettings(forceall=True))
            workflow = workflow_api._workflow  # the public API cannot list jobs
            workflow._prepare_dag(
                forceall=True, ignore_incomplete=True, lock_warn_only=True, nolock=True
            )
            workflow._build_dag()
            for job in workflow.dag.jobs:
                if not job.output:
                    continue
                instance = "-".join(map(str, job.wildcards)).replace("/", "-")
                nodes.append(
                    Node(
                        job.rule.name + (f"@{instance}" if instance else ""),
                        set(map(str, job.output)),
                        set(map(str, job.input)),
                        dict(job.params.get("watched", {})),
                        plain_command(job.shellcmd),
                        {name: job.resources.get(name) for name in ("mem_mb", "runtime", "gpu")},
                    )
                )
    finally:
        os.chdir(previous_folder)
    return nodes


def plain_command(command: str | None) -> str:
    """Return the command without Snakemake's redirection into a log."""
    return " ".join(re.sub(r"\s*>\s*\S+\s+2>&1\s*$", "", command or "").split())


def expanded(nodes: list[Node], root: Path) -> list[Node]:
    """Return the nodes with files in place of folders among their dependencies.

    A folder that other stages write into stands for their outputs, a folder of sources for its
    files.
    """
    all_outs = {out for node in nodes for out in node.outs}
    return [
        Node(
            node.name,
            node.outs,
            {path for dep in node.deps for path in _within(dep, all_outs, root)},
            node.params,
            node.cmd,
        )
        for node in nodes
    ]


def _within(dep: str, all_outs: set[str], root: Path) -> set[str]:
    if dep in all_outs:
        return {dep}
    below = {out for out in all_outs if out.startswith(f"{dep}/")}
    if below:
        return below
    if (root / dep).is_dir():
        files = (file for file in (root / dep).rglob("*") if file.is_file())
        return {
            file.relative_to(root).as_posix() for file in files if "__pycache__" not in file.parts
        }
    return {dep}


def differences(ours: list[Node], theirs: list[Node], root: Path) -> list[str]:
    """Return the differences between two descriptions, one line each."""
    left = {node.name: node for node in expanded(ours, root)}
    right = {node.name: node for node in expanded(theirs, root)}
    problems = [f"{name}: only in dvc.yaml" for name in sorted(left.keys() - right.keys())]
    problems += [f"{name}: only in the Snakefile" for name in sorted(right.keys() - left.keys())]
    for name in sorted(left.keys() & right.keys()):
        for part in ("outs", "deps", "params", "cmd"):
            left_value, right_value = getattr(left[name], part), getattr(right[name], part)
            if left_value != right_value:
                problems.append(f"{name}: {part}: {_contrast(left_value, right_value)}")
    return problems


def _contrast(left: Any, right: Any) -> str:
    if isinstance(left, set):
        return (
            f"only in dvc.yaml {sorted(left - right)}, only in the Snakefile {sorted(right - left)}"
        )
    return f"{left!r} != {right!r}"
