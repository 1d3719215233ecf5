"""The settings of the present configuration format, as frozen dataclasses.

Networks, demonstrations and reward signals come first, then the hyperparameters and the settings of
a behavior, then the parameters that environments get, and last the sections of the whole file.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pipeline.errors import Mistakes, SettingsError
from pipeline.plugins import Group
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.pace import AUTO
from pipeline.settings.reader import (
    Bounds,
    ContradictionError,
    Count,
    CountOrUnlimited,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    PositiveOrAuto,
    choice,
    display,
    each,
    entries_of,
    fields_to_map,
    keys_below,
    nearest,
    part,
    read,
    read_dataclass,
    setting_hints,
    to_map,
    unknown_key,
)

_log = logging.getLogger(__name__)

# The names are ML-Agents' `vis_encode_type`; a leading dot stands for `pipeline.nets`.
ENCODERS: Group[Any] = Group(
    "pipeline.encoders",
    {
        "simple": ".vision:SimpleEncoder",
        "nature_cnn": ".vision:NatureEncoder",
        "resnet": ".vision:ResnetEncoder",
        "match3": ".vision:Match3Encoder",
        "fully_connected": ".vision:FlatEncoder",
    },
    takes_files=True,
)
"""Encoders of images: classes of `pipeline.nets`, which this module must not import."""
VisualEncoder = Annotated[str, ENCODERS]
"""A name in `ENCODERS`."""
OWN_ENCODERS: Group[Any] = Group("pipeline.encoders", {}, takes_files=True)
EncoderClass = Annotated[str, OWN_ENCODERS]
"""`module:Class` in a file of the user, or the name of an encoder of an installed package."""
Activation = Literal["swish", "relu", "tanh", "elu", "gelu", "leaky_relu"]
"""Activation function of dense layers; `gelu` is its tanh form (arXiv 1606.08415)."""
# ML-Agents refuses unknown keys, so an addition to the format is written only if it is used.
_ADDITION = {"addition": True}
GoalConditioning = Literal["hyper", "none"]
"""Whether goal observations condition a hypernetwork, or are ordinary inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """`network_settings.memory`: a recurrent layer."""

    sequence_length: Count = 64
    """Length of training sequences in steps; at most batch_size. Typical: 16 to 128."""
    # The size is even, because an LSTM has two states of equal size, hidden and cell.
    memory_size: Annotated[int, Bounds(above=0, multiple_of=2)] = 128
    """Size of the memory: half of it is hidden state, half cell state. Typical: 64 to 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """`network_settings` of a behavior or of a reward signal."""

    normalize: bool = False
    """Whether vector observations are normalised by their running mean and variance."""
    hidden_units: Count | tuple[Count, ...] = 128
    """Width of each hidden layer, or a list with the width of each; a multiple of 4 with `poca`.
    Typical: 32 to 512."""
    num_layers: Count = 2
    """Number of hidden layers after the encoders of observations; not used with a list of widths.
    Typical: 1 to 3."""
    activation: Activation = field(default="swish", metadata=_ADDITION)
    """Activation function of the hidden layers; not for `xqc`."""
    layer_norm: bool = field(default=False, metadata=_ADDITION)
    """Whether each hidden layer is normalised before its activation (arXiv 1607.06450); not for
    `xqc`, and not if a hypernetwork generates weights from goal observations
    (`goal_conditioning_type: hyper`)."""
    vis_encode_type: VisualEncoder = "simple"
    """The encoder of images; `module:Class` for an encoder of your own."""
    encoder: EncoderClass | None = field(default=None, metadata=_ADDITION)
    """Your own encoder of each vector and of each image, `module:Class`. Null: images use
    `vis_encode_type`, and vectors are not encoded."""
    memory: MemorySettings | None = None
    """A recurrent layer, or null for none."""
    goal_conditioning_type: GoalConditioning = "hyper"
    """How goal observations affect the policy: by a hypernetwork (`hyper`), or as ordinary inputs
    (`none`)."""
    deterministic: bool = False
    """Whether to use the mean (or most probable) action, also in training."""

    def __post_init__(self) -> None:
        if self.hidden_units == ():
            raise ContradictionError("hidden_units", "needs at least one width, got an empty list")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        if isinstance(self.hidden_units, tuple):
            return self.hidden_units
        return (self.hidden_units,) * self.num_layers

    @property
    def encoded_size(self) -> int:
        """Size of an encoded image: it equals the width of the first hidden layer."""
        units = self.hidden_units
        return units[0] if isinstance(units, tuple) else units

    def without_layers(self) -> Self:
        """Return the settings of a network that only encodes observations."""
        return replace(self, hidden_units=self.encoded_size, num_layers=0)


# One shared instance is safe, because the class is frozen.
DEFAULT_NETWORK = NetworkSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSource:
    """One file of demonstrations, or one folder of such files."""

    path: str
    """A file, or a folder with `.demo` files."""
    weight: Positive = 1.0
    """Relative probability with which the source's steps are drawn, compared to a source of weight
    1."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a path, or a map with `path` and `weight`."""
        if isinstance(node.value, dict):
            source: Self = read_dataclass(cls, node, path)
            return source
        # A number may be a file's name; lists and truth values are mistakes.
        if not isinstance(node.value, str | int | float) or isinstance(node.value, bool):
            expected = "a path, or a list of paths and of maps with 'path' and 'weight'"
            raise fail(node, path, f"needs {expected}, got {display(node)}")
        return cls(path=read(str, node, path))

    def to_plain(self) -> str | dict[str, Any]:
        """Return the plain value that `from_node` reads as this source."""
        return self.path if self.weight == 1 else {"path": self.path, "weight": self.weight}


