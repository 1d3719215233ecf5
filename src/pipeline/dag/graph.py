"""The jobs of the DAG, and the jobs that a change affects."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pipeline.dag.project import checkout
from pipeline.settings.nodes import to_plain
from pipeline.settings.project.params import Params
from pipeline.settings.project.plan import plan
from pipeline.settings.yaml_file import read_yaml

_FILLED_IN = re.compile(r"\$\{(?:item\.)?(\w+)\}")
"""Pattern of placeholders in dvc.yaml that DVC replaces by a key or value of the runs' table."""
_OURS = re.compile(r"workflow/scripts/|pipeline\.stages")
"""Pattern of the commands of this package's stages, in a checkout and in a project."""


class Job(NamedTuple):
    """A job of the DAG, named by its stage and instance as in the events that the stage reports."""

    stage: str
    instance: str

    @property
    def title(self) -> str:
        """The job in words, such as `train collector_ppo seed 2`."""
        name = self.instance.replace("/seed", " seed ")
        return self.stage if name == "all" else f"{self.stage} {name}"


@dataclass(frozen=True, slots=True)
class Graph:
    """The jobs of the DAG, the jobs that each job needs, and the names of jobs in `dvc status`."""

    before: Mapping[Job, frozenset[Job]]
    """All jobs that a job needs, directly or indirectly."""
    names: Mapping[str, Job]
    """Jobs by the names that `dvc status` uses."""

    def after(self, changed: Collection[str], wanted: Collection[str]) -> set[Job]:
        """Return the jobs that the `changed` stages affect.

        If `wanted` has names of jobs, only these jobs and the jobs that they need count.
        """
        # Names that are not in `names` are stages that a user has added.
        first = {self.names[name] for name in changed if name in self.names}
        ends = {self.names[name] for name in wanted if name in self.names}
        # Without `wanted` every job counts.
        candidates = ends.union(*(self.before[end] for end in ends)) or self.before
        return {job for job in candidates if first & {job, *self.before[job]}}


def graph_of(params: Params, root: Path) -> Graph:
    """Return the DAG of params.yaml, from the files that the stages of dvc.yaml read and write."""
    tables = plan(params)["runs"]
    # A project without DVC has the same DAG as the checkout.
    described = root / "dvc.yaml" if (root / "dvc.yaml").is_file() else checkout() / "dvc.yaml"
    stages = to_plain(read_yaml(described, what="The DAG")).get("stages") or {}
    names: dict[str, Job] = {}
    reads: dict[Job, list[str]] = {}
    makers: dict[str, set[Job]] = {}
    """Jobs by the paths that they write, and by all parent folders of these paths."""
    for family, stage in stages.items():
        body = stage.get("do", stage)
        # Stages that a user has added report no progress; `check` makes no result and always runs.
        if family == "check" or "matrix" in stage or not _OURS.search(str(body.get("cmd"))):
            continue
        # The table's name is `train_pretrained` in `${runs.train_pretrained}`.
        table = str(stage.get("foreach", "")).removeprefix("${runs.").removesuffix("}")
        for key, entry in (tables.get(table, {}) if table else {"": {}}).items():
            job = Job(family.partition("_")[0], _instance(key, entry))
            names[f"{family}@{key}" if table else family] = job
            values = {**entry, "key": key}
            reads[job] = _paths(body, values, "deps")
            for path in _paths(body, values, "outs", "metrics", "plots"):
                for place in (path, *map(str, PurePosixPath(path).parents)):
                    makers.setdefault(place, set()).add(job)
    # A job needs the jobs that write into the paths that it reads.
    needs = {
        job: {maker for path in read for maker in makers.get(path, ())}
        for job, read in reads.items()
    }
    before: dict[Job, frozenset[Job]] = {}
    # In topological order, `before` is complete for the jobs that a job needs.
    for job in TopologicalSorter(needs).static_order():
        before[job] = frozenset(needs[job]).union(*(before[needed] for needed in needs[job]))
    return Graph(before, names)


def _instance(key: str, entry: Mapping[str, Any]) -> str:
    """Return the name of a stage's instance in its events, for an entry of a table of runs."""
    if "seed" in entry:
        return f"{entry['experiment']}/seed{entry['seed']}"
    return str(entry.get("trial", key)) or "all"


def _paths(body: Mapping[str, Any], values: Mapping[str, Any], *lists: str) -> list[str]:
    """Return the paths in lists of a stage of dvc.yaml, with placeholders filled in."""
    entries = [entry for name in lists for entry in body.get(name, ())]
    # An entry with options is a map with the path as its only key.
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return [
        _FILLED_IN.sub(lambda match: str(values.get(match[1], match[0])), name) for name in names
    ]
