"""From what a user calls an environment to a set of workers, told its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.envs.attach import attach_workers
from pipeline.envs.in_process import refuse_other_object
from pipeline.envs.launch import find_executable
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    StatsSideChannel,
)
from pipeline.envs.sources.programs import runs_headless
from pipeline.envs.state import StateChannel
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.protocol.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Sampler
from pipeline.settings.schema.parameters import (
    ConstantSampler,
    GaussianSampler,
    MultiRangeUniformSampler,
    UniformSampler,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.envs.side_channels import SideChannel
    from pipeline.settings.schema import RunSettings, SamplerSettings


def open_workers(
    environment: object,
    settings: RunSettings,
    *,
    seed: int,
    num_envs: int,
    env_args: Sequence[str] = (),
    base_port: int | None = None,
    log_folder: Path | None = None,
    listen: tuple[str, bytes] | None = None,
    rank: int = 0,
    n_ranks: int = 1,
) -> WorkerSet:
    """The workers of a run, connected; processes are told the engine's settings.

    A process that fails is started again alone, as often as `env_settings` allows; a player that
    was not started here is waited for instead.

    Environment parameters are sent with each reset: see `trainer.curriculum`.

    Args:
        environment: an executable, None for players that are started elsewhere, such as the Unity
            Editor, or objects with the low-level API.
        settings: of the run.
        seed: of worker 0; worker k gets `seed` + k, in whichever process.
        num_envs: processes to start, or to wait for.
        env_args: additional arguments of the executable.
        base_port: TCP port of worker 0; None lets the system choose, or is that of the Editor.
        log_folder: where the executables write their logs.
        listen: address and token for players of other machines, without `environment`.
        rank: of this process among those that learn together; workers of all are numbered through.
        n_ranks: how many such processes there are.

    Raises:
        SettingsError: An object lacks a member of the low-level API.
        UnityException: An environment could not be started.
    """
    if environment is not None and not isinstance(environment, str | Path):
        envs = environment if isinstance(environment, Sequence) else [environment]
        for env in envs:
            refuse_other_object(env)
        return WorkerSet(envs)
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
            num_envs,
            seed=seed,
            base_port=base_port,
            side_channels=channels,
            timeout_wait=env.timeout_wait,
            num_areas=env.num_areas,
            restarts=env,
            listen=listen,
        )
    return launch_workers(
        environment,
        num_envs,
        seed=seed,
        base_port=base_port,
        first=rank * num_envs,
        n_all=n_ranks * num_envs,
        additional_args=env_args,
        side_channels=channels,
        log_folder=None if log_folder is None else str(log_folder.resolve()),
        no_graphics=engine.no_graphics or _headless(environment, engine.no_graphics_monitor),
        no_graphics_monitor=engine.no_graphics_monitor,
        timeout_wait=env.timeout_wait,
        num_areas=env.num_areas,
        restarts=env,
    )


def _headless(environment: str | Path, worker_0_is_shown: bool) -> bool:
    """Whether no one asked for a display and there is none, for an executable that needs one."""
    if worker_0_is_shown:
        return False
    try:
        return runs_headless(find_executable(environment))
    except UnityEnvironmentException:  # launching it says what is wrong
        return False


def send_parameters(workers: WorkerSet, parameters: Mapping[str, SamplerSettings]) -> set[str]:
    """Give parameters to every worker with its next step or reset.

    Returns:
        Names of those that a worker cannot be sent.

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
    """A number, or the sampler in the form that environments take.

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