@dataclass(frozen=True, slots=True)
class DemoPath:
    """The value of `demo_path`: a path, or a list of paths and of maps with a `weight`."""

    sources: tuple[DemoSource, ...]
    """The files and folders; at least one."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a path, or a list of paths and of maps with `path` and `weight`."""
        if not isinstance(node.value, list):
            return cls((DemoSource.from_node(node, path),))
        if not node.value:
            raise fail(node, path, "needs at least one demonstration, got an empty list")
        return cls(read(tuple[DemoSource, ...], node, path))

    def to_plain(self) -> Any:
        """Return the shortest plain value that `from_node` reads as an equal DemoPath."""
        # A single path stays a text, because ML-Agents reads no other form.
        plain = [source.to_plain() for source in self.sources]
        return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each file or folder."""
        return tuple(source.path for source in self.sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSignalSettings:
    """Settings that every reward signal has; base class of a plug-in's settings."""

    # The class is named by a text, because settings must not import torch.
    made_by: ClassVar[str] = ""
    """`module:class` of the `RewardSignal` that has these settings; imported only for training.

    A name with a leading dot is relative to `pipeline.algos`.
    """
    own_class: str = field(default="", metadata={"internal": True})
    """`module:Class` in a file of the user, the value of the key `class`; empty without it."""

    # Each signal has its own discount and value head, as in ML-Agents.
    gamma: Fraction = 0.99
    """Discount factor of this reward for each step. Typical: 0.9 to 0.999."""
    strength: float = 1.0
    """Factor of the reward. Typical: 1 for extrinsic, 0.001 to 0.1 for the other signals."""
    network_settings: NetworkSettings = field(default=DEFAULT_NETWORK)
    """Settings of the network of the signal itself."""

    def to_plain(self) -> dict[str, Any]:
        """Return the map that is read as the same settings."""
        return ({"class": self.own_class} if self.own_class else {}) | fields_to_map(self)

    @property
    def why_alone(self) -> str:
        """Why the signal needs a single learner, and what to change; empty if it allows several.

        Several learners average the gradients of the signal's `optimizer` and the statistics of its
        normalisers. Anything else that a signal learns, such as counts, would differ between
        learners.
        """
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrinsicSettings(RewardSignalSettings):
    """`extrinsic`: settings of the environment's own reward."""

    # `network_settings` is inherited and not used, because files of ML-Agents have this key.
    made_by = ".reward_signals:Extrinsic"


@dataclass(frozen=True, kw_only=True, slots=True)
class CuriositySettings(RewardSignalSettings):
    """`curiosity`: reward for transitions that the forward model does not predict."""

    made_by = ".curiosity:Curiosity"

    learning_rate: Positive = 3e-4
    """Step size of the signal's own Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GAILSettings(RewardSignalSettings):
    """`gail`: reward for similarity to the demonstrations."""

    made_by = ".gail:GAIL"

    learning_rate: Positive = 3e-4
    """Step size of the discriminator's Adam."""
    use_actions: bool = False
    """Whether the discriminator gets actions in addition to observations."""
    use_vail: bool = False
    """Whether a variational bottleneck limits the discriminator."""
    demo_path: DemoPath
    """File of demonstrations, folder of such files, or a list of files and folders, optionally with
    weights."""

    @property
    def why_alone(self) -> str:
        """Why the signal needs a single learner, and what to change; empty if it allows several."""
        # The bottleneck's multiplier follows this process's own KL, and is not averaged.
        text = "the bottleneck of use_vail is adjusted in one process; set it to false"
        return text if self.use_vail else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RNDSettings(RewardSignalSettings):
    """`rnd`: reward for observations for which a random network's output is predicted badly."""

    made_by = ".rnd:RND"

    # As in ML-Agents, this default is lower than that of the other signals.
    learning_rate: Positive = 1e-4
    """Step size of the signal's own Adam."""


REWARD_SIGNALS: Group[type[RewardSignalSettings]] = Group(
    "pipeline.reward_signals",
    {
        "extrinsic": f"{__name__}:ExtrinsicSettings",
        "curiosity": f"{__name__}:CuriositySettings",
        "gail": f"{__name__}:GAILSettings",
        "rnd": f"{__name__}:RNDSettings",
    },
    base=RewardSignalSettings,
    takes_files=True,
)
"""The settings class of each reward signal."""


Schedule = Literal["linear", "constant"]
"""Schedule of a value: linear to (nearly) zero at max_steps, or constant."""

# This is ML-Agents' default, and equals that of max_steps: such a run has one checkpoint.
_DEFAULT_INTERVAL = 500000

# Settings must not import torch, so a test compares this number with the number in the network.
ATTENTION_HEADS = 4
"""Number of attention heads of POCA's critic: `nets.attention.N_HEADS`."""

