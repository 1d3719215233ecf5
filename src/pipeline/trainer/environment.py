"""The job of a run, and the workers with its environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import seeding
from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup
from pipeline.envs import side_channels
from pipeline.envs.attach import attach_workers
from pipeline.envs.in_process import SimulatorSource, refuse_other_object
from pipeline.envs.launch import find_executable
from pipeline.envs.sources.executables import runs_headless
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.settings.trainer import schema
from pipeline.wire.channels.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Sampler


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A run, as each of its processes needs it; `pipeline.train` describes the other fields."""

    env: object
    """Path of an executable; None for players that are started elsewhere, such as the Unity Editor;
    or one or several objects with the members of ML-Agents' `BaseEnv`."""
    settings: schema.RunSettings
    _: KW_ONLY
    seed: int
    run_dir: Path
    num_envs: int = 1
    env_args: Sequence[str] = ()
    base_port: int | None = None
    """TCP port of the first process. None means a port that the system chooses, or the Editor's
    port, 5004, for players that are started elsewhere."""
    log_folder: Path | None = None
    """Folder of the executables' logs."""
    init_from: Mapping[str, Path] = field(default_factory=dict)
    """Checkpoint with the initial weights of each behavior; without any, the checkpoints that the
    settings name (`initialize_from`, `init_path`)."""
    whole_weights: bool = False
    """Whether a tensor of `init_from` that does not fit is an error, instead of a warning."""
    resume: bool = False
    torch_threads: int | None = 1
    starting_lesson: int = 0
    """Lesson, counted from 0, in which every curriculum begins; a curriculum with fewer lessons
    begins with its last lesson."""

    def for_others(self) -> JobSpec:
        """Return the job with absolute paths, and without objects in `env`, for other processes."""
        env = self.env
        return replace(
            self,
            run_dir=self.run_dir.resolve(),
            # Objects cannot be sent to another process; `run_as_learner` gets its own objects.
            env=str(Path(env).resolve()) if isinstance(env, str | Path) else None,
            log_folder=None if self.log_folder is None else self.log_folder.resolve(),
            init_from={name: path.resolve() for name, path in self.init_from.items()},
        )


def open_workers(job: JobSpec, group: ProcessGroup = SINGLE_PROCESS) -> WorkerSet:
    """Return the connected workers of a run; executables get the engine settings.

    An executable that fails is started again, as often as `env_settings` allows; for a player that
    was started elsewhere, the run waits until it connects again. The seed of each worker derives
    from its number, which counts the workers of all processes of `group`. SettingsError if a
    Python object lacks a member of the low-level API.
    """
    environment, settings = job.env, job.settings
    engine, env = settings.engine_settings, settings.env_settings
    seed = seeding.derive(job.seed, "environment")
    if isinstance(environment, SimulatorSource):
        start = environment.start
        restart = lambda _, number: start(seed + number)  # noqa: E731
        return WorkerSet([start(seed)], relaunch=restart, restarts=env)
    if environment is not None and not isinstance(environment, str | Path):
        envs = environment if isinstance(environment, Sequence) else [environment]
        for one in envs:
            refuse_other_object(one)
        return WorkerSet(envs)

    # This function is called once for each worker, because workers cannot share channels.
    def channels() -> list[side_channels.SideChannel]:
        configuration = side_channels.EngineConfigurationChannel()
        configuration.set_configuration_parameters(
            width=engine.width,
            height=engine.height,
            quality_level=engine.quality_level,
            time_scale=engine.time_scale,
            target_frame_rate=engine.target_frame_rate,
            capture_frame_rate=engine.capture_frame_rate,
        )
        stats, state = side_channels.StatsSideChannel(), side_channels.StateChannel()
        return [side_channels.EnvironmentParametersChannel(), configuration, stats, state]

    options: dict[str, Any] = {
        "seed": seed,
        "base_port": job.base_port,
        "side_channels": channels,
        "timeout_wait": env.timeout_wait,
        "num_areas": env.num_areas,
        "restarts": env,
    }
    if environment is None:
        return attach_workers(job.num_envs, **options)
    return launch_workers(
        environment,
        job.num_envs,
        # `first` is the number of this process's first worker, counted over the workers of all
        # processes; `n_all` is the number of all workers.
        first=group.rank * job.num_envs,
        n_all=group.size * job.num_envs,
        additional_args=job.env_args,
        log_folder=None if job.log_folder is None else str(job.log_folder.resolve()),
        no_graphics=engine.no_graphics or _headless(environment, engine.no_graphics_monitor),
        no_graphics_monitor=engine.no_graphics_monitor,
        **options,
    )


def _headless(environment: str | Path, worker_0_is_shown: bool) -> bool:
    """Return whether the executable needs `no_graphics` because this machine has no display."""
    if worker_0_is_shown:
        return False
    try:
        return runs_headless(find_executable(environment))
    except UnityEnvironmentException:  # the launch will report the error
        return False


def send_parameters(
    workers: WorkerSet, parameters: Mapping[str, schema.SamplerSettings]
) -> set[str]:
    """Send parameters to all workers with their next step or reset; return the names not sent."""
    unsent = set()
    for name, value in parameters.items():
        try:
            if not workers.set_parameter(name, for_environment(value)):
                unsent.add(name)
        # The side channel encodes names as ASCII, as in ML-Agents.
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"environment_parameters.{name}: the name has characters other than ASCII, which "
                "cannot be sent; rename the parameter here and in the environment"
            ) from error
    return unsent


def for_environment(value: schema.SamplerSettings) -> float | Sampler:
    """Return a constant value as a number, or a sampler in the form of the side channel."""
    match value:
        case schema.ConstantSampler():
            return value.value
        case schema.UniformSampler():
            ends = (value.min_value, value.max_value)
            return Sampler(kind=UNIFORM, values=ends, seed=value.seed)
        case schema.GaussianSampler():
            shape = (value.mean, value.st_dev)
            return Sampler(kind=GAUSSIAN, values=shape, seed=value.seed)
        case schema.MultiRangeUniformSampler():
            # The message has the bounds of all intervals in one list.
            flat = tuple(end for interval in value.intervals for end in interval)
            return Sampler(kind=MULTI_RANGE, values=flat, seed=value.seed)
    raise ValueError(f"the side channel cannot send the sampler {value}")
