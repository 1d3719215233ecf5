"""The job of a run, and its environments as a set of workers that have their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import seeding
from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup
from pipeline.envs.attach import attach_workers
from pipeline.envs.in_process import refuse_other_object
from pipeline.envs.launch import find_executable
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    SideChannel,
    StateChannel,
    StatsSideChannel,
)
from pipeline.envs.sources.executables import runs_headless
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.protocol.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Sampler
from pipeline.settings.schema import (
    ConstantSampler,
    GaussianSampler,
    MultiRangeUniformSampler,
    RunSettings,
    SamplerSettings,
    UniformSampler,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What every process of a run has to know; see `trainer.api.train`."""

    settings: RunSettings
    seed: int
    run_dir: Path
    env: object = None
    num_envs: int = 1
    env_args: Sequence[str] = ()
    base_port: int | None = None
    log_folder: Path | None = None
    """For runs of one learner only."""
    init_from: Mapping[str, Path] = field(default_factory=dict)
    whole_weights: bool = False
    resume: bool = False
    torch_threads: int = 1
    starting_lesson: int = 0

    def for_others(self) -> JobSpec:
        """Return the job for processes in other folders, without objects in `env`."""
        env = self.env
        return replace(
            self,
            run_dir=self.run_dir.resolve(),
            env=str(Path(env).resolve()) if isinstance(env, str | Path) else None,
            log_folder=None if self.log_folder is None else self.log_folder.resolve(),
            init_from={name: path.resolve() for name, path in self.init_from.items()},
        )


def open_workers(job: JobSpec, group: ProcessGroup = SINGLE_PROCESS) -> WorkerSet:
    """Return the connected workers of a run; processes get the engine's settings.

    A process that fails is started again alone, as often as `env_settings` allows; a player that
    was not started here is waited for instead. The workers of all processes of `group` are numbered
    through, and each gets a seed of its own.

    Environment parameters are sent with each reset: see `trainer.curriculum`.

    Raises:
        SettingsError: An object lacks a member of the low-level API.
        UnityException: An environment could not be started.
    """
    environment, settings = job.env, job.settings
    if environment is not None and not isinstance(environment, str | Path):
        envs = environment if isinstance(environment, Sequence) else [environment]
        for env in envs:
            refuse_other_object(env)
        return WorkerSet(envs)
    seed = seeding.derive(job.seed, "environment")
    engine, env = settings.engine_settings, settings.env_settings

    # A function, as every worker needs channels of its own.
    def channels() -> list[SideChannel]:
        configuration = EngineConfigurationChannel()
        configuration.set_configuration_parameters(
            width=engine.width,
            height=engine.height,
            quality_level=engine.quality_level,
            time_scale=engine.time_scale,
            target_frame_rate=engine.target_frame_rate,
            capture_frame_rate=engine.capture_frame_rate,
        )
        stats = StatsSideChannel()
        return [EnvironmentParametersChannel(), configuration, stats, StateChannel()]

    if environment is None:
        return attach_workers(
            job.num_envs,
            seed=seed,
            base_port=job.base_port,
            side_channels=channels,
            timeout_wait=env.timeout_wait,
            num_areas=env.num_areas,
            restarts=env,
        )
    return launch_workers(
        environment,
        job.num_envs,
        seed=seed,
        base_port=job.base_port,
        first=group.rank * job.num_envs,
        n_all=group.size * job.num_envs,
        additional_args=job.env_args,
        side_channels=channels,
        log_folder=None if job.log_folder is None else str(job.log_folder.resolve()),
        no_graphics=engine.no_graphics or _headless(environment, engine.no_graphics_monitor),
        no_graphics_monitor=engine.no_graphics_monitor,
        timeout_wait=env.timeout_wait,
        num_areas=env.num_areas,
        restarts=env,
    )


def _headless(environment: str | Path, worker_0_is_shown: bool) -> bool:
    """Return whether no display was asked for, and the executable needs one that is missing."""
    if worker_0_is_shown:
        return False
    try:
        return runs_headless(find_executable(environment))
    except UnityEnvironmentException:  # launching it says what is wrong
        return False


def send_parameters(workers: WorkerSet, parameters: Mapping[str, SamplerSettings]) -> set[str]:
    """Give parameters to every worker with its next step or reset.

    Returns:
        Names of the parameters that cannot be sent to a worker.

    Raises:
        SettingsError: A name cannot be sent to any environment.
    """
    unsent = set()
    for name, value in parameters.items():
        try:
            if not workers.set_parameter(name, for_environment(value)):
                unsent.add(name)
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"environment_parameters.{name}: the name has characters other than ASCII, which "
                "cannot be sent to an environment; rename it here and there"
            ) from error
    return unsent


def for_environment(value: SamplerSettings) -> float | Sampler:
    """Return a number, or the sampler in the form that environments take.

    Raises:
        ValueError: There is no such form.
    """
    match value:
        case ConstantSampler():
            return value.value
        case UniformSampler():
            ends = (value.min_value, value.max_value)
            return Sampler(kind=UNIFORM, values=ends, seed=value.seed)
        case GaussianSampler():
            shape = (value.mean, value.st_dev)
            return Sampler(kind=GAUSSIAN, values=shape, seed=value.seed)
        case MultiRangeUniformSampler():
            # On the wire all intervals are one list of pairs.
            flat = tuple(end for interval in value.intervals for end in interval)
            return Sampler(kind=MULTI_RANGE, values=flat, seed=value.seed)
    raise ValueError(f"environments know no sampler like {value}")
