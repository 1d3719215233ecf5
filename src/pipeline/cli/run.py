"""`pipeline run`: run the whole DAG, or parts of it by name, with either engine."""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from pipeline.cli.parser import Parser, option
from pipeline.cli.sync import sync
from pipeline.dag import engines
from pipeline.dag.attempt import WORK
from pipeline.dag.stages.check import refuse_files_of_the_future
from pipeline.errors import (
    Interrupted,
    PipelineError,
    SettingsError,
    StageError,
    one_line,
    shell_command,
)
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import RUNS_FILE, key_of, table_of, write_plan
from pipeline.settings.project.sweeps import best_file
from pipeline.settings.reader import suggestion
from pipeline.tracking.progress import FILE, log_of

_log = logging.getLogger(__name__)


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline run`."""
    text = (
        "names in params.yaml: experiments, sweeps, runs (<experiment>-<seed>) or subsets (lists "
        "of names under the key `subsets`); default: all"
    )
    parser.add_argument("names", nargs="*", help=text)
    choices = {"choices": ("dvc", "snakemake"), "default": "snakemake", "metavar": None}
    option(parser, "--engine NAME", "the engine that runs the stages", **choices)
    option(parser, "--stage NAME", "the last stage to run, such as train; default: all stages")
    option(parser, "--cores N", "number of jobs at a time", default=1)
    option(parser, "-n --dry-run", "only print the engine's command")


def run(arguments: argparse.Namespace) -> str:
    """Write the plan, let an engine make the targets, and return the table of results."""
    root, engine = Path.cwd(), arguments.engine
    if arguments.stage is not None and not arguments.names:
        text = "--stage: needs names; give the experiments or runs to end with this stage"
        raise SettingsError(text)
    params = load_params(root / "params.yaml")
    # The table of runs is written before the engine starts: both engines read it, and not
    # params.yaml.
    write_plan(params, root / RUNS_FILE)
    # Without names there are no targets, and both engines make everything.
    chosen = targets(params, arguments.names, stage=arguments.stage)
    if engine == "dvc":
        _refuse_without_dvc(root)
        engines.truncate_incomplete_dvc_lock(root)
        command = ["dvc", "repro", *chosen]
    else:
        refuse_files_of_the_future(params)
        command = ["snakemake", "--cores", str(arguments.cores), *chosen.values()]
    if arguments.dry_run:
        return shell_command(*command)
    with _run_lock(root):
        if engine == "dvc":
            _take_from_snakemake(root)
        ran_none = _run_with_progress(command, root, params, [*chosen], arguments.cores)
    from pipeline.cli.compare import answer  # this imports NumPy, which the engines do not need

    if not arguments.names:
        table = answer(root)
        return f"Everything is up to date; nothing ran.\n\n{table}".rstrip() if ran_none else table
    done = f"{engine}: {', '.join(arguments.names)} up to date{'; nothing ran' * bool(ran_none)}."
    try:
        table = answer(root, [run for name in arguments.names for run in params.runs_of(name)])
    except PipelineError as error:  # the runs are up to date even if the table fails
        table = f"The table of results cannot be made: {one_line(error)}"
    return f"{done}\n\n{table}" if table else done


def _refuse_without_dvc(root: Path) -> None:
    if not any((folder / ".dvc").is_dir() for folder in (root, *root.parents)):
        raise StageError(
            f"{root} is not a DVC repository: run `git init && dvc init` (without git: `dvc init "
            "--no-scm`), or use `pipeline run --engine snakemake`, which needs no repository"
        )


@contextlib.contextmanager
def _run_lock(root: Path) -> Iterator[None]:
    """Hold the folder's lock, to refuse a second `pipeline run` with a clear error."""
    (root / WORK).mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / WORK / "run.lock")
    try:
        # The engines have locks, too, but the engines' errors do not name the command that runs.
        lock.acquire(timeout=0)
    except Timeout:
        raise StageError(
            f"{root}: another `pipeline run` is running here; wait until it ends, or stop it with "
            "Ctrl+C"
        ) from None
    with lock:
        yield


def _take_from_snakemake(root: Path) -> None:
    """Record Snakemake's results in DVC, if Snakemake finds all results up to date."""
    if not (root / ".snakemake" / "metadata").is_dir():
        return
    try:
        # DVC watches lists of the digests of source files. The lists are updated here, so that DVC
        # sees the edits that were made before Snakemake ran.
        engines.note_sources(root)
        if engines.dvc_state(root).pending:
            _log.info("%s", sync(root, "snakemake"))
    except StageError as error:
        _log.info("DVC does not take over Snakemake's results: %s", one_line(error))


