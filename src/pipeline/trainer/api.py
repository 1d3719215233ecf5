"""Training from Python: one call for an executable or for an environment in this process."""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline import files, seeding
from pipeline.algos.ranks import ALONE, launched
from pipeline.errors import SettingsError
from pipeline.settings import RunSettings, load_run_settings
from pipeline.tracking.base import Tracker
from pipeline.trainer.environment import open_workers
from pipeline.trainer.first_weights import first_weights
from pipeline.trainer.learners import (
    heed_input,
    joined,
    of_this_process,
    started,
    told,
)
from pipeline.trainer.loop import RESUME_INTERVAL_S, TrainingLoop
from pipeline.trainer.stopping import stop_on_signal
from pipeline.trainer.supported import refuse_untrainable, usable_device
from pipeline.trainer.work import Work, refuse_alone, unthreaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeline.algos.ranks import Ranks
    from pipeline.envs.base import BaseEnv
    from pipeline.tracking.base import Sink
    from pipeline.trainer.result import TrainResult
    from pipeline.trainer.saving import Exporter


def train(
    env: str | Path | BaseEnv | Sequence[BaseEnv] | None,
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
    starting_lesson: int = 0,
    learners: int = 1,
) -> TrainResult:
    """Train every behavior of an environment.

    Environment and sinks are closed in the end, whatever happens: no process and no thread is left.

    Args:
        env: path of an executable; one or several objects with the low-level API; None for the
            Unity Editor.
        settings: a trainer configuration: read already, as a map, or its file.
        seed: from which all randomness of the run derives.
        run_dir: gets a folder with checkpoints for each behavior.
        num_envs: how many processes of the executable to step together.
        env_args: additional arguments of the executable.
        base_port: TCP port of the first process; None lets the system choose.
        log_folder: where executables write their logs.
        init_from: a checkpoint to take the weights from, by behavior; None takes those that the
            settings name (`initialize_from`, `init_path`).
        whole_weights: refuse weights of which a tensor does not fit, instead of naming it.
        resume: continue from the checkpoints in `run_dir`, where there are any.
        inference: act until a signal comes, and count, but neither learn nor save.
        exporter: gives each numbered checkpoint its ONNX beside it, and the run its list of both in
            `run_logs/training_status.json`: `pipeline.stages.export.publish`, or None.
        device: `cpu`, `cuda`, `cuda:0`, ...; None for cuda where there is one.
        torch_threads: threads of torch while training; small networks are slower with more, and
            another number gives other roundings.
        sinks: where summaries go.
        resume_interval_s: seconds between refreshes of the checkpoint that a kill resumes from.
        on_start: called once, when the environments have connected and every behavior that they
            show can be trained; nothing but logs is written before.
        starting_lesson: lesson, counted from 0, where every curriculum begins; one with fewer
            lessons begins with its last.
        learners: processes that learn together, each with `num_envs` environments of its own; the
            others are started here, unless `torchrun` has started as many as this one already.

    Returns:
        Steps, rewards and checkpoints of each behavior, and where the time went.

    Raises:
        SettingsError: A setting cannot be used, or another run writes into `run_dir`.
        UnityException: The environment failed; what was learned so far is saved.
        Interrupted: SIGINT or SIGTERM came; the state is saved.
    """
    rank, n_processes = launched()
    if rank > 0:
        with closing(Tracker(sinks)):
            return take_part(None if isinstance(env, str | Path) else env)
    if n_processes > 1 and learners not in (1, n_processes):
        raise SettingsError(
            f"{learners} learners are asked for, but {n_processes} processes have been started; "
            "ask for the same number, or leave it out"
        )
    learners = max(learners, n_processes)
    run_dir = Path(run_dir)
    with closing(Tracker(sinks)) as tracker, _threads(torch_threads), ExitStack() as stack:
        if not inference:
            stack.enter_context(files.sole_writer(run_dir))
            files.remove_temporary(run_dir)
        run = _settings(settings).with_seed(seed)
        refuse_untrainable(run)
        run = unthreaded(run) if learners > 1 else run
        if init_from is None:
            init_from = first_weights(run)
        chosen = usable_device(device)
        work = Work(
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
        ranks: Ranks = ALONE
        if learners > 1:
            refuse_alone(work, learners, inference=inference, started=n_processes > 1)
            chosen = of_this_process(chosen)
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
            ranks = stack.enter_context(several)
            told(ranks, work.plain())
        return _learned(
            work,
            ranks,
            chosen,
            tracker,
            inference=inference,
            exporter=exporter,
            resume_interval_s=resume_interval_s,
            on_start=on_start,
        )


def take_part(
    env: BaseEnv | Sequence[BaseEnv] | None = None,
) -> TrainResult:
    """Be one of the processes beyond the first of a run with several learners.

    What is to be done is what the first process says; nothing is written but logs.

    Args:
        env: environments in this process; None for the executable that the first process names.

    Raises:
        PipelineError: This process, or another one, has failed.
        Interrupted: All were asked to stop.
    """
    with joined() as ranks:
        heed_input(ranks)
        work = Work.of(told(ranks, None), env)
        with closing(Tracker(())) as tracker, _threads(work.torch_threads):
            return _learned(work, ranks, ranks.device, tracker)


def _learned(
    work: Work, ranks: Ranks, device: torch.device, tracker: Tracker, **own: Any
) -> TrainResult:
    """What training comes to, seen from one of its processes."""
    workers = open_workers(
        work.env,
        work.settings,
        seed=seeding.derive(work.seed, "environment"),
        num_envs=work.num_envs,
        env_args=work.env_args,
        base_port=work.base_port,
        log_folder=work.log_folder,
        rank=ranks.rank,
        n_ranks=ranks.size,
    )
    with workers, _old_objects_left_alone(), stop_on_signal() as stop:
        loop = TrainingLoop(
            workers,
            work.settings,
            seed=work.seed,
            run_dir=work.run_dir,
            device=device,
            tracker=tracker,
            init_from=work.init_from,
            whole_weights=work.whole_weights,
            resume=work.resume,
            starting_lesson=work.starting_lesson,
            ranks=ranks,
            **own,
        )
        return loop.run(stop)


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep what exists already out of garbage collections, which would walk all of torch."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _settings(settings: RunSettings | Mapping[str, object] | Path | str) -> RunSettings:
    if isinstance(settings, RunSettings):
        return settings
    if isinstance(settings, str | Path):
        return load_run_settings(Path(settings))
    return load_run_settings(None, overrides=settings)
