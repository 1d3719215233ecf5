"""The jobs of a project's DAG by dvc.yaml, and which of them a change reaches."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pipeline.settings.nodes import to_plain
from pipeline.settings.params import Params
from pipeline.settings.plan import plan
from pipeline.settings.yaml_file import read_yaml
from pipeline.stages.shared.project import checkout

_FILLED_IN = re.compile(r"\$\{(?:item\.)?(\w+)\}")
"""Placeholders that DVC fills in for each run of a stage: a key or value of the table of runs."""
_OURS = re.compile(r"workflow/scripts/|pipeline\.stages")
"""Commands of our own stages, in a checkout and in a project of `pipeline init`."""


class Job(NamedTuple):
    """A stage's instance, as the stage reports it."""

    stage: str
    instance: str

    @property
    def title(self) -> str:
        """For people: `train collector_ppo seed 2`."""
        name = self.instance.replace("/seed", " seed ")
        return self.stage if name == "all" else f"{self.stage} {name}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Jobs of the DAG, all jobs that each needs, and the engines' names for them."""

    before: Mapping[Job, frozenset[Job]]
    """Jobs that a job needs, directly or not."""
    names: Mapping[str, Job]
    """Jobs by the names that `dvc status` uses."""

    def after(self, changed: Collection[str], wanted: Collection[str]) -> set[Job]:
        """Return the jobs that changes reach; with `wanted`, only the jobs that it needs."""
        first = {self.names[name] for name in changed if name in self.names}
        ends = [self.names[name] for name in wanted if name in self.names]
        candidates = frozenset(ends).union(*(self.before[end] for end in ends)) or {*self.before}
        return {job for job in candidates if first & {job, *self.before[job]}}


def graph_of(params: Params, root: Path) -> Graph:
    """Return the DAG of params.yaml, by the files that the stages of dvc.yaml read and write."""
    tables = plan(params)["runs"]
    described = root / "dvc.yaml" if (root / "dvc.yaml").is_file() else checkout() / "dvc.yaml"
    stages = to_plain(read_yaml(described, what="The DAG")).get("stages") or {}
    names: dict[str, Job] = {}
    reads: dict[Job, list[str]] = {}
    makers: dict[str, set[Job]] = {}
    """Jobs by each path that they write, and by the folders above it."""
    for family, stage in stages.items():
        body = stage.get("do", stage)
        # A user's own stage reports no progress; `check` makes no result, and always runs.
        if family == "check" or "matrix" in stage or not _OURS.search(str(body.get("cmd"))):
            continue
        table = str(stage.get("foreach", "")).removeprefix("${runs.").removesuffix("}")
        for key, entry in (tables.get(table, {}) if table else {"": {}}).items():
            job = Job(family.partition("_")[0], _instance(key, entry))
            names[f"{family}@{key}" if table else family] = job
            values = {**entry, "key": key}
            reads[job] = _paths(body, ("deps",), values)
            for path in _paths(body, ("outs", "metrics", "plots"), values):
                for place in (path, *map(str, PurePosixPath(path).parents)):
                    makers.setdefault(place, set()).add(job)
    needs = {
        job: {maker for path in read for maker in makers.get(path, ())}
        for job, read in reads.items()
    }
    before: dict[Job, frozenset[Job]] = {}
    for job in TopologicalSorter(needs).static_order():
        before[job] = frozenset(needs[job]).union(*(before[needed] for needed in needs[job]))
    return Graph(before, names)


def _instance(key: str, entry: Mapping[str, Any]) -> str:
    """Return a stage's own name for its run of a table's entry."""
    if not key:
        return "all"
    if "seed" in entry:
        return f"{entry['experiment']}/seed{entry['seed']}"
    return str(entry.get("trial", key))


def _paths(
    stage: Mapping[str, Any], lists: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Return the paths in lists of a stage of dvc.yaml, with placeholders filled in."""
    entries = [entry for name in lists for entry in stage.get(name, ())]
    # with options an entry is a map of one key
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return [
        _FILLED_IN.sub(lambda match: str(values.get(match[1], match[0])), name) for name in names
    ]
