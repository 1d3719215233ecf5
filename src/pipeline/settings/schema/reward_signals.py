"""`reward_signals`: what a behavior is rewarded for."""

from dataclasses import dataclass, field

from pipeline.settings.schema.demonstrations import DemoPath
from pipeline.settings.schema.kinds import Fraction, Positive
from pipeline.settings.schema.network import DEFAULT_NETWORK, NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSignalSettings:
    """What every reward signal has."""

    gamma: Fraction = 0.99
    """Discount of this reward per step."""
    strength: float = 1.0
    """Factor to the reward."""
    network_settings: NetworkSettings = field(default=DEFAULT_NETWORK)
    """The signal's own network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrinsicSettings(RewardSignalSettings):
    """`extrinsic`: the environment's reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CuriositySettings(RewardSignalSettings):
    """`curiosity`: reward for what the forward model did not foresee."""

    learning_rate: Positive = 3e-4
    """Step size of the signal's own Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GAILSettings(RewardSignalSettings):
    """`gail`: reward for looking like the demonstrations."""

    learning_rate: Positive = 3e-4
    """Step size of the discriminator's Adam."""
    use_actions: bool = False
    """Whether the discriminator sees actions beside observations."""
    use_vail: bool = False
    """Whether a variational bottleneck limits the discriminator."""
    demo_path: DemoPath
    """Demonstration file, a folder of them, or a list of both, with weights if wished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RNDSettings(RewardSignalSettings):
    """`rnd`: reward for what a random network's imitator does not know yet."""

    learning_rate: Positive = 1e-4
    """Step size of the signal's own Adam."""


REWARD_SIGNALS: dict[str, type[RewardSignalSettings]] = {
    "extrinsic": ExtrinsicSettings,
    "curiosity": CuriositySettings,
    "gail": GAILSettings,
    "rnd": RNDSettings,
}
"""The settings that each reward signal takes."""
