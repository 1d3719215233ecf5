"""A whole configuration file: behaviors, and how environments and the run are set up."""

import logging
from dataclasses import dataclass, field, replace
from typing import Annotated

from pipeline.errors import SettingsError
from pipeline.settings.nodes import join
from pipeline.settings.reader import (
    Bounds,
    Count,
    CountOrUnlimited,
    CountOrZero,
    NonNegative,
    nearest,
)
from pipeline.settings.schema.parameters import EnvironmentParameter, seeded
from pipeline.settings.schema.reward_signals import ENCODERS, REWARD_SIGNALS
from pipeline.settings.schema.trainer import HYPERPARAMETERS, TrainerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """`env_settings`: which environment, and how many."""

    env_path: str | None = None
    """The environment executable; null waits for players that are started elsewhere, such as the
    Unity Editor, from port 5004 on."""
    env_args: tuple[str, ...] | None = None
    """Arguments for the executable."""
    # 5004 is the Unity Editor's.
    base_port: Annotated[int, Bounds(at_least=1, at_most=65535)] = 5005
    """Port of the first environment; the others follow."""
    num_envs: Count = 1
    """Environments that run side by side."""
    num_areas: Count = 1
    """Training areas inside of each environment."""
    timeout_wait: Count = 60
    """Seconds to wait for an environment's answer."""
    seed: CountOrUnlimited = -1
    """Seed of everything random; -1 to have one drawn."""
    max_lifetime_restarts: CountOrUnlimited = 10
    """Restarts of an environment in all; -1 for any number."""
    restarts_rate_limit_n: CountOrUnlimited = 1
    """Restarts of an environment in restarts_rate_limit_period_s; -1 for any number."""
    restarts_rate_limit_period_s: Count = 60
    """Seconds over which restarts_rate_limit_n counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """`engine_settings`: the configuration of the game engine."""

    width: Count = 84
    """Pixels of the window."""
    height: Count = 84
    """Pixels of the window."""
    quality_level: CountOrZero = 5
    """Rendering quality."""
    time_scale: NonNegative = 20.0
    """How many times faster than real time the simulation may run."""
    target_frame_rate: CountOrUnlimited = -1
    """Frames per second; -1 for as many as possible."""
    capture_frame_rate: CountOrZero = 60
    """Frames per second of simulated time."""
    no_graphics: bool = False
    """Whether environments run without rendering."""
    no_graphics_monitor: bool = False
    """Whether only the first environment renders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """`checkpoint_settings`: the run's folder, and what it starts from."""

    run_id: str = "ppo"
    """Name of the run, and of its folder in results_dir."""
    initialize_from: str | None = None
    """Run whose weights are taken, or null."""
    load_model: bool = False
    """Deprecated: implies resume."""
    resume: bool = False
    """Whether the run of this id is continued."""
    force: bool = False
    """Whether an earlier run of this id may be overwritten."""
    train_model: bool = False
    """Deprecated: without effect."""
    inference: bool = False
    """Whether the policy only acts, and does not learn."""
    results_dir: str = "results"
    """Folder of all runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchSettings:
    """`torch_settings`: where networks are computed."""

    device: str | None = None
    """`cpu`, `cuda`, `cuda:0`, ...; null for the device on which an act and a minibatch of the
    run's own shapes take least time, measured at the start of a behavior and kept when the run is
    resumed; with several learners cuda where there is one."""
    compile: bool = False
    """Whether gradient steps are compiled, where a compiler is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """All settings of a configuration file, in the order in which it is written."""

    default_settings: TrainerSettings | None = None
    """What every behavior starts from, also one that is not listed; or null."""
    behaviors: dict[str, TrainerSettings] = field(default_factory=dict)
    """Settings by behavior name, without `?team=`."""
    env_settings: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """Which environment, and how many."""
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    """Configuration of the game engine."""
    environment_parameters: dict[str, EnvironmentParameter] | None = None
    """What the environment is sent, by name; or null."""
    checkpoint_settings: CheckpointSettings = field(default_factory=CheckpointSettings)
    """The run's folder, and what it starts from."""
    torch_settings: TorchSettings = field(default_factory=TorchSettings)
    """Where networks are computed."""
    debug: bool = False
    """Whether logs are detailed."""
    from_file: bool = field(default=False, compare=False, repr=False, metadata={"internal": True})
    """Whether a file was given, so that a behavior which it does not list is a mistake."""
    refused: dict[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )
    """Behaviors that an old file lists, but which cannot be trained any more, and why."""
    places: dict[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )
    """Where each path to a file, and each behavior, is written: `file:line` by dotted key."""

    def place_of(self, key: str) -> str | None:
        """Return where the path under a dotted key is written; a behavior may inherit it."""
        section, _, rest = key.partition(".")
        inherited = rest.partition(".")[2] if section == "behaviors" else ""
        return self.places.get(key, self.places.get(f"default_settings.{inherited}"))

    def for_behavior(self, name: str) -> TrainerSettings:
        """Return the settings of a behavior, whose name may have `?team=`.

        Raises:
            SettingsError: The file neither lists the behavior nor has default_settings, or it names
                a trainer for it that is no more.
        """
        # Teams of a behavior share its settings.
        plain = name.split("?", maxsplit=1)[0]
        if plain in self.behaviors:
            return self.behaviors[plain]
        # Before the defaults: the file names the behavior, with a trainer that is gone.
        if plain in self.refused:
            raise SettingsError(self.refused[plain])
        if self.default_settings is not None:
            return self.default_settings
        if self.from_file:
            near = nearest(plain, self.behaviors)
            place = self.places.get(join("behaviors", near)) if near is not None else None
            file = "" if place is None else f" ({place.rpartition(':')[0]})"
            remedy = (
                f"Add an entry for {plain} there, or set default_settings."
                if near is None
                else f"The environment gives this name: rename {near!r} there to {plain!r}."
            )
            raise SettingsError(
                f"The behavior name {plain} has not been specified in the trainer configuration"
                f"{file}. {remedy}"
            )
        _log.warning(
            "Behavior name %s does not match any behaviors specified in the trainer configuration "
            "file. A default configuration will be used.",
            plain,
        )
        return TrainerSettings()

    def plugins(self) -> dict[str, str]:
        """Return the version of each package that brings an algorithm, signal or encoder to it."""
        chosen = [*self.behaviors.values()]
        if self.default_settings is not None:
            chosen.append(self.default_settings)
        versions: dict[str, str] = {}
        for trainer in chosen:
            networks = [trainer.network_settings]
            networks += [signal.network_settings for signal in trainer.reward_signals.values()]
            versions |= HYPERPARAMETERS.versions(trainer.trainer_type)
            versions |= REWARD_SIGNALS.versions(*trainer.reward_signals)
            versions |= ENCODERS.versions(*(network.vis_encode_type for network in networks))
        # Sorted, since the result goes into fingerprints.
        return dict(sorted(versions.items()))

    def with_seed(self, seed: int) -> "RunSettings":
        """Return the same run with a decided seed, from 0, and with a seed for every sampler."""
        parameters = self.environment_parameters
        return replace(
            self,
            env_settings=replace(self.env_settings, seed=seed),
            environment_parameters=None if parameters is None else seeded(parameters, seed),
        )
