"""Checks of settings and devices before an environment is started."""

import torch

from pipeline import machine, plugins
from pipeline.algos.algorithm import Algorithm
from pipeline.algos.reward_signals import find_demonstrations, supported_signals
from pipeline.errors import SettingsError
from pipeline.settings.trainer.schema import ENCODERS, RunSettings, TrainerSettings


def algorithm_for(name: str, settings: TrainerSettings) -> type[Algorithm]:
    """Return a behavior's algorithm; SettingsError if a setting is not supported."""
    try:
        # The order decides which error a user sees first: trainer, reward signals, encoders,
        # demonstrations.
        algorithm = algorithm_of(settings)
        supported_signals(settings)
        for network in settings.networks:
            ENCODERS.load(network.encoder or network.vis_encode_type, package="pipeline.nets.")
        if settings.behavioral_cloning is not None:
            find_demonstrations("behavioral_cloning", settings.behavioral_cloning.demo_path)
    except SettingsError as error:
        raise SettingsError(f"behaviors.{name}.{error}") from error
    return algorithm


def algorithm_of(settings: TrainerSettings) -> type[Algorithm]:
    """Return the algorithm's imported class; SettingsError if it is none of `Algorithm`."""
    path = settings.hyperparameters.made_by
    try:
        algorithm = plugins.class_for(settings.trainer_type, path)
    except SettingsError as error:
        raise SettingsError(f"trainer_type: '{settings.trainer_type}' {error}") from error
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise SettingsError(
            f"trainer_type: '{settings.trainer_type}' names {algorithm!r}, which is not a subclass "
            "of Algorithm"
        )
    return algorithm


def refuse_untrainable(run: RunSettings) -> None:
    """Raise SettingsError if no behavior can be trained, or a portable run has `compile`.

    One valid behavior is enough, because the environment may have only that behavior.
    """
    if run.torch_settings.compile and machine.is_portable():
        raise SettingsError(
            "torch_settings.compile: true cannot be combined with a portable run: compiled code "
            "is specific to this CPU; turn one of them off"
        )
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
    """Return the device of this name, or raise SettingsError; None means cuda, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Only an allocation shows whether the device exists: torch.device accepts any known name.
        torch.zeros(1, device=device)
    # torch raises RuntimeError for an unknown device, AssertionError for a missing one (cuda),
    # NotImplementedError for one not built in (mps, xla), ImportError for a missing package (hpu).
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        here = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
        here += ["mps"] if torch.backends.mps.is_available() else []
        names = f"use {', '.join(['cpu', *here])}, which this machine has"
        # A message with these words lists every device for which torch can be built, so a short
        # list of names replaces the message.
        if "Expected one of" in reason:
            reason = "the names are cpu, cuda, cuda:N and mps"
        raise SettingsError(
            f"torch_settings.device: {name!r} cannot be used here ({reason}); {names}"
        ) from error
    return device
