"""`network_settings`: what the networks of a behavior look like."""

from dataclasses import dataclass
from typing import Annotated

from pipeline.settings.reader import Limits
from pipeline.settings.schema.kinds import Count, GoalConditioning, VisualEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """`network_settings.memory`: a recurrent layer."""

    sequence_length: Count = 64
    """Steps of a sequence that is trained on at once; at most batch_size."""
    memory_size: Annotated[int, Limits(above=0, multiple_of=2)] = 128
    """Numbers that the memory holds: half of them hidden state, half cell state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """`network_settings` of a behavior or of a reward signal."""

    normalize: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    hidden_units: Count = 128
    """Width of each hidden layer."""
    num_layers: Count = 2
    """Hidden layers after the observations are encoded."""
    vis_encode_type: VisualEncoder = "simple"
    """Which network reads pictures."""
    memory: MemorySettings | None = None
    """A recurrent layer, or null for none."""
    goal_conditioning_type: GoalConditioning = "hyper"
    """How goal observations act on the policy."""
    deterministic: bool = False
    """Whether the mean (or the likeliest) action is taken, also while training."""


DEFAULT_NETWORK = NetworkSettings()
