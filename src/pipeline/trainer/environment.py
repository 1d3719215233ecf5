"""From what a user calls an environment to a set of workers, told its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.envs.base import BaseEnv
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.launch import find_executable
from pipeline.envs.programs import runs_headless
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    StatsSideChannel,
)
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.settings.schema.parameters import (
    ConstantSampler,
    GaussianSampler,
    MultiRangeUniformSampler,
    UniformSampler,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.settings.schema import RunSettings
    from pipeline.settings.schema.parameters import Sampler

_log = logging.getLogger(__name__)


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
        SettingsError: An environment parameter cannot be given to the environment.
        UnityException: An environment could not be started.
    """
    if environment is not None and not isinstance(environment, str | Path):
        environments = [environment] if isinstance(environment, BaseEnv) else environment
        for one in environments:
            _set_constants(one, parameters_of(settings))
        return WorkerSet(environments)
    engine = settings.engine_settings
    channels = []
    for _ in range(num_envs):
        parameters = EnvironmentParametersChannel()
        for name, value in parameters_of(settings).items():
            send_parameter(parameters, name, value)
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
        no_graphics=engine.no_graphics or _headless(environment, engine.no_graphics_monitor),
        no_graphics_monitor=engine.no_graphics_monitor,
        timeout_wait=settings.env_settings.timeout_wait,
        num_areas=settings.env_settings.num_areas,
    )


def _headless(environment: str | Path | None, worker_0_is_shown: bool) -> bool:
    """Whether no one asked for a display and there is none, for an executable that needs one."""
    if environment is None or worker_0_is_shown:
        return False
    try:
        return runs_headless(find_executable(environment))
    except UnityEnvironmentException:  # launching it says what is wrong
        return False


def parameters_of(settings: RunSettings) -> dict[str, Sampler]:
    """The environment parameters of a run by name.

    Raises:
        SettingsError: One has several lessons.
    """
    parameters = settings.environment_parameters or {}
    for name, parameter in parameters.items():
        if len(parameter.curriculum) > 1:
            raise SettingsError(
                f"environment_parameters.{name}.curriculum: a curriculum of several lessons cannot "
                "be trained yet; keep one lesson, or give a plain value"
            )
    return {name: parameter.curriculum[0].value for name, parameter in parameters.items()}


def _set_constants(environment: BaseEnv, parameters: Mapping[str, Sampler]) -> None:
    """Set the parameters of an environment that has no channel of ours."""
    for name, value in parameters.items():
        if not isinstance(environment, InProcessEnvironment):
            _log.warning(
                "environment_parameters.%s is not sent to an environment that was opened before "
                "training; send it through its own side channel.",
                name,
            )
        elif isinstance(value, ConstantSampler):
            environment.set_parameter(name, value.value)
        else:
            raise SettingsError(
                f"environment_parameters.{name}: an environment in this process takes constants, "
                f"not the sampler '{value.sampler_type}'; train in an executable, or draw it there"
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