# As in ML-Agents, a constant schedule of the learning rate applies to beta and epsilon.
_LIKE_LEARNING_RATE = {"copies": "learning_rate_schedule"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterSettings:
    """Hyperparameters that every trainer has; base class of a plug-in's hyperparameters."""

    made_by: ClassVar[str] = ""
    """`module:class` of the `Algorithm` that has these hyperparameters; imported only for training.

    A name with a leading dot is relative to `pipeline.algos`.
    """

    # These defaults are ML-Agents', so that ML-Agents' files keep their meaning.
    batch_size: Count = 1024
    """Number of experiences in a minibatch. Typical: 64 to 5120, more with continuous actions."""
    buffer_size: Count = 10240
    """Number of experiences to collect before an update. Typical: 1000 to 400000, many times
    batch_size."""
    learning_rate: Positive = 3e-4
    """Initial step size of Adam. Typical: 0.00001 to 0.001."""
    learning_rate_schedule: Schedule = "linear"
    """Schedule of the learning rate until max_steps."""
    max_grad_norm: Positive | None = field(default=None, metadata=_ADDITION)
    """Largest norm of a gradient; larger gradients are scaled to this norm; null for no limit."""

    @property
    def minibatches_per_step(self) -> float:
        """Number of gradient steps for each agent step."""
        # Each experience is used once, in one of the minibatches.
        return 1.0 / self.batch_size

    @property
    def why_alone(self) -> str:
        """Why only one learner can be used, and what to change; empty if several can be used."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicySettings(HyperparameterSettings):
    """Hyperparameters of PPO and POCA."""

    beta: NonNegative = 5e-3
    """Weight of the entropy bonus. Typical: 0 to 0.01."""
    epsilon: Positive = 0.2
    """Clipping range of the probability ratio around 1. Typical: 0.1 to 0.3."""
    # This is ML-Agents' spelling, because `lambda` is a keyword of Python.
    lambd: Fraction = 0.95
    """Lambda of generalised advantage estimation (GAE), or of the lambda-returns. Typical:
    0.9 to 0.99."""
    num_epoch: Count = 3
    """Epochs: passes over the buffer in an update. Typical: 3 to 10."""
    # The schedules of beta and epsilon end above zero, see `algos.schedules`.
    beta_schedule: Schedule = field(default="linear", metadata=_LIKE_LEARNING_RATE)
    """Schedule of beta; default: learning_rate_schedule if that is given."""
    epsilon_schedule: Schedule = field(default="linear", metadata=_LIKE_LEARNING_RATE)
    """Schedule of epsilon; default: learning_rate_schedule if that is given."""
    recompute_advantages: bool = field(default=False, metadata=_ADDITION)
    """Whether returns and advantages are computed again before each further pass over the buffer
    (Andrychowicz et al. 2020, arXiv 2006.05990)."""
    return_normalization: bool = field(default=False, metadata=_ADDITION)
    """Whether the critic learns returns divided by their running spread; advantages keep the unit
    of the reward. One learner only."""
    # The learning rate is adapted as in RSL-RL; None keeps ML-Agents' schedule.
    desired_kl: Positive | None = field(default=None, metadata=_ADDITION)
    """Target of the KL divergence between the policies before and after an update (RSL-RL uses
    0.01). The learning rate is adapted to reach this target, within 1e-5..1e-2;
    learning_rate_schedule must be constant. Null for the learning rate of
    learning_rate_schedule."""

    @property
    def minibatches_per_step(self) -> float:
        """Number of gradient steps for each agent step."""
        # Each experience is used num_epoch times.
        return self.num_epoch / self.batch_size

    @property
    def why_alone(self) -> str:
        """Why only one learner can be used, and what to change; empty if several can be used."""
        text = "return_normalization measures the returns of one process only; set it to false"
        return text if self.return_normalization else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSettings(OnPolicySettings):
    """Hyperparameters of `ppo`."""

    made_by = ".ppo:PPO"

    shared_critic: bool = False
    """Whether policy and value function share layers."""
    # The limit is in standard deviations, because the scale of returns differs between tasks.
    clip_value: bool = field(default=False, metadata=_ADDITION)
    """Whether the value loss clips the changes of values in an update to epsilon standard
    deviations of the returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class POCASettings(OnPolicySettings):
    """Hyperparameters of `poca`."""

    made_by = ".poca:POCA"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicySettings(HyperparameterSettings):
    """Hyperparameters of SAC and XQC."""

    batch_size: Count = 128
    """Number of experiences in a minibatch. Typical: 64 to 1024."""
    # A replay buffer keeps experiences for many updates, so it is larger than the buffer of PPO.
    buffer_size: Count = 50000
    """Capacity of the replay buffer in experiences. Typical: 20000 to 1000000."""
    learning_rate_schedule: Schedule = "constant"
    """Schedule of the learning rate until max_steps."""
    buffer_init_steps: CountOrZero = 0
    """Number of experiences to collect before the first update. Typical: 0 to 10000."""
    init_entcoef: Positive = 1.0
    """Entropy coefficient at the start. Typical: 0.01 to 1."""
    save_replay_buffer: bool = False
    """Whether checkpoints include the replay buffer."""
    tau: Fraction = 0.005
    """Rate at which the target network follows the critic, per update. Typical: 0.005 to 0.05."""
    steps_per_update: PositiveOrAuto = 1.0
    """Agent steps for each update of the policy; `auto`: a number from 0.25 to 64, chosen before
    the first update so that updates fill the time in which the environment works. `auto` needs a
    single learner, and is refused in `params.yaml`."""
    reward_signal_steps_per_update: PositiveOrAuto = field(
        default=1.0, metadata={"copies": "steps_per_update"}
    )
    """Agent steps for each update of the reward signals, or `auto`; default: the value of
    steps_per_update."""
    # With memory, a row of the replay buffer is a whole sequence, and the rewards after the
    # sequence, which an n-step return would need, are not in the row.
    n_steps: Count = field(default=1, metadata=_ADDITION)
    """Number of steps of an n-step return: how many rewards are added up before the value of a
    state is used (Sutton 1988); must be 1 with memory."""
    decoupled_entropy: bool = field(default=False, metadata=_ADDITION)
    """Whether the critics' targets leave out the entropy of discrete actions, which the losses of
    the policy and of the entropy coefficient keep (arXiv 2509.09838)."""
    target_sigma: Positive | None = field(default=None, metadata=_ADDITION)
    """Target entropy of each continuous action component, given as the standard deviation of a
    Gaussian before tanh (FlashSAC 2026); null for an entropy of -1, which is the entropy for the
    standard deviation 0.0892."""
    # Noise that lasts several decisions explores farther than noise that cancels itself out.
    held_noise: Count = field(default=1, metadata=_ADDITION)
    """Maximum number of successive decisions for which an agent keeps its exploration noise; the
    number n is drawn with a probability proportional to 1 / n^2 (FlashSAC 2026 uses 16). 1 for new
    noise in each decision. For continuous actions only; must be 1 with memory."""
    reward_normalization: bool = field(default=False, metadata=_ADDITION)
    """Whether rewards are divided by the running spread of the agents' returns, so that returns are
    within -5..5; `critic: xqc` needs this, unless all returns are within -5..5 without it. One
    learner only."""

    @property
    def minibatches_per_step(self) -> float:
        """Number of gradient steps for each agent step; 1 until a number has replaced `auto`."""
        steps = self.steps_per_update
        # `steps_per_update` is the word `auto` until the run has measured its times.
        return 1.0 if isinstance(steps, str) else 1.0 / steps

    @property
    def why_alone(self) -> str:
        """Why only one learner can be used, and what to change; empty if several can be used."""
        if self.steps_per_update == AUTO:
            text = "steps_per_update: auto is measured in one process"
            return f"{text}; give a number, or one learner"
        text = "reward_normalization measures the returns of one process only; set it to false"
        return text if self.reward_normalization else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SACSettings(OffPolicySettings):
    """Hyperparameters of `sac`."""

    made_by = ".sac:SAC"


@dataclass(frozen=True, kw_only=True, slots=True)
class XQCSettings(OffPolicySettings):
    """Hyperparameters of `xqc`; ML-Agents lacks this trainer."""

    made_by = ".xqc:XQC"

    batch_size: Count = 256
    """Number of experiences in a minibatch."""
    buffer_size: Count = 1000000
    """Capacity of the replay buffer in experiences."""
    learning_rate_schedule: Schedule = "linear"
    """Schedule of the learning rate: linear to a tenth at max_steps, or constant."""
    buffer_init_steps: CountOrZero = 5000
    """Number of experiences to collect by random actions before the first update."""
    init_entcoef: Positive = 0.01
    """Entropy coefficient at the start."""
    # CrossQ (arXiv 1902.05605) has batch normalisation in place of the target network.
    critic: Literal["xqc", "crossq"] = "xqc"
    """How action values are learned: `xqc` (distributions, weights of norm 1, a target network;
    arXiv 2509.25174), or `crossq` (squared errors, no target network; arXiv 1902.05605)."""
    policy_delay: Count = 3
    """Number of updates of the critics for each update of the policy and of the entropy
    coefficient."""
    # These two keys have only other defaults than in the base class.
    decoupled_entropy: bool = field(default=True, metadata=_ADDITION)
    target_sigma: Positive | None = field(default=0.15, metadata=_ADDITION)
    reward_normalization: bool = field(default=True, metadata=_ADDITION)
    """Whether rewards are divided by the running spread of the agents' returns, so that returns are
    within -5..5; `critic: xqc` needs this, unless all returns are within -5..5 without it."""

    @property
    def why_alone(self) -> str:
        """Why only one learner can be used, and what to change."""
        # Batch normalisation uses the rows of one process, so learners would differ.
        return "xqc normalises by minibatches of one process; use one learner"


HYPERPARAMETERS: Group[type[HyperparameterSettings]] = Group(
    "pipeline.algorithms",
    {name: f"{__name__}:{name.upper()}Settings" for name in ("ppo", "sac", "poca", "xqc")},
    base=HyperparameterSettings,
    mlagents_group="mlagents.trainer_type",
    takes_files=True,
)
"""The class of hyperparameters for each `trainer_type`."""


_STEPS_PER_UPDATE = (
    "hyperparameters.steps_per_update",
    " (agent steps for each gradient step: train_freq x n_envs / gradient_steps)",
)
# For SAC `_without_foreign` changes PPO's `beta` to `init_entcoef`.
WORDS = {
    "n_steps": ("hyperparameters.buffer_size", " (n_steps x n_envs)"),
    "ent_coef": ("hyperparameters.beta", ""),
    "entropy_coef": ("hyperparameters.beta", ""),
    "clip_range": ("hyperparameters.epsilon", ""),
    "gae_lambda": ("hyperparameters.lambd", ""),
    "n_epochs": ("hyperparameters.num_epoch", ""),
    "learning_starts": ("hyperparameters.buffer_init_steps", ""),
    "gradient_steps": _STEPS_PER_UPDATE,
    "train_freq": _STEPS_PER_UPDATE,
    "gamma": ("reward_signals.extrinsic.gamma", ""),
    "n_layers": ("network_settings.num_layers", ""),
    "total_timesteps": ("max_steps", ""),
    "algo": ("trainer_type", ""),
}
"""For each term of another library, such as Stable-Baselines3: the dotted key of a behavior's
setting with the same meaning, and a remark."""


def places_in_behavior() -> dict[str, str]:
    """Return the dotted key of each of a behavior's settings, by the last part of the key."""
    hints = setting_hints(TrainerSettings)
    places = {name: name for name in hints}
    # The section `hyperparameters` is added by hand, because its type depends on trainer_type.
    sections = [("hyperparameters", HYPERPARAMETERS[name]) for name in HYPERPARAMETERS.ours]
    for section, hint in (*sections, *hints.items()):
        for name in keys_below(hint):
            # The first section wins, which is `hyperparameters`: most misplaced keys belong there.
            places.setdefault(name, f"{section}.{name}")
    return places


def _without_foreign(
    entries: Mapping[str, Node], path: str, trainer_type: str, mistakes: Mistakes
) -> dict[str, Node]:
    """Refuse hyperparameters of other built-in trainers, and other libraries' names of settings."""
    remaining = dict(entries)
    ours = {name: setting_hints(HYPERPARAMETERS[name]) for name in HYPERPARAMETERS.ours}
    # Keys that this trainer has are checked later, together with their types.
    known = {*setting_hints(TrainerSettings), *setting_hints(HYPERPARAMETERS[trainer_type])}
    for key, item in entries.items():
        if key in known:
            continue
        place, remark = WORDS.get(key, (key, ""))
        if trainer_type == "sac":
            # Stable-Baselines3's `ent_coef` is PPO's weight or SAC's coefficient.
            place = place.replace(".beta", ".init_entcoef")
        meant = place.rpartition(".")[2]
        owners = [] if meant in known else [name for name, keys in ours.items() if meant in keys]
        others = f"a setting of {' and '.join(owners)}, not of {trainer_type}; leave it out"
        if key in WORDS:
            # These two words belong to no particular library.
            library = "" if key in ("entropy_coef", "n_layers") else " of Stable-Baselines3"
            text = f"{key}{library} is {place} here{f', {others}' if owners else remark}"
            text = f"unknown key {key!r} (value {display(item)}); {text}"
            mistakes.found.append(fail(remaining.pop(key), path, text))
        elif owners:
            mistakes.found.append(fail(remaining.pop(key), join(path, key), f"is {others}"))
    return remaining


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlaySettings:
    """`self_play`: past policies of the agent as opponents."""

    save_steps: Count = 20000
    """Trainer steps between two snapshots of the policy. Typical: 10000 to 100000."""
    team_change: Count = field(default=100000, metadata={"copies": "save_steps", "times": 5})
    """Trainer steps after which another team learns; default: 5 x save_steps. Typical: 50000 to
    500000."""
    # The default is that of ML-Agents' code; its manual says 10000.
    swap_steps: Count = 2000
    """Number of the opponents' decisions after which opponents are drawn again. Typical: 2000 to
    100000."""
    # Opponents are not only the newest snapshot, so that the policy does not forget old opponents.
    window: Count = 10
    """Number of snapshots kept as opponents. Typical: 5 to 50."""
    play_against_latest_model_ratio: Fraction = 0.5
    """Probability that an opponent plays the newest policy. Typical: 0.2 to 0.8."""
    # ML-Agents starts with this rating; only differences of ratings have a meaning.
    initial_elo: float = 1200.0
    """Initial ELO rating of the policy and its opponents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehavioralCloningSettings:
    """`behavioral_cloning`: supervised learning from demonstrations in addition to RL."""

    demo_path: DemoPath
    """File of demonstrations, folder of such files, or a list of files and folders, optionally with
    weights."""
    steps: CountOrZero = 0
    """Agent steps over which the learning rate decreases to 0; 0 for a constant learning rate in
    the whole run."""
    # Cloning has its own Adam, so `strength` scales a learning rate and not a loss.
    strength: NonNegative = 1.0
    """Learning rate of cloning, as a multiple of the policy's learning rate. Typical: 0.1 to 1."""
    samples_per_update: CountOrZero = 0
    """Number of demonstrated steps used per update; 0 for all demonstrated steps."""
    # For null ML-Agents' code takes 3; its manual says the trainer's num_epoch.
    num_epoch: Count | None = None
    """Number of passes over the demonstrations per update; null for 3."""
    batch_size: Count | None = None
    """Number of demonstrated steps in a minibatch; null for the trainer's batch_size."""


_EFFECT_ABOVE_MAX_STEPS = {
    "summary_freq": "no summary and no learning curve is written",
    "checkpoint_interval": "the run saves a checkpoint only at its end",
    "self_play.save_steps": "opponents play only the initial policy or the newest policy",
    "self_play.team_change": "the learning team does not change",
    "behavioral_cloning.steps": "cloning does not fade out before the end",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How one behavior is trained; the keys are in the order of `configuration.yaml`."""

    trainer_type: str = "ppo"
    """`ppo`, `sac`, `poca`, `xqc`, a trainer of an installed package, or `module:Class` of your
    own; required with hyperparameters."""
    hyperparameters: HyperparameterSettings = field(default_factory=PPOSettings)
    """Hyperparameters of the algorithm that trainer_type selects."""
    checkpoint_interval: Count = _DEFAULT_INTERVAL
    """Agent steps between two checkpoints."""
    network_settings: NetworkSettings = field(default=DEFAULT_NETWORK)
    """Settings of the policy's network and of the critic's network."""
    reward_signals: dict[str, RewardSignalSettings] = field(
        default_factory=lambda: {"extrinsic": ExtrinsicSettings()}
    )
    """Reward signals by name; without `extrinsic` the environment's reward is ignored. The key
    `class: module:Class` makes a signal of your own."""
    init_path: str | None = None
    """Path of a checkpoint with the initial weights, or null."""
    # The type has no Bounds: ML-Agents takes any number, and 0 or less means all.
    keep_checkpoints: int = 5
    """Number of newest checkpoints to keep; 0 or less keeps all."""
    even_checkpoints: bool = False
    """Whether to use max_steps / keep_checkpoints as checkpoint_interval."""
    max_steps: Count = 500000
    """Agent steps of the whole run, over all environments. Typical: 100000 to 10000000."""
    time_horizon: Count = 64
    """Maximum number of steps of an agent's trajectory; a longer trajectory is cut, and its return
    is completed with the value of the last state. Typical: 32 to 2048 with ppo and poca, 1 to 64
    with sac and xqc."""
    summary_freq: Count = 50000
    """Agent steps between two summaries."""
    threaded: bool = False
    """Whether environments step while the networks learn; the actions in these steps come from the
    policy before the update. Runs with `threaded` still repeat exactly."""
    self_play: SelfPlaySettings | None = None
    """Past policies of the agent as opponents, or null."""
    behavioral_cloning: BehavioralCloningSettings | None = None
    """Supervised learning from demonstrations in addition to RL, or null."""

    def __post_init__(self) -> None:
        expected = HYPERPARAMETERS.get(self.trainer_type)
        # A plug-in's class may extend the class of another trainer.
        if type(self.hyperparameters) is not expected:
            class_name = type(self.hyperparameters).__name__
            text = f"{class_name} does not belong to the trainer type {self.trainer_type!r}"
            raise ContradictionError("hyperparameters", text)
        memory, batch_size = self.network_settings.memory, self.hyperparameters.batch_size
        # A minibatch has complete sequences, so it must not be smaller than one sequence.
        if memory is not None and memory.sequence_length > batch_size:
            allowed = "less than or equal to batch_size when using memory"
            text = f"must be {allowed}, got {memory.sequence_length} with batch_size {batch_size}"
            raise ContradictionError("network_settings.memory.sequence_length", text)
        self._refuse_contrary_options()
        hidden = self.network_settings.encoded_size
        if self.trainer_type == "poca" and hidden % ATTENTION_HEADS:
            text = f"must be a multiple of {ATTENTION_HEADS} with the trainer type 'poca', whose "
            text += f"critic has as many attention heads, got {hidden}"
            raise ContradictionError("network_settings.hidden_units", text)
        if self.even_checkpoints:
            if not 0 < self.keep_checkpoints <= self.max_steps:
                allowed = "between 1 and max_steps"
                text = f"with even_checkpoints it must be {allowed}, got {self.keep_checkpoints}"
                raise ContradictionError("keep_checkpoints", text)
            # The interval is set here, so that a written configuration has the actual interval.
            object.__setattr__(self, "checkpoint_interval", self.max_steps // self.keep_checkpoints)

    def _refuse_contrary_options(self) -> None:
        h = self.hyperparameters
        # With memory, a row of the replay buffer is a sequence without the rewards after it, which
        # n-step returns need; and the memory has no place for held noise.
        if isinstance(h, OffPolicySettings) and self.network_settings.memory is not None:
            for key in ("n_steps", "held_noise"):
                if (value := getattr(h, key)) > 1:
                    text = f"must be 1 with network_settings.memory, got {value}"
                    raise ContradictionError(f"hyperparameters.{key}", text)
        is_constant = h.learning_rate_schedule == "constant"
        if isinstance(h, OnPolicySettings) and h.desired_kl is not None and not is_constant:
            text = "adapts the learning rate to the KL; set learning_rate_schedule: constant"
            raise ContradictionError("hyperparameters.desired_kl", text)

    @property
    def networks(self) -> list[NetworkSettings]:
        """Settings of the policy's network, and then of the network of each reward signal."""
        signals = (signal.network_settings for signal in self.reward_signals.values())
        return [self.network_settings, *signals]

    def plugins(self) -> dict[str, str]:
        """Return versions of plug-in packages and digests of plug-in files that are in use."""
        signals = (signal.own_class or name for name, signal in self.reward_signals.items())
        encoders = (n.encoder or n.vis_encode_type for n in self.networks)
        return {
            **HYPERPARAMETERS.versions(self.trainer_type),
            **REWARD_SIGNALS.versions(*signals),
            **ENCODERS.versions(*encoders),
        }

    @property
    def is_undecided(self) -> bool:
        """Whether `steps_per_update` is `auto`, and a number has not replaced it yet."""
        h = self.hyperparameters
        return isinstance(h, OffPolicySettings) and h.steps_per_update == AUTO

    def with_pace(self, pace: float) -> Self:
        """Return the same settings with a number in place of `steps_per_update: auto`."""
        h = self.hyperparameters
        assert isinstance(h, OffPolicySettings)  # noqa: S101  # only these settings have `auto`
        # The reward signals' setting is `auto` too, unless the user gave a number.
        signals = h.reward_signal_steps_per_update
        signals = pace if signals == AUTO else signals
        decided = replace(h, steps_per_update=pace, reward_signal_steps_per_update=signals)
        return replace(self, hyperparameters=decided)

    def contrary_sizes(self) -> Iterator[str]:
        """Yield a warning for each setting that has no effect because of another setting."""
        yield from self._contrary_buffers()
        # A short test run may have a small max_steps on purpose, so these are no errors.
        for key, effect in _EFFECT_ABOVE_MAX_STEPS.items():
            section, _, name = key.rpartition(".")
            steps = getattr(getattr(self, section) if section else self, name, 0)
            # The default gets no warning, because it is common in files that list every key.
            is_default = (key, steps) == ("checkpoint_interval", _DEFAULT_INTERVAL)
            if steps > self.max_steps and not is_default:
                yield f"{key} {steps} is above max_steps {self.max_steps}: {effect}"
        memory = self.network_settings.memory
        if memory is not None and memory.sequence_length > self.time_horizon:
            yield (
                f"network_settings.memory.sequence_length {memory.sequence_length} is above "
                f"time_horizon {self.time_horizon}: no sequence is longer than time_horizon"
            )

    def _contrary_buffers(self) -> Iterator[str]:
        h = self.hyperparameters
        if not isinstance(h, OnPolicySettings | OffPolicySettings):
            return
        needed = {"buffer_size": h.buffer_size}
        if isinstance(h, OffPolicySettings):
            # The first update also needs a whole minibatch in the replay buffer.
            needed = {"buffer_init_steps": h.buffer_init_steps, "batch_size": h.batch_size}
        key = max(needed, key=needed.__getitem__)
        if self.max_steps < needed[key]:
            yield (
                f"max_steps {self.max_steps} ends the run before the first update, for which "
                f"hyperparameters.{key} {needed[key]} has to be reached: nothing is learned"
            )
        if h.batch_size > h.buffer_size:
            is_on_policy = isinstance(h, OnPolicySettings)
            what = "an update has only one minibatch" if is_on_policy else "nothing is learned"
            yield (
                f"hyperparameters.batch_size {h.batch_size} is above hyperparameters.buffer_size "
                f"{h.buffer_size}: {what}"
            )

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read the settings of a behavior, with the hyperparameters of its trainer type."""
        entries, mistakes = dict(entries_of(node, path)), Mistakes()
        # These two types depend on names in the file, which type hints cannot express.
        hints: dict[str, Any] = {"reward_signals": _RewardSignals}
        at, inside = join(path, "trainer_type"), join(path, "hyperparameters")
        with mistakes:
            name = _trainer_type(entries, path)
            kind = part(HYPERPARAMETERS, name, entries.get("trainer_type", node), at)
            hints["hyperparameters"] = kind
            # Without a section, the behavior gets its own trainer's defaults, and not PPO's.
            section = entries.get("hyperparameters", Node({}, node.source, node.line))
            entries = _without_foreign(entries, path, name, mistakes)
            numbers = _without_foreign(entries_of(section, inside), inside, name, mistakes)
            entries["hyperparameters"] = replace(section, value=numbers)
        if "hyperparameters" not in hints:  # the trainer is unknown; only the other keys are read
            for key in ("trainer_type", "hyperparameters"):
                entries.pop(key, None)
        settings: Self = read_dataclass(
            cls, replace(node, value=entries), path, hints=hints, mistakes=mistakes
        )
        return settings


def _trainer_type(entries: Mapping[str, Node], path: str) -> str:
    if "trainer_type" in entries:
        return choice(entries["trainer_type"], join(path, "trainer_type"), HYPERPARAMETERS)
    # This is an error in ML-Agents too, although ppo is the default.
    if "hyperparameters" in entries:
        text = "Hyperparameters were specified but no trainer_type was given."
        add = f"Add one of: {', '.join(HYPERPARAMETERS)}"
        raise fail(entries["hyperparameters"], join(path, "hyperparameters"), f"{text} {add}")
    return "ppo"


class _RewardSignals:
    """Reads `reward_signals`; the name of each signal decides the class of its settings."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> dict[str, RewardSignalSettings]:
        def signal(name: str, item: Node) -> Any:
            at = join(path, name)
            if isinstance(item.value, dict) and "class" in item.value:
                keys = dict(item.value)
                named = keys.pop("class")
                kind = choice(named, join(at, "class"), REWARD_SIGNALS)
                settings = part(REWARD_SIGNALS, kind, named, join(at, "class"))
                own = {"own_class": kind} if ":" in kind else {}
                return replace(read(settings, replace(item, value=keys), at), **own)
            if name not in REWARD_SIGNALS:
                raise unknown_key(item, path, name, REWARD_SIGNALS)
            return read(part(REWARD_SIGNALS, name, item, at), item, at)

        entries = entries_of(node, path)
        if not entries:
            raise fail(node, path, "needs at least one reward signal; add one, or remove the key")
        return each(entries, signal)


SamplerSeed = Annotated[int, Bounds(at_least=-1)]
"""Seed of a sampler; -1 to derive it from the run's seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSettings:
    """How the environment draws a parameter's value; one subclass for each `sampler_type`."""

    # `sampler_type` chooses the class, and is no parameter of the sampler.
    sampler_type: ClassVar[str] = ""
    seed: SamplerSeed = -1
    """Seed of the environment's generator; -1 to derive it from the run's seed."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> "SamplerSettings":
        """Read a number (a constant), or a map of `sampler_type` and `sampler_parameters`."""
        # True and False are ints in Python, but no numbers here.
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return ConstantSampler(value=read(float, node, path))
        if not isinstance(node.value, dict):
            expected = "a number, a sampler or a curriculum"
            raise fail(node, path, f"needs {expected}, got {display(node)}")
        # ML-Agents ignores other keys; here they are refused, because they may be misspelt.
        keys = ("sampler_type", "sampler_parameters")
        for key, item in node.value.items():
            if key not in keys:
                raise unknown_key(item, path, key, dict.fromkeys(keys))
        for key in keys:
            if key not in node.value:
                raise fail(node, path, f"does not contain {key}; a sampler needs both of {keys}")
        written, at = node.value["sampler_type"], join(path, "sampler_type")
        # ML-Agents' manual has this spelling, but its code refuses it.
        if written.value == "multirange_uniform":
            text = "%s: %s: 'multirange_uniform' is read as 'multirangeuniform', its correct name."
            _log.warning(text, written.where, at)
            written = replace(written, value="multirangeuniform")
        kind = SAMPLERS[choice(written, at, SAMPLERS)]
        sampler: SamplerSettings = read_dataclass(
            kind, node.value["sampler_parameters"], join(path, "sampler_parameters")
        )
        return sampler

    def to_plain(self) -> dict[str, Any]:
        """Return the plain map that `from_node` reads as the same sampler."""
        parameters = {item.name: to_map(getattr(self, item.name)) for item in fields(self)}
        return {"sampler_type": self.sampler_type, "sampler_parameters": parameters}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSampler(SamplerSettings):
    """A constant value."""

    sampler_type: ClassVar[str] = "constant"
    value: float = 0.0
    """The constant value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformSampler(SamplerSettings):
    """A uniform distribution over an interval."""

    sampler_type: ClassVar[str] = "uniform"
    min_value: float = 0.0
    """Lower end of the interval."""
    max_value: float = 1.0
    """Upper end of the interval; at least min_value."""

    def __post_init__(self) -> None:
        if self.min_value > self.max_value:
            text = f"must not exceed max_value ({self.max_value}), got {self.min_value}"
            raise ContradictionError("min_value", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianSampler(SamplerSettings):
    """A normal distribution."""

    sampler_type: ClassVar[str] = "gaussian"
    mean: float = 1.0
    """Mean of the distribution."""
    st_dev: float = 1.0
    """Standard deviation of the distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiRangeUniformSampler(SamplerSettings):
    """A uniform distribution over several intervals."""

    sampler_type: ClassVar[str] = "multirangeuniform"
    intervals: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """The intervals, each with its lower and its upper end."""

    def __post_init__(self) -> None:
        if not self.intervals:
            raise ContradictionError("intervals", "needs at least one interval [min, max]")
        for low, high in self.intervals:
            if low > high:
                text = f"the minimum of [{low}, {high}] exceeds its maximum"
                raise ContradictionError("intervals", text)


SAMPLERS: dict[str, type[SamplerSettings]] = {
    kind.sampler_type: kind
    for kind in (UniformSampler, GaussianSampler, MultiRangeUniformSampler, ConstantSampler)
}
"""The settings class for each `sampler_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionCriteria:
    """`completion_criteria`: when a lesson ends."""

    measure: Literal["reward", "progress", "elo", "Elo"] = "reward"
    """`reward`: mean return of recent episodes; `progress`: fraction of max_steps that has been
    trained; `elo`: rating in self-play, which ML-Agents' manual writes `Elo`."""
    behavior: str
    """The behavior that is measured, without `?team=`."""
    min_lesson_length: CountOrZero = 0
    """Minimum number of episodes before the lesson can end."""
    signal_smoothing: bool = True
    """For the measure `reward`: whether mean returns are smoothed: 0.75 x new mean return + 0.25 x
    last smoothed value."""
    threshold: float = 0.0
    """The lesson ends when the measure exceeds this number; in [0, 1] for progress."""
    require_reset: bool = False
    """Whether the environment is reset for the next lesson."""

    def __post_init__(self) -> None:
        if self.measure == "Elo":
            # `object.__setattr__` is needed, because the class is frozen.
            object.__setattr__(self, "measure", "elo")
        if self.measure == "progress" and not 0.0 <= self.threshold <= 1.0:
            text = f"must be in [0, 1] for the measure progress, got {self.threshold}"
            raise ContradictionError("threshold", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """One lesson of a curriculum: a value or sampler, used until the lesson's criteria are met."""

    name: str
    """Name of the lesson, shown in logs."""
    completion_criteria: CompletionCriteria | None = None
    """When the next lesson begins; null for the last lesson."""
    value: SamplerSettings
    """Value or sampler that the environment gets during the lesson."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParameter:
    """One entry of `environment_parameters`; a plain value is a curriculum of one lesson."""

    curriculum: tuple[Lesson, ...]
    """The lessons, in the order in which they are trained."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a number, a sampler, or a map with `curriculum`."""
        name = path.removeprefix("environment_parameters.")
        if not (isinstance(node.value, dict) and "curriculum" in node.value):
            # As in ML-Agents, this single lesson has the parameter's name.
            return cls(curriculum=(Lesson(name=name, value=SamplerSettings.from_node(node, path)),))
        parameter: Self = read_dataclass(cls, node, path)
        # The nodes are needed here, because errors about lessons give their lines.
        lessons, at = node.value["curriculum"], join(path, "curriculum")
        if not parameter.curriculum:
            raise fail(lessons, at, "needs at least one lesson")
        for index, lesson in enumerate(parameter.curriculum[:-1]):
            if lesson.completion_criteria is None:
                text = f"A non-terminal lesson does not have a completion_criteria for {name}."
                raise fail(lessons.value[index], join(at, index), f"{text} Add it")
        # This is a warning and not an error, because ML-Agents accepts such files.
        if parameter.curriculum[-1].completion_criteria is not None:
            text = "%s: %s: the last lesson never ends, its completion_criteria is ignored."
            _log.warning(text, lessons.value[-1].where, join(at, len(lessons.value) - 1))
        return parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """`env_settings`: the environment's executable, and how many copies of it run."""

    env_path: str | None = None
    """The environment executable; null waits for players that are started elsewhere, such as the
    Unity Editor, from port 5004 on."""
    env_args: tuple[str, ...] | None = None
    """Arguments for the environment's executable."""
    # The first port is not 5004, which is the Unity Editor's.
    base_port: Annotated[int, Bounds(at_least=1, at_most=65535)] = 5005
    """Port of the first environment; the other environments use the following ports."""
    num_envs: Count = 1
    """Number of parallel environments."""
    num_areas: Count = 1
    """Number of training areas inside each environment."""
    # The defaults of this section are ML-Agents'.
    timeout_wait: Count = 60
    """Seconds to wait for an environment's answer."""
    seed: CountOrUnlimited = -1
    """Seed of all random generators; -1 for a random seed."""
    max_lifetime_restarts: CountOrUnlimited = 10
    """Maximum number of restarts of an environment in the whole run; -1 for any number."""
    restarts_rate_limit_n: CountOrUnlimited = 1
    """Maximum number of restarts of an environment within restarts_rate_limit_period_s; -1 for any
    number."""
    restarts_rate_limit_period_s: Count = 60
    """Length in seconds of the period in which restarts_rate_limit_n restarts are allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """`engine_settings`: the configuration of the game engine."""

    width: Count = 84
    """Width of the window in pixels."""
    height: Count = 84
    """Height of the window in pixels."""
    quality_level: CountOrZero = 5
    """The engine's level of rendering quality."""
    # This is Unity's Time.timeScale; physics gets less exact at high values.
    time_scale: NonNegative = 20.0
    """How many times faster than real time the simulation may run."""
    target_frame_rate: CountOrUnlimited = -1
    """Frames per second at which the engine aims; -1 for as many as possible."""
    capture_frame_rate: CountOrZero = 60
    """Frames per second of simulated time."""
    no_graphics: bool = False
    """Whether environments run without rendering."""
    no_graphics_monitor: bool = False
    """Whether only the first environment renders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """`checkpoint_settings`: the run's folder, and the state from which the run starts."""

    run_id: str = "ppo"
    """Name of the run, and of its folder in results_dir."""
    initialize_from: str | None = None
    """Id of the run from which the initial weights are taken, or null."""
    load_model: bool = False
    """Deprecated: has the effect of resume."""
    resume: bool = False
    """Whether to continue the run with this run_id."""
    force: bool = False
    """Whether to replace an earlier run with this run_id."""
    train_model: bool = False
    """Deprecated: has no effect."""
    inference: bool = False
    """Whether the policy only acts, without learning."""
    results_dir: str = "results"
    """Folder with the folders of all runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchSettings:
    """`torch_settings`: device, threads and compilation of torch."""

    # The device is a plain text, because settings must not import torch; the trainer checks it.
    device: str | None = None
    """Device of the networks: `cpu`, `cuda`, `cuda:0`, ... Null: the device on which decisions and
    minibatches of the run's own shapes take the least time; it is measured at the start of a
    behavior, and kept when the run is resumed. With several learners null means cuda if there is a
    GPU."""
    compile: bool | None = None
    """Whether gradient steps are compiled, where a compiler is installed. Null: `pipeline learn`
    compiles the gradient steps of a new run with at least 50,000 of them, unless it is portable; a
    resumed run continues with its choice; a stage and `pipeline.train` do not compile."""
    threads: Count | None = None
    """Number of torch's threads. Null: 1, 2, 4, ... threads are timed at the start of a run, up to
    the number of cores that the environments leave free; the smallest number that takes at most 5 %
    more time than the fastest number is used, and is kept when the run is resumed. The number
    affects how sums are rounded: give a number for a run that others repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """All settings of a configuration file, in the order in which it is written."""

    default_settings: TrainerSettings | None = None
    """Defaults of all behaviors, including unlisted ones; or null."""
    behaviors: dict[str, TrainerSettings] = field(default_factory=dict)
    """Settings by behavior name, without `?team=`."""
    env_settings: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """The environment's executable, and how many copies of it run."""
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    """Configuration of the game engine."""
    environment_parameters: dict[str, EnvironmentParameter] | None = None
    """Parameters sent to the environment, by name; or null."""
    checkpoint_settings: CheckpointSettings = field(default_factory=CheckpointSettings)
    """The run's folder, and the state with which it starts."""
    torch_settings: TorchSettings = field(default_factory=TorchSettings)
    """Device, threads and compilation of torch."""
    debug: bool = False
    """Whether log messages are detailed."""
    from_file: bool = field(default=False, compare=False, repr=False, metadata={"internal": True})
    """Whether a file was given, so that unlisted behaviors are an error."""
    refused: dict[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )
    """Behaviors of an old file that cannot be trained today: the reason by the behavior's name."""
    places: dict[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )
    """Place (`file:line`) of each path to a file, each behavior and each `steps_per_update`, by its
    dotted key."""

    def place_of(self, key: str) -> str | None:
        """Return the place (`file:line`) of a behavior's dotted key, or else of its default.

        The default is the same key in `default_settings`. None if the file has neither.
        """
        section, _, rest = key.partition(".")
        inherited = rest.partition(".")[2] if section == "behaviors" else ""
        return self.places.get(key, self.places.get(f"default_settings.{inherited}"))

    def for_behavior(self, name: str) -> TrainerSettings:
        """Return the settings of a behavior; `name` may end with `?team=` and a number.

        Raises:
            SettingsError: The file neither lists the behavior nor has default_settings, or gives
                the behavior a trainer that was removed.
        """
        # Teams of a behavior share its settings.
        plain = name.split("?", maxsplit=1)[0]
        if plain in self.behaviors:
            return self.behaviors[plain]
        # The file gives a refused behavior a removed trainer, so the defaults must not train it.
        if plain in self.refused:
            raise SettingsError(self.refused[plain])
        if self.default_settings is not None:
            return self.default_settings
        # As in ML-Agents, a behavior needs no entry if there is no file.
        if self.from_file:
            near = nearest(plain, self.behaviors)
            place = self.places.get(f"behaviors.{near}")
            file = "" if place is None else f" ({place.rpartition(':')[0]})"
            remedy = f"The environment gives this name: rename {near!r} there to {plain!r}."
            if near is None:
                remedy = f"Add an entry for {plain} there, or set default_settings."
            raise SettingsError(
                f"The behavior name {plain} has not been specified in the trainer configuration"
                f"{file}. {remedy}"
            )
        return TrainerSettings()

    def plugins(self) -> dict[str, str]:
        """Return versions of plug-in packages, and digests of the user's files, that are in use."""
        plugins = (trainer.plugins() for trainer in self.sections.values())
        # The versions are sorted, because the result goes into fingerprints.
        return dict(sorted(item for versions in plugins for item in versions.items()))

    @property
    def sections(self) -> dict[str, TrainerSettings]:
        """The settings of each behavior, and last the default settings, by the section's key."""
        sections = {f"behaviors.{name}": item for name, item in self.behaviors.items()}
        default = self.default_settings
        return sections if default is None else sections | {"default_settings": default}

    def undecided(self) -> dict[str, TrainerSettings]:
        """Return the settings of behaviors with `steps_per_update: auto`, by section name."""
        return {name: item for name, item in self.sections.items() if item.is_undecided}

    def with_pace(self, name: str, pace: float) -> "RunSettings":
        """Return these settings with a number in place of a behavior's `steps_per_update: auto`."""
        trainer = self.for_behavior(name).with_pace(pace)
        # An unlisted behavior must stay unlisted, because its seed depends on the listed behaviors.
        if name not in self.behaviors:
            return replace(self, default_settings=trainer)
        return replace(self, behaviors={**self.behaviors, name: trainer})

    def with_seed(self, seed: int) -> "RunSettings":
        """Return the same settings with the given seed, and with a seed for every sampler."""
        # As in ML-Agents, samplers without a seed (-1) get seed, seed + 1, and so on, in the order
        # of parameters and lessons.
        free = itertools.count(seed)

        def seeded(lesson: Lesson) -> Lesson:
            if lesson.value.seed != -1:
                return lesson
            return replace(lesson, value=replace(lesson.value, seed=next(free)))

        parameters = self.environment_parameters and {
            name: EnvironmentParameter(curriculum=tuple(map(seeded, parameter.curriculum)))
            for name, parameter in self.environment_parameters.items()
        }
        env = replace(self.env_settings, seed=seed)
        return replace(self, env_settings=env, environment_parameters=parameters)
