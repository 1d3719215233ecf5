# What the rules share: the project, the plan, the watched parameters, and the watched sources.
import contextlib
import functools
import os
import shlex
import signal
import sys
import uuid
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.io import IOFile
from snakemake.logging import logger

# Not `workflow.basedir`, which is the folder of the Snakefile that uses this one as a module.
CHECKOUT = Path(str(workflow.current_basedir)).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "src"))

from pipeline.dag import recorder
from pipeline.dag.engines import edited_since_dvc, unseen
from pipeline.cli.run import targets
from pipeline.errors import PipelineError
from pipeline.settings.nodes import respelled
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_plan, key_of, plan
from pipeline.dag.stages.check import (
    check_params,
    refuse_absent_slurm,
    refuse_files_of_the_future,
)
from pipeline.dag.attempt import CALL, note_finished
from pipeline.dag.project import PROJECT, pinned
from pipeline.dag.sources import CODE as NOTES, claims_of, note, stages
from pipeline.dag.sources import watched as watched_sources

# `--config params=FILE` says where params.yaml lies; its folder is the project, in which all paths
# of rules are. A job of a scheduler starts where Snakemake did and comes here again.
UNKNOWN = sorted(set(config) - {"params"})
if UNKNOWN:  # they would change the plan, but not what the stages read
    raise WorkflowError(
        f"--config and --configfile take only `params`, which says where params.yaml lies, and not "
        f"{', '.join(UNKNOWN)}: set values in params.yaml (or with `dvc exp run -S`), which the "
        "stages read too"
    )
if "params" in config:
    WANTED = Path(str(config["params"])).expanduser().resolve()
    if WANTED.name != "params.yaml":
        raise WorkflowError(
            f"--config params={config['params']}: the file must be called params.yaml"
        )

    workdir: WANTED.parent

    if Path.cwd() != WANTED.parent:
        raise WorkflowError(
            f"--config params={config['params']} and --directory name different folders; leave "
            "one of them out"
        )


# Where the code lies: empty in the checkout itself, so that paths and commands are those of dvc.yaml.
CODE = Path() if Path.cwd().resolve() == CHECKOUT else CHECKOUT

if workflow.remote_exec and hasattr(signal, "SIGUSR1"):
    # A scheduler sends its warning to all processes of a job. It is meant for the stage, which
    # saves; a snakemake that died of it would take the stage along.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

if "--attempt" in sys.argv and sys.argv[sys.argv.index("--attempt") + 1] != "1":
    # A scheduler's job is tried again; `workflow.attempt` says so only when the rules are read.
    os.environ.update(PIPELINE_RETRY="yes")  # dag/attempt.py says what for

# What finishes in a call that is killed is not made again: see dag/attempt.py. A
# scheduler's jobs have the call from the engine that has submitted them.
os.environ.setdefault(CALL, uuid.uuid4().hex)

MLFLOW_WRITER = contextlib.ExitStack()


onstart:  # a job whose submission fails has lost its earlier outputs
    if not workflow.remote_exec and workflow.executor_plugin.name == "slurm":
        try:
            refuse_absent_slurm(
                without_accounts=workflow.executor_settings.no_account
            )
        except PipelineError as error:
            raise WorkflowError(str(error)) from None
    if not workflow.remote_exec and recorder.WRITER not in os.environ:
        # This process writes the stages' runs to MLflow, as `pipeline run` does.
        os.environ.update(MLFLOW_WRITER.enter_context(recorder.serving()))


onsuccess:
    if not workflow.remote_exec:
        MLFLOW_WRITER.close()
        note_finished(Path.cwd(), os.environ[CALL])


onerror:
    if not workflow.remote_exec:
        MLFLOW_WRITER.close()
        note_finished(Path.cwd(), os.environ[CALL])


# The stage takes the place of the shell, which would outlive a Snakemake that was killed.
if CODE == Path():
    shell.prefix("exec ")
else:  # `python workflow/scripts/...` of a rule becomes that of the checkout
    ELSEWHERE = 'program=$1 script=$2; shift 2; exec "$program" "$0/$script" "$@"'
    shell.prefix(
        f"{PROJECT}=. exec sh -c {shlex.quote(ELSEWHERE)} {shlex.quote(str(CODE))} "
    )

try:
    PARAMS = load_params("params.yaml")
    if not workflow.remote_exec:  # for a job of a scheduler all has been checked
        # a stage refuses too, but then what it made before is deleted
        check_params(PARAMS)
        refuse_files_of_the_future(PARAMS)
    if Path("dvc.yaml").is_file():  # which needs workflow/runs.yaml
        check_plan(PARAMS)
    RUNS = plan(PARAMS)["runs"]
    # Snakemake compares texts: 1 and 1.0 would be two values, and train again.
    VALUES = {**PARAMS.in_one_spelling(), "runs": respelled(RUNS)}
except PipelineError as error:
    raise WorkflowError(str(error)) from None

