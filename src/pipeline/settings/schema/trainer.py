"""The settings of one behavior: everything under `behaviors.<name>` and `default_settings`."""

from dataclasses import dataclass, field, replace
from typing import Self

from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import (
    ContradictionError,
    choice,
    entries_of,
    read,
    read_dataclass,
    unknown_key,
)
from pipeline.settings.schema.demonstrations import DemoPath
from pipeline.settings.schema.hyperparameters import (
    HYPERPARAMETERS,
    Hyperparameters,
    PPOSettings,
)
from pipeline.settings.schema.kinds import Count, CountOrZero, Fraction, NonNegative
from pipeline.settings.schema.network import DEFAULT_NETWORK, NetworkSettings
from pipeline.settings.schema.reward_signals import (
    REWARD_SIGNALS,
    ExtrinsicSettings,
    RewardSignalSettings,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlaySettings:
    """`self_play`: opponents out of the agent's own past."""

    save_steps: Count = 20000
    """Trainer steps between two snapshots of the policy."""
    team_change: Count = field(default=100000, metadata={"copies": "save_steps", "times": 5})
    """Trainer steps until another team learns; 5 x save_steps when not given."""
    swap_steps: Count = 2000
    """Steps of the opponent until it gets another snapshot."""
    window: Count = 10
    """Snapshots that are kept to choose opponents from."""
    play_against_latest_model_ratio: Fraction = 0.5
    """Probability that an opponent plays the newest policy."""
    initial_elo: float = 1200.0
    """Rating at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehavioralCloningSettings:
    """`behavioral_cloning`: supervised steps on demonstrations beside reinforcement learning."""

    demo_path: DemoPath
    """Demonstration file, a folder of them, or a list of both, with weights if wished."""
    steps: CountOrZero = 0
    """Agent steps until cloning has faded out; 0 for the whole run at a constant rate."""
    strength: NonNegative = 1.0
    """Learning rate relative to the policy's."""
    samples_per_update: CountOrZero = 0
    """Demonstrated steps used per update; 0 for all of them."""
    num_epoch: Count | None = None
    """Passes per update; null for 3."""
    batch_size: Count | None = None
    """Demonstrated steps in a minibatch; null for the trainer's batch_size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How one behavior is trained, in the order of a written `configuration.yaml`."""

    trainer_type: str = "ppo"
    """`ppo`, `sac` or `poca`."""
    hyperparameters: Hyperparameters = field(default_factory=PPOSettings)
    """Numbers of the algorithm; of the class that belongs to trainer_type."""
    checkpoint_interval: Count = 500000
    """Agent steps between two checkpoints."""
    network_settings: NetworkSettings = field(default=DEFAULT_NETWORK)
    """The policy's network, and the critic's."""
    reward_signals: dict[str, RewardSignalSettings] = field(
        default_factory=lambda: {"extrinsic": ExtrinsicSettings()}
    )
    """Rewards by name; a map without `extrinsic` ignores the environment's reward."""
    init_path: str | None = None
    """Checkpoint to take weights from, or null."""
    keep_checkpoints: int = 5
    """Checkpoints that are kept, the oldest go first; 0 or less keeps all."""
    even_checkpoints: bool = False
    """Whether checkpoint_interval is max_steps / keep_checkpoints, whatever was given."""
    max_steps: Count = 500000
    """Agent steps of the whole run, over all environments."""
    time_horizon: Count = 64
    """Steps of one agent after which a trajectory is closed and bootstrapped."""
    summary_freq: Count = 50000
    """Agent steps between two summaries."""
    threaded: bool = False
    """Whether environments step while the networks learn."""
    self_play: SelfPlaySettings | None = None
    """Opponents out of the agent's own past, or null."""
    behavioral_cloning: BehavioralCloningSettings | None = None
    """Supervised steps on demonstrations, or null."""

    def __post_init__(self) -> None:
        """Refuse what does not fit together, and apply even_checkpoints."""
        expected = HYPERPARAMETERS.get(self.trainer_type)
        if expected is None or type(self.hyperparameters) is not expected:
            raise ContradictionError(
                "hyperparameters",
                f"{type(self.hyperparameters).__name__} does not belong to the trainer type "
                f"{self.trainer_type!r}",
            )
        memory = self.network_settings.memory
        if memory is not None and memory.sequence_length > self.hyperparameters.batch_size:
            raise ContradictionError(
                "network_settings.memory.sequence_length",
                f"must be less than or equal to batch_size when using memory, got "
                f"{memory.sequence_length} with batch_size {self.hyperparameters.batch_size}",
            )
        if self.even_checkpoints:
            if not 0 < self.keep_checkpoints <= self.max_steps:
                raise ContradictionError(
                    "keep_checkpoints",
                    "with even_checkpoints it must be between 1 and max_steps, got "
                    f"{self.keep_checkpoints}",
                )
            object.__setattr__(self, "checkpoint_interval", self.max_steps // self.keep_checkpoints)

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read the settings of a behavior, with `hyperparameters` as its trainer type has them.

        Raises:
            SettingsError: Something is not as it must be.
        """
        entries = entries_of(node, path)
        name = "ppo"
        if "trainer_type" in entries:
            name = choice(entries["trainer_type"], join(path, "trainer_type"), HYPERPARAMETERS)
        elif "hyperparameters" in entries:
            raise fail(
                entries["hyperparameters"],
                join(path, "hyperparameters"),
                "Hyperparameters were specified but no trainer_type was given. "
                f"Add one of: {', '.join(HYPERPARAMETERS)}",
            )
        if "hyperparameters" not in entries:  # the trainer's own defaults, not PPO's
            entries = {**entries, "hyperparameters": Node({}, node.source, node.line)}
        hints = {"hyperparameters": HYPERPARAMETERS[name], "reward_signals": _RewardSignals}
        settings: Self = read_dataclass(cls, replace(node, value=entries), path, hints=hints)
        return settings


class _RewardSignals:
    """Reads `reward_signals`, where the name decides which settings there are."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> dict[str, RewardSignalSettings]:
        entries = entries_of(node, path)
        if not entries:
            raise fail(node, path, "needs at least one reward signal, or leave the key out")
        for name in entries:
            if name not in REWARD_SIGNALS:
                raise unknown_key(entries[name], path, name, REWARD_SIGNALS)
        return {
            name: read(REWARD_SIGNALS[name], item, join(path, name))
            for name, item in entries.items()
        }
