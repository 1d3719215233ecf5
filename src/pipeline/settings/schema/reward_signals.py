"""Reward signals, and what they share with the policy: networks and demonstrations."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pipeline.plugins import Group
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import (
    Bounds,
    Count,
    Fraction,
    Positive,
    display,
    read,
    read_dataclass,
)

ENCODERS: Group[Any] = Group(
    "pipeline.encoders",
    {
        "simple": ".vision:SimpleEncoder",
        "nature_cnn": ".vision:NatureEncoder",
        "resnet": ".vision:ResnetEncoder",
        "match3": ".vision:Match3Encoder",
        "fully_connected": ".vision:FlatEncoder",
    },
)
"""Which network reads pictures: classes of `pipeline.nets`, which nothing here imports."""
VisualEncoder = Annotated[str, ENCODERS]
"""A name in `ENCODERS`."""
GoalConditioning = Literal["hyper", "none"]
"""Whether goal observations drive a hypernetwork, or are read like the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """`network_settings.memory`: a recurrent layer."""

    sequence_length: Count = 64
    """Steps of a sequence that is trained on at once; at most batch_size."""
    memory_size: Annotated[int, Bounds(above=0, multiple_of=2)] = 128
    """Numbers that the memory holds: half of them hidden state, half cell state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """`network_settings` of a behavior or of a reward signal."""

    normalize: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    hidden_units: Count = 128
    """Width of each hidden layer; a multiple of 4 with `poca`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSource:
    """One file of demonstrations, or one folder of them."""

    path: str
    """A file, or a folder, of which all `.demo` files are read."""
    weight: Positive = 1.0
    """How often each of its steps is drawn, against a step of weight 1."""

    def to_plain(self) -> str | dict[str, Any]:
        """What `DemoPath.from_node` reads."""
        return self.path if self.weight == 1 else {"path": self.path, "weight": self.weight}


@dataclass(frozen=True, slots=True)
class DemoPath:
    """A path, as in ML-Agents, or a list of paths and of maps with `path` and `weight`."""

    sources: tuple[DemoSource, ...]
    """At least one."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read either form."""
        if not isinstance(node.value, list):
            return cls((_source(node, path),))
        if not node.value:
            raise fail(node, path, "needs at least one demonstration, got an empty list")
        return cls(tuple(_source(item, join(path, i)) for i, item in enumerate(node.value)))

    def to_plain(self) -> Any:
        """Return the shortest form that `from_node` reads as the same."""
        # A single path stays a text, the one form that ML-Agents reads.
        plain = [source.to_plain() for source in self.sources]
        return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of every source."""
        return tuple(source.path for source in self.sources)


def _source(node: Node, path: str) -> DemoSource:
    if isinstance(node.value, dict):
        source: DemoSource = read_dataclass(DemoSource, node, path)
        return source
    # A number may be a file's name; a list or a truth value is a mistake about the form.
    if not isinstance(node.value, str | int | float) or isinstance(node.value, bool):
        expected = "a path, or a list of paths and of maps with 'path' and 'weight'"
        raise fail(node, path, f"needs {expected}, got {display(node)}")
    return DemoSource(path=read(str, node, path))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSignalSettings:
    """Settings of every reward signal; a plug-in's extend this class."""

    # A text and no class: settings must not import torch.
    made_by: ClassVar[str] = ""
    """`module:class` of the `RewardSignal` with these settings, imported only to train.

    A module of ours begins with a dot and lies in `pipeline.algos`.
    """

    gamma: Fraction = 0.99
    """Discount of this reward per step."""
    strength: float = 1.0
    """Factor to the reward."""
    network_settings: NetworkSettings = field(default=DEFAULT_NETWORK)
    """The signal's own network."""

    @property
    def why_alone(self) -> str:
        """Why only one learner can have the signal, with what to change; empty if several can.

        Several learners average the gradients of its `optimizer` and the statistics of its
        normalisers. Anything else that it learns, such as counts, would differ between learners.
        """
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrinsicSettings(RewardSignalSettings):
    """`extrinsic`: the environment's reward."""

    # `network_settings` is inherited and not used, as in ML-Agents, whose files have it.
    made_by = ".reward_signals:Extrinsic"


@dataclass(frozen=True, kw_only=True, slots=True)
class CuriositySettings(RewardSignalSettings):
    """`curiosity`: reward for what the forward model did not foresee."""

    made_by = ".curiosity:Curiosity"

    learning_rate: Positive = 3e-4
    """Step size of the signal's own Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GAILSettings(RewardSignalSettings):
    """`gail`: reward for looking like the demonstrations."""

    made_by = ".gail:GAIL"

    learning_rate: Positive = 3e-4
    """Step size of the discriminator's Adam."""
    use_actions: bool = False
    """Whether the discriminator sees actions beside observations."""
    use_vail: bool = False
    """Whether a variational bottleneck limits the discriminator."""
    demo_path: DemoPath
    """Demonstration file, a folder of them, or a list of both, with weights if wished."""

    @property
    def why_alone(self) -> str:
        """As in every reward signal's settings."""
        text = "the bottleneck of use_vail is adjusted in one process; set it to false"
        return text if self.use_vail else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RNDSettings(RewardSignalSettings):
    """`rnd`: reward for what a random network's imitator does not know yet."""

    made_by = ".rnd:RND"

    # Less than the other signals have, as in ML-Agents.
    learning_rate: Positive = 1e-4
    """Step size of the signal's own Adam."""


REWARD_SIGNALS: Group[type[RewardSignalSettings]] = Group(
    "pipeline.reward_signals",
    {
        "extrinsic": ".reward_signals:ExtrinsicSettings",
        "curiosity": ".reward_signals:CuriositySettings",
        "gail": ".reward_signals:GAILSettings",
        "rnd": ".reward_signals:RNDSettings",
    },
    room="pipeline.settings.schema.",
    base=RewardSignalSettings,
)
"""The settings that each reward signal takes."""
