"""Training from Python: one call for an executable or for an environment in this process."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # has no stubs

from pipeline import files
from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup, launched
from pipeline.errors import SettingsError
from pipeline.settings import RunSettings, TrainerSettings, load_run_settings
from pipeline.tracking.base import Sink, Tracker
from pipeline.trainer.checkpoints.file import RESUME_FILE, load_checkpoint
from pipeline.trainer.checkpoints.manager import Exporter
from pipeline.trainer.checkpoints.restore import first_weights, refuse_other_networks
from pipeline.trainer.checkpoints.resume_points import RESUME_INTERVAL_S
from pipeline.trainer.distributed.sync import refuse_alone_only
from pipeline.trainer.distributed.workers import (
    broadcast_job,
    joined,
    of_this_process,
    started,
)
from pipeline.trainer.environment import JobSpec, open_workers
from pipeline.trainer.loop import TrainingLoop
from pipeline.trainer.result import TrainResult
from pipeline.trainer.stopping import stop_on_signal
from pipeline.trainer.supported import refuse_untrainable, usable_device

_log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_KEPT = 32 << 20
"""Bytes of one block of memory: the most that glibc keeps by itself."""
_MOST_KEPT = 512 << 20
"""Bytes of all."""


def train(
    env: object,
    settings: RunSettings | Mapping[str, object] | Path | str,
    *,
    seed: int,
    run_dir: Path | str,
    num_envs: int = 1,
    env_args: Sequence[str] = (),
    base_port: int | None = None,
    log_folder: Path | None = None,
    init_from: Mapping[str, Path] | None = None,
    whole_weights: bool = False,
    resume: bool = False,
    inference: bool = False,
    exporter: Exporter | None = None,
    device: str | None = "cpu",
    torch_threads: int = 1,
    sinks: Sequence[Sink] = (),
    resume_interval_s: float = RESUME_INTERVAL_S,
    on_start: Callable[[], None] | None = None,
    on_pace: Callable[[RunSettings], None] | None = None,
    starting_lesson: int = 0,
    learners: int = 1,
    end_early: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train every behavior of an environment.

    Environment and sinks are closed in the end, whatever happens: no process and no thread is left.

    Args:
        env: path of an executable; None for players that are started elsewhere, such as the Unity
            Editor; or one or several objects with the members of ML-Agents' `BaseEnv`, for
            `pipeline.train` also environments of Gymnasium or PettingZoo.
        settings: a trainer configuration: read already, as a map, or its file. A map or file that
            lists behaviors has to list all, or to have `default_settings`.
        seed: from which all randomness of the run derives.
        run_dir: gets a folder with checkpoints for each behavior.
        num_envs: how many processes of the executable, or players, to step together.
        env_args: additional arguments of the executable.
        base_port: TCP port of the first process; None lets the system choose, or for players
            that are started elsewhere means the Editor's, 5004.
        log_folder: where executables write their logs.
        init_from: a checkpoint to take the weights from, by behavior; None takes those that the
            settings name (`initialize_from`, `init_path`).
        whole_weights: refuse weights of which a tensor does not fit, instead of naming it.
        resume: continue from the checkpoints in `run_dir`, where there are any.
        inference: act until a signal comes, and count, but neither learn nor save.
        exporter: gives each numbered checkpoint its ONNX beside it, and the run its list of both in
            `run_logs/training_status.json`: `pipeline.stages.export.publish`, or None.
        device: `cpu`, `cuda`, `cuda:0`, ...; None for the one on which each behavior's act and
            minibatch take least time, and with several learners for cuda where there is one.
        torch_threads: threads of torch while training; small networks are slower with more, and
            another number gives other roundings.
        sinks: where summaries go.
        resume_interval_s: seconds between refreshes of the checkpoint that a kill resumes from.
        on_start: called once, when the environments have connected and every behavior that they
            show can be trained; nothing but logs is written before.
        on_pace: called with the settings when `steps_per_update: auto` has become a number; with
            these settings the run repeats.
        starting_lesson: lesson, counted from 0, where every curriculum begins; one with fewer
            lessons begins with its last.
        learners: processes that learn together, each with `num_envs` environments of its own; the
            others are started here, unless `torchrun` has started as many as this one already.
        end_early: asked after every step; True ends the run as `max_steps` does. For one learner.

    Returns:
        Steps, rewards and checkpoints of each behavior, and where the time went.

    Raises:
        SettingsError: A setting cannot be used, or another run writes into `run_dir`.
        UnityException: The environment failed; what was learned so far is saved.
        Interrupted: SIGINT or SIGTERM came; the state is saved.
    """
    # Before anything else: torchrun starts this call in every process; only the first has settings.
    rank, n_processes = launched()
    if rank > 0:
        # Its sinks are closed without a word: the first process reports for all.
        with Tracker(sinks):
            return take_part(None if isinstance(env, str | Path) else env)
    if n_processes > 1 and learners not in (1, n_processes):
        raise SettingsError(
            f"{learners} learners are asked for, but {n_processes} processes have been started; "
            "ask for the same number, or leave it out"
        )
    learners = max(learners, n_processes)
    run_dir = Path(run_dir)
    with Tracker(sinks) as tracker, _threads(torch_threads), ExitStack() as stack:
        if not inference:
            # Two runs in one folder would each resume from the other's checkpoints.
            stack.enter_context(files.sole_writer(run_dir))
        run = read_settings(settings).with_seed(seed)
        refuse_untrainable(run)
        run = unthreaded(run) if learners > 1 else run
        if init_from is None:
            init_from = first_weights(run)
        # Before an environment is started, which may take minutes.
        for file in init_from.values():
            load_checkpoint(file)
        if resume:
            refuse_other_networks(run_dir, run)
        measured = device is None and learners == 1
        chosen = None if measured else usable_device(device)
        job = JobSpec(
            settings=run,
            seed=seed,
            run_dir=run_dir,
            env=env,
            num_envs=num_envs,
            env_args=env_args,
            base_port=base_port,
            log_folder=log_folder,
            init_from=init_from,
            whole_weights=whole_weights,
            resume=resume,
            torch_threads=torch_threads,
            starting_lesson=starting_lesson,
        )
        group: ProcessGroup = SINGLE_PROCESS
        if learners > 1:
            refuse_alone(job, learners, inference=inference, started=n_processes > 1)
            chosen = of_this_process(usable_device(device))
            several = (
                joined(chosen)
                if n_processes > 1
                else started(
                    learners,
                    device=chosen,
                    threads=torch_threads,
                    log_folder=log_folder or run_dir / "run_logs",
                )
            )
            group = stack.enter_context(several)
            broadcast_job(group, job.for_others())
        return _learned(
            job,
            group,
            chosen,
            tracker,
            inference=inference,
            exporter=exporter,
            resume_interval_s=resume_interval_s,
            on_start=on_start,
            on_pace=on_pace,
            end_early=None if learners > 1 else end_early,
        )


