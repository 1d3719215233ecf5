"""The settings of one behavior: everything under `behaviors.<name>` and `default_settings`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from pipeline.errors import Mistakes
from pipeline.plugins import Group
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import (
    ContradictionError,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    choice,
    display,
    each,
    entries_of,
    part,
    read,
    read_dataclass,
    setting_hints,
    unknown_key,
)
from pipeline.settings.schema.reward_signals import (
    DEFAULT_NETWORK,
    REWARD_SIGNALS,
    DemoPath,
    ExtrinsicSettings,
    NetworkSettings,
    RewardSignalSettings,
)

Schedule = Literal["linear", "constant"]
"""How a value falls over training: to (nearly) zero at max_steps, or not at all."""

# Settings must not import torch, so a test compares this number with the network's.
ATTENTION_HEADS = 4
"""Parts of equal size in which POCA's critic attends: `nets.attention.N_HEADS`."""

# ML-Agents does so too: one constant schedule makes all of them constant.
_LIKE_LEARNING_RATE = {"copies": "learning_rate_schedule"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterSettings:
    """Hyperparameters of every trainer; a plug-in's extend this class."""

    made_by: ClassVar[str] = ""
    """`module:class` of the `Algorithm` with these hyperparameters, imported only to train.

    A module of ours begins with a dot and lies in `pipeline.algos`.
    """

    batch_size: Count = 1024
    """Experiences in a minibatch."""
    buffer_size: Count = 10240
    """Experiences to collect before an update."""
    learning_rate: Positive = 3e-4
    """Initial step size of Adam."""
    learning_rate_schedule: Schedule = "linear"
    """How the learning rate falls until max_steps."""
    # An addition is written only where it is set, since ML-Agents refuses keys that it lacks.
    max_grad_norm: Positive | None = field(default=None, metadata={"addition": True})
    """Largest norm of a gradient, longer ones are shortened; null (as ML-Agents) for no limit."""

    @property
    def minibatches_per_step(self) -> float:
        """Gradient steps for each agent step."""
        return 1.0 / self.batch_size

    @property
    def why_alone(self) -> str:
        """Why only one learner can use the trainer, with what to do; empty if several can."""
        return ""


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

    @property
    def minibatches_per_step(self) -> float:
        """Gradient steps for each agent step."""
        return self.num_epoch / self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSettings(OnPolicySettings):
    """Hyperparameters of `ppo`."""

    made_by = ".ppo:PPO"

    shared_critic: bool = False
    """Whether policy and value function share the network's body."""
    clip_value: bool = field(default=False, metadata={"addition": True})
    """Whether a value may move by epsilon standard deviations of the returns in one update only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class POCASettings(OnPolicySettings):
    """Hyperparameters of `poca`."""

    made_by = ".poca:POCA"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicySettings(HyperparameterSettings):
    """What SAC and XQC share."""

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

    @property
    def minibatches_per_step(self) -> float:
        """Gradient steps for each agent step."""
        return 1.0 / self.steps_per_update


@dataclass(frozen=True, kw_only=True, slots=True)
class SACSettings(OffPolicySettings):
    """Hyperparameters of `sac`."""

    made_by = ".sac:SAC"


@dataclass(frozen=True, kw_only=True, slots=True)
class XQCSettings(OffPolicySettings):
    """Hyperparameters of `xqc`; ML-Agents lacks this trainer."""

    made_by = ".xqc:XQC"

    batch_size: Count = 256
    """Experiences in a minibatch."""
    buffer_size: Count = 1000000
    """Experiences that the replay buffer holds."""
    learning_rate_schedule: Schedule = "linear"
    """How the learning rate falls until max_steps: to a tenth (linear), or not at all."""
    buffer_init_steps: CountOrZero = 5000
    """Experiences to collect by random actions before the first update."""
    init_entcoef: Positive = 0.01
    """Entropy coefficient at the start."""
    critic: Literal["xqc", "crossq"] = "xqc"
    """How action values are learned: `xqc` (distributions, weights of norm 1, a target network;
    arXiv 2509.25174), or `crossq` (squared errors, no target network; arXiv 1902.05605)."""
    policy_delay: Count = 3
    """Updates of the critics for each update of the policy and of the entropy coefficient."""
    n_steps: Count = 1
    """Steps whose rewards are added up before a value is looked up (Sutton 1988)."""
    target_sigma: Positive = 0.15
    """Standard deviation of a continuous action, before tanh, whose entropy is aimed at (FlashSAC
    2026); 0.0892 aims at SAC's -1 for each component."""
    held_noise: Count = 1
    """Most decisions in a row that an agent explores with the same noise, fewer being likelier
    (FlashSAC 2026 has 16); 1 for new noise each time. Continuous actions only."""
    reward_normalization: bool = True
    """Whether rewards are divided by the running spread of the agents' returns; needed with `xqc`
    unless all returns are within -5..5."""

    @property
    def why_alone(self) -> str:
        """As in every trainer's settings."""
        return "xqc normalises by minibatches of one process; use one learner"


HYPERPARAMETERS: Group[type[HyperparameterSettings]] = Group(
    "pipeline.algorithms",
    {
        "ppo": ".trainer:PPOSettings",
        "sac": ".trainer:SACSettings",
        "poca": ".trainer:POCASettings",
        "xqc": ".trainer:XQCSettings",
    },
    room="pipeline.settings.schema.",
    base=HyperparameterSettings,
    theirs="mlagents.trainer_type",
)
"""The hyperparameters that each `trainer_type` takes."""


_STEPS_PER_UPDATE = (
    "hyperparameters.steps_per_update",
    " (agent steps for each gradient step: train_freq x n_envs / gradient_steps)",
)
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
"""The key of a behavior that a word of Stable-Baselines3 or the like means, and a remark."""


def _without_foreign(
    entries: Mapping[str, Node], path: str, trainer_type: str, mistakes: Mistakes
) -> dict[str, Node]:
    """Refuse hyperparameters of other trainers of ours, and words of another library."""
    remaining = dict(entries)
    ours = {name: setting_hints(HYPERPARAMETERS[name]) for name in HYPERPARAMETERS.ours}
    known = {*setting_hints(TrainerSettings), *setting_hints(HYPERPARAMETERS[trainer_type])}
    for key, item in entries.items():
        if key in known or (key, trainer_type) == ("n_steps", "sac"):  # which has no rollouts
            continue
        place, remark = WORDS.get(key, (key, ""))
        if trainer_type == "sac":
            place = place.replace(".beta", ".init_entcoef")
        meant = place.rpartition(".")[2]
        owners = [] if meant in known else [name for name, keys in ours.items() if meant in keys]
        others = f"a setting of {' and '.join(owners)}, not of {trainer_type}; leave it out"
        if key in WORDS:
            library = "" if key in ("entropy_coef", "n_layers") else " of Stable-Baselines3"
            text = f"{key}{library} is {place} here{f', {others}' if owners else remark}"
            text = f"unknown key {key!r} (value {display(item)}); {text}"
            mistakes.found.append(fail(remaining.pop(key), path, text))
        elif owners:
            mistakes.found.append(fail(remaining.pop(key), join(path, key), f"is {others}"))
    return remaining


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlaySettings:
    """`self_play`: opponents out of the agent's own past."""

    save_steps: Count = 20000
    """Trainer steps between two snapshots of the policy."""
    team_change: Count = field(default=100000, metadata={"copies": "save_steps", "times": 5})
    """Trainer steps until another team learns; 5 x save_steps when not given."""
    # As in ML-Agents' code; its manual says 10000.
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
    # ML-Agents' code takes 3 then; its manual says the trainer's num_epoch.
    num_epoch: Count | None = None
    """Passes per update; null for 3."""
    batch_size: Count | None = None
    """Demonstrated steps in a minibatch; null for the trainer's batch_size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How one behavior is trained, in the order of a written `configuration.yaml`."""

    trainer_type: str = "ppo"
    """`ppo`, `sac`, `poca`, `xqc`, or one that an installed package brings; required with
    hyperparameters."""
    hyperparameters: HyperparameterSettings = field(default_factory=PPOSettings)
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
    """Whether environments step while the networks learn, with the policy of before the update;
    such runs repeat exactly."""
    self_play: SelfPlaySettings | None = None
    """Opponents out of the agent's own past, or null."""
    behavioral_cloning: BehavioralCloningSettings | None = None
    """Supervised steps on demonstrations, or null."""

    def __post_init__(self) -> None:
        expected = HYPERPARAMETERS.get(self.trainer_type)
        # The exact class: a plug-in's may extend that of another trainer.
        if expected is None or type(self.hyperparameters) is not expected:
            class_name = type(self.hyperparameters).__name__
            text = f"{class_name} does not belong to the trainer type {self.trainer_type!r}"
            raise ContradictionError("hyperparameters", text)
        memory, batch_size = self.network_settings.memory, self.hyperparameters.batch_size
        # A minibatch has whole sequences, and could not hold even one.
        if memory is not None and memory.sequence_length > batch_size:
            allowed = "less than or equal to batch_size when using memory"
            text = f"must be {allowed}, got {memory.sequence_length} with batch_size {batch_size}"
            raise ContradictionError("network_settings.memory.sequence_length", text)
        hidden = self.network_settings.hidden_units
        if self.trainer_type == "poca" and hidden % ATTENTION_HEADS:
            raise ContradictionError(
                "network_settings.hidden_units",
                f"must be a multiple of {ATTENTION_HEADS} with the trainer type 'poca', whose "
                f"critic attends to a group's members in as many parts, got {hidden}",
            )
        if self.even_checkpoints:
            if not 0 < self.keep_checkpoints <= self.max_steps:
                allowed = "between 1 and max_steps"
                text = f"with even_checkpoints it must be {allowed}, got {self.keep_checkpoints}"
                raise ContradictionError("keep_checkpoints", text)
            # Applied here, so that a written configuration has the interval that is used.
            object.__setattr__(self, "checkpoint_interval", self.max_steps // self.keep_checkpoints)

    def contrary_sizes(self) -> Iterator[str]:
        """Yield a text for each pair of sizes with which a run learns nothing, or otherwise."""
        h = self.hyperparameters
        if not isinstance(h, OnPolicySettings | OffPolicySettings):
            return
        needed = {"buffer_size": h.buffer_size}
        if isinstance(h, OffPolicySettings):
            needed = {"buffer_init_steps": h.buffer_init_steps, "batch_size": h.batch_size}
        key = max(needed, key=needed.__getitem__)
        if self.max_steps < needed[key]:
            yield (
                f"max_steps {self.max_steps} ends the run before the first update, for which "
                f"hyperparameters.{key} {needed[key]} has to be reached: nothing is learned"
            )
        if h.batch_size > h.buffer_size:
            what = (
                "nothing is learned" if isinstance(h, OffPolicySettings) else "all in one minibatch"
            )
            yield (
                f"hyperparameters.batch_size {h.batch_size} is above hyperparameters.buffer_size "
                f"{h.buffer_size}: {what}"
            )

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read the settings of a behavior, with `hyperparameters` as its trainer type has them."""
        entries, mistakes = entries_of(node, path), Mistakes()
        # Both types depend on a value or a key, which type hints cannot say.
        hints: dict[str, Any] = {"reward_signals": _RewardSignals}
        with mistakes:
            name = _trainer_type(entries, path)
            at = join(path, "trainer_type")
            hints["hyperparameters"] = part(
                HYPERPARAMETERS, name, entries.get("trainer_type", node), at
            )
            # Without a section, the trainer's own defaults, not PPO's.
            section = entries.get("hyperparameters", Node({}, node.source, node.line))
            inside = join(path, "hyperparameters")
            entries = _without_foreign(entries, path, name, mistakes)
            numbers = _without_foreign(entries_of(section, inside), inside, name, mistakes)
            entries["hyperparameters"] = replace(section, value=numbers)
        if "hyperparameters" not in hints:  # of which trainer is not known; the other keys are read
            parts = ("trainer_type", "hyperparameters")
            entries = {key: item for key, item in entries.items() if key not in parts}
        settings: Self = read_dataclass(
            cls, replace(node, value=entries), path, hints=hints, mistakes=mistakes
        )
        return settings


def _trainer_type(entries: Mapping[str, Node], path: str) -> str:
    if "trainer_type" in entries:
        return choice(entries["trainer_type"], join(path, "trainer_type"), HYPERPARAMETERS)
    # An error in ML-Agents too, although ppo is the default.
    if "hyperparameters" in entries:
        text = "Hyperparameters were specified but no trainer_type was given."
        add = f"Add one of: {', '.join(HYPERPARAMETERS)}"
        raise fail(entries["hyperparameters"], join(path, "hyperparameters"), f"{text} {add}")
    return "ppo"


class _RewardSignals:
    """Reads `reward_signals`, where each name decides the class of the settings."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> dict[str, RewardSignalSettings]:
        entries = entries_of(node, path)
        if not entries:
            raise fail(node, path, "needs at least one reward signal, or leave the key out")
        return each(entries, lambda name, item: _signal(name, item, path))


def _signal(name: str, item: Node, path: str) -> RewardSignalSettings:
    if name not in REWARD_SIGNALS:
        raise unknown_key(item, path, name, REWARD_SIGNALS)
    at = join(path, name)
    signal: RewardSignalSettings = read(part(REWARD_SIGNALS, name, item, at), item, at)
    return signal
