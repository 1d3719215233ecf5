# What the rules share: the plan, the watched parameters, and the watched sources.
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "src"))

from pipeline.errors import PipelineError
from pipeline.settings import read_yaml
from pipeline.settings.nodes import to_plain
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan, plan

if config:  # it would change the plan, but not what the stages read
    raise WorkflowError(
        "set values in params.yaml (or with `dvc exp run -S`), not with --config or --configfile"
    )

try:
    PARAMS = load_params("params.yaml")
    check_plan(PARAMS)
except PipelineError as error:
    raise WorkflowError(str(error)) from None

RUNS = plan(PARAMS)["runs"]
VALUES = {**to_plain(read_yaml("params.yaml")), "runs": RUNS}

BASE = """__init__.py errors.py files.py seeding.py stages/__init__.py stages/common.py
    stages/process.py stages/sources.py""".split()


def watched(*names):
    """The values of these dotted keys: what dvc.yaml lists under `params`."""

    def of_job(wildcards):
        found = {}
        for name in names:
            dotted = name.format(**wildcards)
            value = VALUES
            for part in dotted.split("."):
                value = value[part]
            found[dotted] = value
        return found

    return of_job


def sources(stage, *packages):
    """Files of the stage's own module and script, and of everything it imports.

    Snakemake does not see an edit inside a folder, so folders are spelled out.
    """
    paths = [
        Path("src/pipeline", name) for name in (*BASE, *packages, f"stages/{stage}.py")
    ]
    return sorted([f"workflow/scripts/{stage}.py", *spelled_out(*paths)])


def spelled_out(*paths):
    """Files, and the files in folders."""
    found = []
    for path in map(Path, paths):
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [
            str(file)
            for file in inside
            if not file.is_dir() and "__pycache__" not in file.parts
        ]
    return sorted(found)


def one_of(names):
    """A pattern for a wildcard that takes these values, or none."""
    return "|".join(map(str, names)) or "(?!)"


def run_of(table, field):
    """The entry's `field` for the wildcards' experiment and seed."""
    return lambda wildcards: RUNS[table][f"{wildcards.experiment}-{wildcards.seed}"][
        field
    ]


def experiments(table):
    """Names of the experiments in a table of runs."""
    return sorted({run["experiment"] for run in RUNS[table].values()})


def each(table, pattern):
    """The pattern, filled in for each run of a table."""
    return [pattern.format(**run) for run in RUNS[table].values()]


def deliverables():
    """Every file that someone may want, so that a deleted one is noticed."""
    place = "{experiment}/seed{seed}"
    return [
        "results/report/report.html",
        *each("train_from_scratch", f"results/train/{place}/policy.pt"),
        *each("train_pretrained", f"results/train/{place}/policy.pt"),
        *each("export", f"results/export/{place}"),
        *each("evaluate", f"results/evaluate/{place}/metrics.json"),
        *(
            f"build/env/{name}"
            for table in ("environments", "path_environments", "unity_environments")
            for name in RUNS[table]
        ),
        *(f"data/demos/{name}.demo" for name in RUNS["demonstrations"]),
    ]