def take_part(env: object = None) -> TrainResult:
    """Train as a process beyond the first of a run with several learners.

    The first process says what is to be trained; this one writes nothing but logs.

    Args:
        env: environments in this process; None for the executable that the first process names.

    Raises:
        PipelineError: This process, or another one, has failed.
        Interrupted: All were asked to stop.
    """
    with joined() as group:
        job = broadcast_job(group, None)
        if env is not None:
            job = replace(job, env=env)
        with Tracker(()) as tracker, _threads(job.torch_threads):
            return _learned(job, group, group.device, tracker)


def _learned(
    job: JobSpec, group: ProcessGroup, device: torch.device | None, tracker: Tracker, **options: Any
) -> TrainResult:
    """Train in one of the processes of a run, and return the result."""
    keep_freed_memory()
    workers = open_workers(job, group)
    # Signals only now: until environments have connected there is nothing to save.
    with workers, _old_objects_left_alone(), stop_on_signal() as stop:
        workers.should_stop = stop
        loop = TrainingLoop(workers, job, device=device, tracker=tracker, group=group, **options)
        result = loop.run(stop)
    tracker.ended({name: outcome.numbers() for name, outcome in result.behaviors.items()})
    return result


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        # NumPy's threads would wait for work on the environments' processors.
        with threadpool_limits(n_threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Have the C library keep the memory that a gradient step frees, for the next one.

    glibc gives it back to the system, which then clears every page anew: a tenth of a gradient step
    of POCA. The setting is for the whole process, and stays. Other C libraries are left alone, and
    so is glibc where its environment variables say what to do.
    """
    is_configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not is_configured:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep what exists already out of garbage collections, which would walk all of torch."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_way(run_dir: Path, force: bool, *, goes_on: bool) -> None:
    """Refuse a folder that has an earlier run, or rename it with `force`, unless a run goes on.

    Raises:
        SettingsError: The folder has an earlier run and may not be renamed; or both are set.
    """
    if goes_on and force:
        raise SettingsError("force: begins a new run, which resume and inference do not; drop one")
    earlier = sorted(run_dir.glob(f"*/{RESUME_FILE}"))
    if not earlier or goes_on or launched()[0] > 0:
        return
    folder = run_dir.resolve()
    if not force:
        raise SettingsError(
            f"run_dir: an earlier run is in {run_dir} ({earlier[0]}); continue it with resume=True,"
            f" begin a new run with force=True, which renames the folder to "
            f"{files.free_name(folder).name}, or name another folder"
        )
    if Path.cwd().is_relative_to(folder):
        raise SettingsError(f"force: {folder} is in use as the working folder; name another one")
    with files.sole_writer(folder):
        kept = folder.rename(files.free_name(folder))
    _log.info("The earlier run is kept in %s.", kept)


def read_settings(settings: RunSettings | Mapping[str, object] | Path | str) -> RunSettings:
    """Return the settings of a run, in whatever form `train` takes them."""
    if isinstance(settings, RunSettings):
        return settings
    if isinstance(settings, str | Path):
        return load_run_settings(Path(settings))
    run = load_run_settings(None, overrides=settings, overrides_from="settings")
    return replace(run, from_file=bool(run.behaviors))


def unthreaded(settings: RunSettings) -> RunSettings:
    """Return settings without `threaded`: each process would make its parts at other steps."""

    def changed(name: str, trainer: TrainerSettings) -> TrainerSettings:
        if trainer.threaded:
            _log.warning("%s: threaded is not used with several learners.", name)
        return replace(trainer, threaded=False)

    default = settings.default_settings
    return replace(
        settings,
        behaviors={name: changed(name, trainer) for name, trainer in settings.behaviors.items()},
        default_settings=None if default is None else changed("default_settings", default),
    )


def refuse_alone(job: JobSpec, n_learners: int, *, inference: bool, started: bool) -> None:
    """Refuse what only one process can do; `started` where the processes are there already.

    Raises:
        SettingsError: There is something of that kind.
    """
    if inference:
        raise SettingsError(
            f"--inference plays in one process, and {n_learners} learners are asked for; use one"
        )
    if job.env is None:
        raise SettingsError(
            f"{n_learners} learners need environments of their own, and players that are started "
            "elsewhere are for one learner; name an executable"
        )
    if not started and not isinstance(job.env, str | Path):
        raise SettingsError(
            f"{n_learners} learners need an executable that each can start; an environment in this "
            "process is for one learner"
        )
    for name, settings in job.settings.behaviors.items():
        refuse_alone_only(name, settings, n_learners)