TRAINING = ("train_from_scratch", "train_pretrained", "train_chosen")
EVALUATION = ("evaluate", "evaluate_video")


def watched(*names, of=None):
    """The values of these dotted keys: what dvc.yaml lists under `params`.

    `{base}` and `{key}` in them are those of the wildcards' run in the table `of`.
    """

    def of_job(wildcards):
        selected, more = {}, {}
        if of is not None:
            key = key_of(wildcards.experiment, wildcards.seed)
            more = {"base": RUNS[of][key]["base"], "key": key}
        for name in names:
            dotted = name.format(**wildcards, **more)
            value = VALUES
            for part in dotted.split("."):
                value = value[part]
            selected[dotted] = value
        return selected

    return of_job


def sources_of(stage):
    """What a stage imports, as files: Snakemake does not see an edit inside a folder.

    Outside the checkout it is the note of these files on which DVC depends too, because the path of
    the code is that of this machine alone.
    """
    if CODE == Path():
        files = watched_sources(CODE, stage)
        if stage == "report":
            files += claims_of(Path())
    else:
        note(Path(), stage, CODE)
        files = str(NOTES / f"{stage}.txt")

    def of_job(wildcards):
        force_edited()  # of every target, before Snakemake decides which jobs run
        return files

    return of_job


@functools.cache
def force_edited():
    """Run the jobs whose results DVC has made with other parameters than those of now.

    Snakemake sees edited files by their times, but a parameter only by its own record of a result.
    """
    if not workflow.remote_exec:
        workflow.dag.forcefiles.update(filter(is_unrecorded, edited_since_dvc(Path())))


def is_unrecorded(file):
    """Whether the file exists and Snakemake has not made it."""
    return Path(file).exists() and not workflow.persistence.metadata(IOFile(file))


SOURCES = {stage: sources_of(stage) for stage in stages(CODE)}


def spelled_out(*paths):
    """Files, and the files in folders."""
    files = []
    for path in map(Path, paths):
        inside = path.rglob("*") if path.is_dir() else [path]
        files += [
            str(file)
            for file in inside
            if not file.is_dir() and "__pycache__" not in file.parts
        ]
    return sorted(files)


def one_of(names):
    """A pattern for a wildcard that takes these values, or none."""
    return "|".join(map(str, names)) or "(?!)"


def run_of(table, field):
    """The entry's `field` for the wildcards' experiment and seed."""
    return lambda wildcards: RUNS[table][key_of(wildcards.experiment, wildcards.seed)][
        field
    ]


def asked(resource, of=None):
    """The `resource` of the wildcards' experiment, times its learners in the table `of`."""
    return lambda wildcards: getattr(
        PARAMS.experiment(wildcards.experiment).resources, resource
    ) * learners_of(of, wildcards)


def learners_of(table, wildcards):
    """Processes of the wildcards' run that learn together."""
    if table is None:
        return 1
    run = RUNS[table][key_of(wildcards.experiment, wildcards.seed)]
    return run.get("learners", 1)


def threads_of(table):
    """Threads of the wildcards' run: its own or those of all, for each learner."""
    return lambda wildcards: RUNS[table][
        key_of(wildcards.experiment, wildcards.seed)
    ].get("threads", PARAMS.runtime.torch_threads) * learners_of(table, wildcards)


def trials_of(*patterns):
    """The patterns, filled in for each trial and seed of the wildcards' sweep."""
    return lambda wildcards: [
        pattern.format(experiment=f"{wildcards.name}/{number}", seed=seed)
        for number in RUNS["sweeps"][wildcards.name]["trials"]
        for seed in RUNS["sweeps"][wildcards.name]["seeds"]
        for pattern in patterns
    ]


def told_of(*patterns):
    """The patterns, filled in for each seed of the trial that the wildcards' proposal waits for."""
    return lambda wildcards: [
        pattern.format(
            told=RUNS["proposals"][f"{wildcards.name}-{wildcards.number}"]["told"],
            seed=seed,
        )
        for seed in RUNS["sweeps"][wildcards.name]["seeds"]
        for pattern in patterns
    ]


def experiments(table):
    """Names of the experiments in a table of runs."""
    return sorted({run["experiment"] for run in RUNS[table].values()})


def each(table, pattern):
    """The pattern, filled in for each run of a table."""
    return [pattern.format(**run) for run in RUNS[table].values()]


def known(files):
    """These files, after one line if Snakemake has not made some of them."""
    unknown = [file for file in files if is_unrecorded(file)]
    if unknown and not workflow.remote_exec:
        logger.warning(unseen(unknown))
    return files


DELIVERABLES = []
"""Every file that someone may want, so that a deleted one is noticed; the rules add theirs."""


def stages_of_all(name):
    """Stages that every run of a subset, experiment or sweep has."""
    stage_sets = [
        set(PARAMS.experiment(experiment).stages)
        for experiment, _ in PARAMS.runs_of(name)
    ]
    return sorted(set.intersection(*stage_sets))
