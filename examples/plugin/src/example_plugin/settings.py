"""What a trainer file may say about `dqn` and `novelty`; nothing here imports torch."""

from dataclasses import dataclass

from pipeline.settings.reader import ContradictionError, Count, CountOrZero, Fraction, Positive
from pipeline.settings.trainer.schema import HyperparameterSettings, RewardSignalSettings, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class DQNSettings(HyperparameterSettings):
    """Hyperparameters of `dqn`, named as in ML-Agents' own example of a plug-in."""

    made_by = "example_plugin.dqn:DQN"

    batch_size: Count = 128
    """Experiences in a minibatch."""
    buffer_size: Count = 50000
    """Experiences that the replay holds."""
    learning_rate_schedule: Schedule = "constant"
    """How the learning rate falls until max_steps."""
    buffer_init_steps: CountOrZero = 1000
    """Agent steps before the first update."""
    steps_per_update: Positive = 1.0
    """Agent steps for each gradient step."""
    tau: Fraction = 0.005
    """Share of the network that moves into the target at each gradient step."""
    exploration_schedule: Schedule = "linear"
    """How the share of random actions falls."""
    exploration_initial_eps: Fraction = 1.0
    """Share of random actions at the start."""
    exploration_final_eps: Fraction = 0.05
    """Share of random actions at the end, not above that at the start."""
    exploration_steps: CountOrZero = 0
    """Agent steps over which it falls; 0 for max_steps."""
    save_replay_buffer: bool = False
    """Whether the replay is kept with the checkpoint."""

    def __post_init__(self) -> None:
        """Refuse to explore more in the end than at the start."""
        if self.exploration_final_eps > self.exploration_initial_eps:
            raise ContradictionError(
                "exploration_final_eps",
                f"must be at most exploration_initial_eps ({self.exploration_initial_eps}), "
                f"got {self.exploration_final_eps}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoveltySettings(RewardSignalSettings):
    """`novelty`: reward for observations that have been seen seldom."""

    made_by = "example_plugin.novelty:Novelty"

    bits: Count = 12
    """Random projections; observations with the same signs of all of them count as the same."""

    @property
    def why_alone(self) -> str:
        """Why only one learner can have it."""
        return "its counts are of one process; leave it out"
