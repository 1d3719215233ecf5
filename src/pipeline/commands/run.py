"""`pipeline run`: the whole DAG, or some of it by name, with either engine."""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from pipeline.commands import engines
from pipeline.commands.parser import Parser, option
from pipeline.commands.sync import sync
from pipeline.errors import (
    Interrupted,
    PipelineError,
    SettingsError,
    StageError,
    one_line,
    shell_command,
)
from pipeline.progress import FILE, log_of
from pipeline.settings.params import Params, load_params
from pipeline.settings.plan import RUNS_FILE, key_of, table_of, write_plan
from pipeline.settings.reader import suggestion
from pipeline.settings.sweeps import best_file
from pipeline.stages.check import refuse_files_of_the_future
from pipeline.stages.shared.attempt import WORK

_log = logging.getLogger(__name__)


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline run`."""
    text = (
        "of params.yaml: experiments, sweeps, runs (<experiment>-<seed>), or subsets (names under "
        "its key `subsets`, each a list of the others); default: all"
    )
    parser.add_argument("names", nargs="*", help=text)
    choices = {"choices": ("dvc", "snakemake"), "default": "snakemake", "metavar": None}
    option(parser, "--engine NAME", "who runs the stages", **choices)
    option(parser, "--stage NAME", "the last stage of what is named, such as train; default: all")
    option(parser, "--cores N", "jobs at a time", default=1)
    option(parser, "-n --dry-run", "print the engine's command")


def run(arguments: argparse.Namespace) -> str:
    """Plan, let an engine bring the named targets up to date, and return the results."""
    root, engine = Path.cwd(), arguments.engine
    if arguments.stage is not None and not arguments.names:
        raise SettingsError("--stage is the last stage of what is named; name an experiment or run")
    params = load_params(root / "params.yaml")
    # Before the engine starts: both read the table of runs, not params.yaml itself.
    write_plan(params, root / RUNS_FILE)
    chosen = targets(params, arguments.names, stage=arguments.stage)
    if engine == "dvc":
        _refuse_without_dvc(root)
        engines.mend_lock(root)
        command = ["dvc", "repro", *(target.dvc for target in chosen)]
    else:
        refuse_files_of_the_future(params)
        command = [
            "snakemake",
            "--cores",
            str(arguments.cores),
            *(target.file for target in chosen),
        ]
    if arguments.dry_run:
        return shell_command(*command)
    names = [target.dvc for target in chosen]
    with _alone(root):
        if engine == "dvc":
            _take_from_snakemake(root)
        ran_none = _work(command, root, params, names, arguments.cores)
    from pipeline.commands.compare import answer  # NumPy, which Snakemake's rules need not wait for

    if not arguments.names:
        table = answer(root)
        return f"Everything is up to date; nothing ran.\n\n{table}".rstrip() if ran_none else table
    done = f"{engine}: {', '.join(arguments.names)} up to date{'; nothing ran' * bool(ran_none)}."
    try:
        table = answer(root, [run for name in arguments.names for run in params.runs_of(name)])
    except PipelineError as error:  # the runs are up to date all the same
        table = f"There is no table of them: {one_line(error)}"
    return f"{done}\n\n{table}" if table else done


def _refuse_without_dvc(root: Path) -> None:
    """Refuse a folder that is in no repository of DVC, such as one copied without `.dvc`."""
    if not any((folder / ".dvc").is_dir() for folder in (root, *root.parents)):
        raise StageError(
            f"{root} is no DVC repository: `git init && dvc init` makes it one (without git, `dvc "
            "init --no-scm`), or `pipeline run --engine snakemake` needs none"
        )


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one `pipeline run` work in a folder at a time: engines lock it with less to say."""
    lock = FileLock(root / WORK / "run.lock")
    lock_file = Path(lock.lock_file)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StageError(
            f"{root}: another `pipeline run` is at work here; wait until it ends, or stop it by "
            "Ctrl+C"
        ) from None
    with lock:
        yield


def _take_from_snakemake(root: Path) -> None:
    """Let DVC take over what Snakemake made, if Snakemake finds all of it up to date."""
    if not (root / ".snakemake" / "metadata").is_dir():
        return
    try:
        engines.note_sources(root)  # else an edit that Snakemake has seen is DVC's only later
        if engines.dvc_state(root).pending:
            _log.info("%s", sync(root, "snakemake"))
    except StageError as error:
        _log.info("DVC takes over nothing that Snakemake made: %s", one_line(error))


def _work(
    command: Sequence[str], root: Path, params: Params, target_names: Sequence[str], cores: int
) -> bool:
    """Let an engine work, and show the progress of its stages; its output goes to a log.

    Returns whether no stage ran, as far as can be known: stages of a user's own report nothing.
    """
    from pipeline.commands.progress import Screen, graph_of

    graph = graph_of(params, root)
    changed = _changed(command[0], root, graph.names)
    waiting = graph.after(changed, target_names)
    log = Path("logs", f"{command[0]}.log")
    (root / log).parent.mkdir(exist_ok=True)
    # A file of the project and not a pipe: jobs of a cluster run on other machines.
    (root / WORK).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="progress-", dir=root / WORK) as folder:
        events = Path(folder, "events")
        events.touch()
        variables = engines.environment() | {FILE: str(events)}
        screen = Screen(graph, waiting, events, cores=cores)
        with (root / log).open("wb") as output, screen.bars:
            code = _watched(command, root, variables, output, screen.update)
    if code == 0:
        return not (screen.numbers or screen.waiting or {*changed} - {*graph.names})
    # A stage that was killed hard has reported no end, so it still counts as running.
    failed = [*screen.failed, *screen.running]
    for job, path in [(job.title, log_of(*job)) for job in failed] or [(command[0], log)]:
        excerpt = "".join(f"  {line}\n" for line in _last_lines(root / path))
        sys.stderr.write(f"{job} failed; the end of {path}:\n{excerpt}")
    raise StageError(
        f"`{shell_command(*command[:3])}{' ...' if len(command) > 3 else ''}` ended with exit code "
        f"{code}; all that it printed is in {log}. The same command goes on where it stopped."
    )


def _last_lines(path: Path, n: int = 15) -> list[str]:
    """Return the end of a log; nothing when it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, n)]
    except OSError:
        return []


