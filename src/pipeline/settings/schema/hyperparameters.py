"""`hyperparameters` of each trainer type."""

from dataclasses import dataclass, field

from pipeline.settings.schema.kinds import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Schedule,
)

_LIKE_LEARNING_RATE = {"copies": "learning_rate_schedule"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterSettings:
    """What every trainer has."""

    batch_size: Count = 1024
    """Experiences in a minibatch."""
    buffer_size: Count = 10240
    """Experiences to collect before an update; for SAC, those that the replay buffer holds."""
    learning_rate: Positive = 3e-4
    """Initial step size of Adam."""
    learning_rate_schedule: Schedule = "linear"
    """How the learning rate falls until max_steps."""
    max_grad_norm: Positive | None = field(default=None, metadata={"addition": True})
    """Largest norm of a gradient, longer ones are shortened; null (as ML-Agents) for no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicySettings(HyperparameterSettings):
    """What PPO and POCA share."""

    beta: NonNegative = 5e-3
    """Weight of the entropy bonus."""
    epsilon: Positive = 0.2
    """How far the probability ratio may leave 1 before it is clipped."""
    lambd: Fraction = 0.95
    """Lambda of generalised advantage estimation (GAE), or of the lambda-returns."""
    num_epoch: Count = 3
    """Passes over the buffer in an update."""
    beta_schedule: Schedule = field(default="linear", metadata=_LIKE_LEARNING_RATE)
    """How beta falls; like learning_rate_schedule when only that is given."""
    epsilon_schedule: Schedule = field(default="linear", metadata=_LIKE_LEARNING_RATE)
    """How epsilon falls; like learning_rate_schedule when only that is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSettings(OnPolicySettings):
    """Hyperparameters of `ppo`."""

    shared_critic: bool = False
    """Whether policy and value function share the network's body."""
    clip_value: bool = field(default=False, metadata={"addition": True})
    """Whether a value may move by epsilon standard deviations of the returns in one update only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class POCASettings(OnPolicySettings):
    """Hyperparameters of `poca`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SACSettings(HyperparameterSettings):
    """Hyperparameters of `sac`."""

    batch_size: Count = 128
    """Experiences in a minibatch."""
    buffer_size: Count = 50000
    """Experiences that the replay buffer holds."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate falls until max_steps."""
    buffer_init_steps: CountOrZero = 0
    """Experiences to collect before the first update."""
    init_entcoef: Positive = 1.0
    """Entropy coefficient at the start."""
    save_replay_buffer: bool = False
    """Whether the replay buffer is kept with the checkpoint."""
    tau: Fraction = 0.005
    """Share of the critic that moves into the target network at each update."""
    steps_per_update: Positive = 1.0
    """Agent steps for each update of the policy."""
    reward_signal_steps_per_update: Positive = field(
        default=1.0, metadata={"copies": "steps_per_update"}
    )
    """Agent steps for each update of the reward signals; steps_per_update when not given."""


Hyperparameters = PPOSettings | SACSettings | POCASettings

HYPERPARAMETERS: dict[str, type[Hyperparameters]] = {
    "ppo": PPOSettings,
    "sac": SACSettings,
    "poca": POCASettings,
}
"""The hyperparameters that each `trainer_type` takes."""
