"""Training from Python: one call for an executable or for an environment in this process."""

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from pipeline.tracking.base import Callback, Tracker
from pipeline.tracking.result import TrainResult
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.manager import Exporter
from pipeline.trainer.checkpoints.restore import first_weights, refuse_other_networks
from pipeline.trainer.checkpoints.resume_points import RESUME_INTERVAL_S
from pipeline.trainer.distributed.sync import refuse_unshareable
from pipeline.trainer.distributed.workers import (
    broadcast_job,
    device_of_this_process,
    joined,
    started,
)
from pipeline.trainer.environment import JobSpec, open_workers
from pipeline.trainer.loop import TrainingLoop
from pipeline.trainer.stopping import stop_on_signal
from pipeline.trainer.supported import refuse_untrainable, usable_device

_log = logging.getLogger(__name__)

# Parameters of glibc's mallopt(3), numbered as in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""Size in bytes above which glibc's malloc returns a freed block to the system; this is the maximum
that glibc allows."""
_TRIM_THRESHOLD_BYTES = 512 << 20
"""Largest number of freed bytes at the top of the heap that the process keeps."""


def train(  # noqa: D417  # `pipeline.train` describes the others
    job: JobSpec,
    *,
    inference: bool = False,
    exporter: Exporter | None = None,
    device: str | None = "cpu",
    callbacks: Sequence[Callback] = (),
    resume_interval_s: float = RESUME_INTERVAL_S,
    learners: int = 1,
) -> TrainResult:
    """Train every behavior of an environment.

    Environments and sinks are closed at the end, also after an error: no process or thread is left.

    The arguments that `pipeline.train` has too are described there; the other one is:

    Args:
        exporter: `pipeline.dag.stages.export.publish` writes an ONNX file next to each numbered
            checkpoint, and `run_logs/training_status.json` then lists both; None writes neither.

    Raises:
        SettingsError: A setting cannot be used, or another run writes into `run_dir`.
        UnityException: The environment failed; the state of the run is saved.
        Interrupted: The process received SIGINT or SIGTERM; the state of the run is saved.
    """  # `pipeline.train` describes the other arguments
    # torchrun starts this call in every process, but only rank 0 reads the settings.
    rank, n_processes = launched()
    if rank > 0:
        # Only the first process reports, so the sinks of this process are closed unused.
        with Tracker(callbacks):
            return run_as_learner(None if isinstance(job.env, str | Path) else job.env)
    if n_processes > 1 and learners not in (1, n_processes):
        raise SettingsError(
            f"learners: {learners} does not match the {n_processes} processes that torchrun has "
            "started; give the same number, or leave it out"
        )
    learners = max(learners, n_processes)
    if learners > 1:
        job = replace(job, torch_threads=job.torch_threads or 1)
    with Tracker(callbacks) as tracker, _limited_threads(job.torch_threads), ExitStack() as stack:
        if not inference:
            # Two runs in one folder would overwrite each other's checkpoints.
            stack.enter_context(files.sole_writer(job.run_dir))
        run = job.settings.with_seed(job.seed)
        refuse_untrainable(run)
        run = without_threaded(run) if learners > 1 else run
        job = replace(job, settings=run, init_from=job.init_from or first_weights(run))
        # A damaged file is reported before the environments start, which may take minutes.
        for file in job.init_from.values():
            load_checkpoint(file)
        if job.resume:
            refuse_other_networks(job.run_dir, run)
        # All learners must have devices of one type, but measurements could choose different types.
        measured = device is None and learners == 1
        chosen = None if measured else usable_device(device)
        group: ProcessGroup = SINGLE_PROCESS
        if learners > 1:
            refuse_single_process_only(job, learners, inference=inference, started=n_processes > 1)
            # With the device type cuda each process gets a GPU of its own.
            chosen = device_of_this_process(usable_device(device))
            several = (
                joined(chosen)
                if n_processes > 1
                else started(
                    learners,
                    device=chosen,
                    threads=job.torch_threads or 1,
                    log_folder=job.log_folder or job.run_dir / "run_logs",
                )
            )
            # `stack` exits in reverse order: the processes end first, and then the folder's lock is
            # released.
            group = stack.enter_context(several)
            # The other processes have no arguments, so the job with the settings is sent to them.
            broadcast_job(group, job.for_others())
        return _train_in_this_process(
            job,
            group,
            chosen,
            tracker,
            inference=inference,
            exporter=exporter,
            resume_interval_s=resume_interval_s,
        )


def run_as_learner(env: object = None) -> TrainResult:
    """Train in a process of rank 1 or above, with the job that the first process sends.

    `env` are environments in this process; None for the executable in the job. PipelineError if a
    process has failed; Interrupted if all processes were asked to stop.
    """
    with joined() as group:
        job = broadcast_job(group, None)
        if env is not None:
            job = replace(job, env=env)
        with Tracker(()) as tracker, _limited_threads(job.torch_threads):
            return _train_in_this_process(job, group, group.device, tracker)


def _train_in_this_process(
    job: JobSpec, group: ProcessGroup, device: torch.device | None, tracker: Tracker, **options: Any
) -> TrainResult:
    # glibc must be configured before the first gradient step allocates memory.
    keep_freed_memory()
    workers = open_workers(job, group)
    # Signals are handled only from here on, because there was nothing to save before.
    with workers, _gc_frozen(), stop_on_signal() as stop:
        workers.should_stop = stop
        loop = TrainingLoop(workers, job, device=device, tracker=tracker, group=group, **options)
        with loop.explained():
            result = loop.run(stop)
    result = replace(result, curves=tracker.curves)
    if tracker.error is None:
        tracker.tell("on_end", result)
    return result


@contextmanager
def _limited_threads(n_threads: int | None) -> Iterator[None]:
    before, n_threads = torch.get_num_threads(), n_threads or 1
    torch.set_num_threads(n_threads)
    try:
        # Idle threads of NumPy's BLAS wait in busy loops, which slows the environments.
        with threadpool_limits(n_threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Make glibc keep the memory that gradient steps free, until the process ends.

    By default glibc returns freed memory to the system, which clears every page when it is needed
    again: a tenth of the time of a POCA gradient step. Other C libraries, and a glibc that
    environment variables configure, are not changed.
    """
    is_configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not is_configured:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Exclude all present objects, torch's included, from garbage collection during the block."""
    # Garbage is collected first, because `freeze` would keep it in memory during the block.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def read_settings(settings: RunSettings | Mapping[str, object] | Path | str) -> RunSettings:
    """Return `RunSettings` from any form of settings that `train` accepts."""
    if isinstance(settings, RunSettings):
        return settings
    if isinstance(settings, str | Path):
        return load_run_settings(Path(settings))
    run = load_run_settings(None, overrides=settings, overrides_from="settings")
    # Like a file, a map that lists behaviors must list all of them; unlisted behaviors are refused.
    return replace(run, from_file=bool(run.behaviors))