def _run_with_progress(
    command: Sequence[str], root: Path, params: Params, target_names: Sequence[str], cores: int
) -> bool:
    """Run an engine and show the progress of its stages; its output goes to a log.

    Return whether no stage ran: stages that a user has added report no start.
    """
    from pipeline.cli.progress import Screen
    from pipeline.dag import recorder  # this imports NumPy, which the engines do not need
    from pipeline.dag.graph import graph_of

    graph = graph_of(params, root)
    # The changed stages are listed before the run, because the progress lines show their number.
    changed = _changed(command[0], root, graph.names)
    waiting = graph.after(changed, target_names)
    log = Path("logs", f"{command[0]}.log")
    (root / log).parent.mkdir(exist_ok=True)
    # Events go into a file in the project, because jobs of a cluster run on other machines.
    with tempfile.TemporaryDirectory(prefix="progress-", dir=root / WORK) as folder:
        events = Path(folder, "events")
        # Stages append to this file; each event is one line of JSON.
        events.touch()
        variables = engines.environment() | {FILE: str(events)}
        screen = Screen(graph, waiting, events, cores=cores)
        with (root / log).open("wb") as output, screen.bars, recorder.serving() as writer:
            code = _run_engine(command, root, variables | writer, output, screen.update)
    if code == 0:
        return not (screen.numbers or screen.waiting or {*changed} - {*graph.names})
    # A stage that was killed has reported no end, so it still counts as running.
    failed = [*screen.failed, *screen.running]
    for job, path in [(job.title, log_of(*job)) for job in failed] or [(command[0], log)]:
        excerpt = "".join(f"  {line}\n" for line in _last_lines(root / path))
        sys.stderr.write(f"{job} failed; the end of {path}:\n{excerpt}")
    raise StageError(
        f"`{shell_command(*command[:3])}{' ...' if len(command) > 3 else ''}` ended with exit code "
        f"{code}; its whole output is in {log}. The same command continues where it stopped."
    )


def _last_lines(path: Path, n: int = 15) -> list[str]:
    """Return the last `n` lines of a log; [] if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, n)]
    except OSError:
        return []


def _changed(engine: str, root: Path, all_names: Collection[str]) -> Collection[str]:
    """Return the stages that an engine finds out of date; all stages if the engine fails."""
    try:
        if engine == "snakemake":
            state = engines.snakemake_summary(root)
            kept = sorted({*state.unrecorded} - {*state.pending})
            if kept:
                _log.warning("%s", engines.unseen(kept))
            return state.pending
        engines.note_sources(root)
        return engines.dvc_state(root).pending
    except StageError:
        return all_names  # the engine itself will report the error


def _run_engine(
    command: Sequence[str],
    root: Path,
    variables: Mapping[str, str],
    output: BinaryIO,
    update: Callable[[], None],
) -> int:
    """Run an engine and return its exit code; a signal to this process interrupts the jobs.

    The engine has its own process group, so that Ctrl+C reaches it once, through this process.
    """
    received: list[int] = []
    engine: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        received.append(number)
        if engine is not None:
            _interrupt(engine)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    handled = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # The handlers are restored afterwards, because `main` may be called again in this process.
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        engine = subprocess.Popen(  # noqa: S603  # the command is fixed
            command,
            cwd=root,
            env=variables,
            # The engine gets no input, because the progress lines would hide its question.
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0 if hasattr(os, "killpg") else None,
        )
        # A signal may have come between the handlers' installation and the engine's start.
        if received:
            _interrupt(engine)
        while engine.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # In contrast to a sleep, this wait ends at once when the engine ends.
                engine.wait(_POLL_S)
            update()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # This shows the events between the last update and the engine's end.
    update()
    if received:
        reason = f"stopped by {signal.Signals(received[0]).name}"
        advice = "running trainings are saved, and the same command continues them"
        raise Interrupted(f"{reason}; {advice}", exit_code=128 + received[0])
    return engine.returncode


def _interrupt(engine: subprocess.Popen[bytes]) -> None:
    """Interrupt the engine and its jobs, as Ctrl+C in a terminal does."""
    with contextlib.suppress(OSError):  # the engine may have just ended
        if hasattr(os, "killpg"):
            # The whole process group gets the signal: DVC alone would wait for its job's end.
            os.killpg(engine.pid, signal.SIGINT)
        else:
            engine.terminate()


_POLL_S = 0.25
"""Seconds between updates of the progress lines."""


def targets(params: Params, names: Sequence[str], *, stage: str | None = None) -> dict[str, str]:
    """Return the engines' targets for names in params.yaml; refuse unknown names and stages.

    For each run's last stage, and each sweep's ranking, the key is the stage of dvc.yaml, and the
    value an output of the stage, which is Snakemake's target.
    """
    found: dict[str, str] = {}
    for name in names:
        runs = params.runs_of(name)
        if not runs:
            names_of_runs = [*params.subsets, *params.experiments, *params.sweeps]
            raise SettingsError(
                f"{params.path}: no subset, experiment, sweep or run is called {name!r}"
                f"{suggestion(name, names_of_runs)} Known: {', '.join(names_of_runs)}"
            )
        # A dict drops repetitions, as subsets may overlap.
        found |= dict(_target(params, experiment, seed, stage) for experiment, seed in runs)
    parts = (part for name in names for part in params.subsets.get(name, (name,)))
    sweeps = [part for part in parts if part in params.sweeps and stage is None]
    return found | {f"sweep@{part}": best_file(part).as_posix() for part in sweeps}


def _target(params: Params, name: str, seed: int, stage: str | None) -> tuple[str, str]:
    experiment = params.experiment(name)
    last = stage or experiment.stages[-1]
    if last not in experiment.stages:
        text = f"{name!r} has no stage {last!r}, only {', '.join(experiment.stages)}"
        raise SettingsError(f"{params.path}: {text}")
    table = table_of(last, experiment)
    family = "train" if table == "train_from_scratch" else table
    # Other stages have the output policy.pt.
    end = {"export": "", "evaluate": "/metrics.json"}.get(last, "/policy.pt")
    return f"{family}@{key_of(name, seed)}", f"results/{last}/{name}/seed{seed}{end}"