def _changed(engine: str, root: Path, all_names: Collection[str]) -> Collection[str]:
    """Return the stages that the engine finds out of date; all of them where it fails."""
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


def _watched(
    command: Sequence[str],
    root: Path,
    variables: Mapping[str, str],
    output: BinaryIO,
    update: Callable[[], None],
) -> int:
    """Run an engine and return its exit code; a signal to this process interrupts its jobs.

    The engine has its own process group, so that Ctrl+C reaches it once, through this process.
    """
    received: list[int] = []
    engine: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        received.append(number)
        if engine is not None:
            _interrupt(engine)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is unknown on Windows
    handled = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        engine = subprocess.Popen(  # noqa: S603  # fixed
            command,
            cwd=root,
            env=variables,
            # An engine that asks a question would wait for ever behind the progress lines.
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0 if hasattr(os, "killpg") else None,
        )
        # The signal may have come between installing the handlers and the start of the engine.
        if received:
            _interrupt(engine)
        while engine.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(_LOOK_S)
            update()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # For the events between the last update and the engine's end.
    update()
    if received:
        reason = f"stopped by {signal.Signals(received[0]).name}"
        advice = "what was being trained is saved, and the same command goes on there"
        raise Interrupted(f"{reason}; {advice}", exit_code=128 + received[0])
    return engine.returncode


def _interrupt(engine: subprocess.Popen[bytes]) -> None:
    """Interrupt the engine and its jobs, as Ctrl+C in a terminal does."""
    with contextlib.suppress(OSError):  # it has just ended
        if hasattr(os, "killpg"):
            # To the whole group: a DVC that gets SIGINT alone ignores it and runs to its end.
            os.killpg(engine.pid, signal.SIGINT)
        else:
            engine.terminate()


_LOOK_S = 0.25
"""Seconds between updates of the progress lines."""


@dataclass(frozen=True, slots=True)
class Target:
    """The last stage of one run, or the ranking of a sweep, under each engine's name for it."""

    dvc: str
    """The stage of dvc.yaml."""
    file: str
    """One of the stage's outputs, as Snakemake's target."""


def targets(params: Params, names: Sequence[str], *, stage: str | None = None) -> list[Target]:
    """Return the targets that the engines must make for the names."""
    pairs: dict[tuple[str, int], None] = {}
    for name in names:
        runs = params.runs_of(name)
        if not runs:
            names_of_runs = [*params.subsets, *params.experiments, *params.sweeps]
            raise SettingsError(
                f"{params.path}: no subset, experiment, sweep or run is called {name!r}"
                f"{suggestion(name, names_of_runs)} Known: {', '.join(names_of_runs)}"
            )
        pairs |= dict.fromkeys(runs)
    parts = dict.fromkeys(part for name in names for part in params.subsets.get(name, (name,)))
    return [
        *(_target(params, experiment, seed, stage) for experiment, seed in pairs),
        *(
            Target(f"sweep@{part}", best_file(part).as_posix())
            for part in parts
            if part in params.sweeps and stage is None
        ),
    ]


def _target(params: Params, name: str, seed: int, stage: str | None) -> Target:
    experiment = params.experiment(name)
    last = stage or experiment.stages[-1]
    if last not in experiment.stages:
        raise SettingsError(
            f"{params.path}: {name!r} has no stage {last!r}, only {', '.join(experiment.stages)}"
        )
    table = table_of(last, experiment)
    family = "train" if table == "train_from_scratch" else table
    ends = {"export": "", "evaluate": "/metrics.json"}
    folder = f"results/{last}/{name}/seed{seed}"
    return Target(f"{family}@{key_of(name, seed)}", folder + ends.get(last, "/policy.pt"))
