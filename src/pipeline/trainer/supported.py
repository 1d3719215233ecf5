"""What can be trained: looked at before an environment is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.algos.poca import POCA
from pipeline.algos.ppo import PPO
from pipeline.algos.reward_signals import find_demonstrations, supported_signals
from pipeline.algos.sac import SAC
from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.algos.algorithm import Algorithm
    from pipeline.settings.schema import RunSettings, TrainerSettings

ALGORITHMS: Mapping[str, type[Algorithm]] = {"ppo": PPO, "sac": SAC, "poca": POCA}


def algorithm_for(name: str, settings: TrainerSettings) -> type[Algorithm]:
    """The algorithm that trains a behavior with these settings.

    Raises:
        SettingsError: The settings ask for something that cannot be trained.
    """
    algorithm = ALGORITHMS.get(str(settings.trainer_type))
    if algorithm is None:
        raise SettingsError(
            f"behaviors.{name}.trainer_type: '{settings.trainer_type}' cannot be trained yet; "
            f"use one of: {', '.join(ALGORITHMS)}"
        )
    try:
        supported_signals(settings)
        if settings.behavioral_cloning is not None:
            find_demonstrations("behavioral_cloning", settings.behavioral_cloning.demo_path)
    except SettingsError as error:
        raise SettingsError(f"behaviors.{name}.{error}") from error
    return algorithm


def refuse_untrainable(run: RunSettings) -> None:
    """Refuse a configuration of which nothing can be trained, whatever the environment has.

    One behavior that can be trained is enough: the environment may have that one only.

    Raises:
        SettingsError: No behavior of the configuration can be trained.
    """
    candidates = dict(run.behaviors)
    if run.default_settings is not None:
        candidates["(default_settings)"] = run.default_settings
    reasons = []
    for name, settings in candidates.items():
        try:
            algorithm_for(name, settings)
        except SettingsError as error:
            reasons.append(error)
    if reasons and len(reasons) == len(candidates):
        raise reasons[0]


def usable_device(name: str | None) -> torch.device:
    """The device of this name; for None cuda where there is one, else the CPU.

    Raises:
        SettingsError: There is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"torch_settings.device: {name!r} cannot be used here ({reason}); use cpu"
        ) from error
    return device