def without_threaded(settings: RunSettings) -> RunSettings:
    """Return the settings with `threaded: false`, and warn if a behavior had `threaded: true`."""

    # With `threaded: true`, the processes would make their updates at different steps, but all
    # processes must make each update together.
    def changed(name: str, trainer: TrainerSettings) -> TrainerSettings:
        if trainer.threaded:
            _log.warning("%s: threaded has no effect with several learners.", name)
        return replace(trainer, threaded=False)

    default = settings.default_settings
    return replace(
        settings,
        behaviors={name: changed(name, trainer) for name, trainer in settings.behaviors.items()},
        default_settings=None if default is None else changed("default_settings", default),
    )


def refuse_single_process_only(
    job: JobSpec, n_learners: int, *, inference: bool, started: bool
) -> None:
    """Raise SettingsError for a job that several processes cannot train together.

    `started` says whether torchrun has started the processes.
    """
    reason = None
    if inference:
        reason = f"--inference runs in one process, not in {n_learners}; use one learner"
    elif job.env is None:
        reason = (
            f"each of the {n_learners} learners starts its own environments, so players that are "
            "started elsewhere serve one learner only; name an executable"
        )
    elif not started and not isinstance(job.env, str | Path):
        reason = (
            f"each of the {n_learners} learners starts an executable, but an environment in this "
            "process serves one learner only; use one learner, or name an executable"
        )
    if reason is not None:
        raise SettingsError(f"learners: {reason}")
    for name, settings in job.settings.behaviors.items():
        refuse_unshareable(name, settings, n_learners)
