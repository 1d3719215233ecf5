"""From what a user calls an environment to a set of workers, told its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.envs.base import BaseEnv
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    StatsSideChannel,
)
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.settings.schema.parameters import (
    ConstantSampler,
    GaussianSampler,
    MultiRangeUniformSampler,
    UniformSampler,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.settings.schema import RunSettings
    from pipeline.settings.schema.parameters import Sampler


def open_workers(
    environment: str | Path | BaseEnv | Sequence[BaseEnv] | None,
    settings: RunSettings,
    *,
    seed: int,
    num_envs: int,
    env_args: Sequence[str] = (),
    base_port: int | None = None,
    log_folder: Path | None = None,
) -> WorkerSet:
    """The workers of a run, connected; processes are told engine and environment parameters.

    Args:
        environment: an executable, None for the Unity Editor, or environments in this process.
        settings: of the run.
        seed: of worker 0; worker k gets `seed` + k.
        num_envs: processes to start.
        env_args: additional arguments of the executable.
        base_port: TCP port of worker 0; None lets the system choose.
        log_folder: where the executables write their logs.

    Raises:
        UnityException: An environment could not be started.
    """
    if environment is not None and not isinstance(environment, str | Path):
        return WorkerSet([environment] if isinstance(environment, BaseEnv) else environment)
    engine = settings.engine_settings
    channels = []
    for _ in range(num_envs):
        parameters = EnvironmentParametersChannel()
        for name, parameter in (settings.environment_parameters or {}).items():
            send_parameter(parameters, name, parameter.curriculum[0].value)
        configuration = EngineConfigurationChannel()
        configuration.set_configuration_parameters(
            width=engine.width,
            height=engine.height,
            quality_level=engine.quality_level,
            time_scale=engine.time_scale,
            target_frame_rate=engine.target_frame_rate,
            capture_frame_rate=engine.capture_frame_rate,
        )
        channels.append([parameters, configuration, StatsSideChannel()])
    return launch_workers(
        environment,
        num_envs,
        seed=seed,
        base_port=base_port,
        args=env_args,
        side_channels=channels,
        log_folder=None if log_folder is None else str(log_folder.resolve()),
        no_graphics=engine.no_graphics,
        no_graphics_monitor=engine.no_graphics_monitor,
        timeout_wait=settings.env_settings.timeout_wait,
        num_areas=settings.env_settings.num_areas,
    )


def send_parameter(channel: EnvironmentParametersChannel, name: str, value: Sampler) -> None:
    """Queue one environment parameter: a constant, or how the environment shall draw it."""
    match value:
        case ConstantSampler():
            channel.set_float_parameter(name, value.value)
        case UniformSampler():
            channel.set_uniform_sampler_parameters(
                name, value.min_value, value.max_value, value.seed
            )
        case GaussianSampler():
            channel.set_gaussian_sampler_parameters(name, value.mean, value.st_dev, value.seed)
        case MultiRangeUniformSampler():
            channel.set_multirangeuniform_sampler_parameters(
                name, list(value.intervals), value.seed
            )
