"""Conversion of flat files, which have a default section and a section for each behavior."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.errors import SettingsError
from pipeline.settings.nodes import Node, fail, from_plain, join, walk
from pipeline.settings.reader import (
    Positive,
    choice,
    display,
    entries_of,
    read,
    setting_hints,
    suggestion,
    to_map,
    unknown_key,
)
from pipeline.settings.trainer.inheritance import behavior_over, expanded
from pipeline.settings.trainer.schema import (
    HYPERPARAMETERS,
    REWARD_SIGNALS,
    BehavioralCloningSettings,
    SelfPlaySettings,
    TrainerSettings,
)

# ML-Agents removed the last of these trainers in 0.13, in favor of GAIL and behavioral cloning.
IMITATING_TRAINERS = ("imitation", "online_bc", "offline_bc")
"""ML-Agents' trainers without reinforcement learning: `imitation` in releases until 0.5, the others
from 0.6 to 0.12."""

# The flat format had one level; the present format sorts the same keys into sections.
_SAME_NAME = {
    ("hyperparameters",): """
        batch_size buffer_size learning_rate learning_rate_schedule beta epsilon lambd num_epoch
        buffer_init_steps init_entcoef save_replay_buffer tau steps_per_update""",
    ("network_settings",): "normalize hidden_units num_layers vis_encode_type",
    (): "max_steps time_horizon summary_freq keep_checkpoints init_path threaded",
}
MOVED: dict[str, tuple[str, ...]] = {
    key: (*place, key) for place, keys in _SAME_NAME.items() for key in keys.split()
} | {"vis_encoder_type": ("network_settings", "vis_encode_type")}
"""The new key path of each key of a flat section that is moved without a change of its value."""

_SET_BY_PROGRAM = "was set by ML-Agents; runs are written to checkpoint_settings.results_dir"
GONE: dict[str, str] = {
    "summary_path": _SET_BY_PROGRAM,
    "model_path": _SET_BY_PROGRAM,
    "graph_scope": _SET_BY_PROGRAM,
    "burn_in_ratio": "all steps of a sequence are trained on",
    "brain_to_imitate": "imitation of a live player was removed; name a demonstration in demo_path",
    "batches_per_epoch": "replaced by behavioral_cloning.samples_per_update and num_epoch",
}
"""For each key without an equivalent: the reason, and what to use instead."""

_RESHAPED = """
    trainer gamma reward_signals use_curiosity curiosity_strength curiosity_enc_size use_recurrent
    sequence_length memory_size num_update train_interval pretraining behavioral_cloning self_play
    demo_path curriculum"""
FLAT_KEYS = {*MOVED, *GONE, *_RESHAPED.split()}
"""All keys that a section of a flat file may have."""

_ALWAYS = """
    batch_size buffer_size hidden_units learning_rate max_steps normalize num_layers time_horizon
    summary_freq use_recurrent"""
REQUIRED: dict[str, list[str]] = {
    "ppo": f"{_ALWAYS} beta epsilon lambd num_epoch".split(),
    "sac": f"{_ALWAYS} buffer_init_steps init_entcoef tau".split(),
}
"""The keys that ML-Agents required for each trainer, without keys that were renamed later."""

_LEARNED = ("curiosity", "gail", "rnd")
SIGNAL_KEYS: dict[str, tuple[str, ...]] = {
    "strength": ("extrinsic", *_LEARNED),
    "gamma": ("extrinsic", *_LEARNED),
    "encoding_size": _LEARNED,
    "learning_rate": _LEARNED,
    "demo_path": ("gail",),
    "use_actions": ("gail",),
    "use_vail": ("gail",),
}
"""Keys of a reward signal, with the signals that use each."""
_DEFAULT = "default"
# This object differs from every value, also from None, which is a valid setting.
_MISSING = object()
_CURIOSITY = {
    "curiosity_strength": ("strength",),
    "curiosity_enc_size": ("network_settings", "hidden_units"),
}
# ML-Agents 0.16 renamed these keys.
_RENAMED = {"self_play": {"play_against_current_self_ratio": "play_against_latest_model_ratio"}}
_CLONING = ("behavioral_cloning", "pretraining")
_GAIL_UNITS = 64
"""Old default width of GAIL's network; the present default is 128."""


@dataclass(frozen=True, slots=True)
class FormatChange:
    """A change of one key of an old file, or a note about the key."""

    kind: Literal["moved", "gone", "note"]
    """Whether the key moved to a new key, was removed without an equivalent, or has only a note."""
    where: str
    """Place of the key, as `file:line`."""
    old: str
    """The key's path in the old file."""
    new: str
    """The key's path in the present format; empty if it has no equivalent."""
    text: str
    warns: bool
    """Whether training also logs the change, and not only `pipeline config upgrade`."""

    def __str__(self) -> str:
        """Return a line that describes the change."""
        if self.kind == "moved":
            note = f" ({self.text})" if self.text else ""
            return f"{self.where}: {self.old} -> {self.new}{note}"
        return f"{self.where}: {self.old}: {self.text}"


@dataclass(slots=True)
class Changes:
    """Changes that the conversion of a file made, in order."""

    entries: list[FormatChange] = field(default_factory=list)

    def moved(self, node: Node, old: str, new: str, text: str = "", *, warns: bool = False) -> None:
        """Record that the value at `old` moved to `new`."""
        self.entries.append(FormatChange("moved", node.where, old, new, text, warns))

    def gone(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Record that `old` has no equivalent today."""
        self.entries.append(FormatChange("gone", node.where, old, "", text, warns))

    def note(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Record a note about `old`."""
        self.entries.append(FormatChange("note", node.where, old, "", text, warns))


@dataclass(kw_only=True, slots=True)
class Section:
    """A section under conversion: its remaining keys `left`, and the `behavior` built from them."""

    entries: dict[str, Node]
    """The section's keys, merged over the keys of the default section."""
    node: Node
    """The section itself, which has the line for messages."""
    old: str
    """The section's key path in the old file."""
    new: str
    """The behavior's key path in the present format."""
    changes: Changes
    inherited: frozenset[str] = frozenset()
    """Places (`file:line`) of keys that come from another section; their changes are reported when
    that section is converted."""
    kind: str = field(init=False)
    """The trainer type in the present format."""
    left: dict[str, Node] = field(init=False)
    behavior: dict[str, Any] = field(default_factory=dict)
    """Nested dictionaries of nodes."""

    def take(self, *keys: str) -> dict[str, Node]:
        """Remove `keys` from `left`, and return the removed entries."""
        return {key: self.left.pop(key) for key in keys if key in self.left}

    def is_own(self, node: Node) -> bool:
        """Return whether a node was written in this section, and is not inherited."""
        return node.where not in self.inherited

    def put(self, node: Node, *place: str, old: str, text: str = "", warns: bool = False) -> None:
        """Set the behavior's value at `place` to `node`, which the section has at the key `old`."""
        self.set(node, *place)
        # A change is recorded where the key is written, not for each behavior that inherits it.
        if self.is_own(node):
            new = join(self.new, ".".join(place))
            self.changes.moved(node, join(self.old, old), new, text, warns=warns)

    def put_old_default(self, at: Node, value: object, *place: str) -> None:
        """Set `place` to the old default `value`, which is not today's; `at` gives the line."""
        self.set(from_plain(value, at.source, at.line), *place)
        if self.is_own(at):
            new = join(self.new, ".".join(place))
            text = f"{new} is {value}, the old default"
            self.changes.note(at, self.old, text, warns=False)

    def put_ratio(self, node: Node, ratio: float, key: str, *, old: str, text: str) -> None:
        """Set a hyperparameter to the agent steps for each update; `node` counted updates."""
        value = replace(node, value=ratio, text=str(ratio))
        self.put(value, "hyperparameters", key, old=old, text=text, warns=True)

    def gone(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Record a removed key, unless it is inherited: the section that has it records it once."""
        if self.is_own(node):
            self.changes.gone(node, join(self.old, old), text, warns=warns)

    def unknown(self, node: Node, old: str, known: Iterable[str]) -> None:
        """Record an unknown key, which ML-Agents ignored, with a suggestion of a known key."""
        key = old.rpartition(".")[2]
        text = f"unknown key {key!r} is ignored, as in ML-Agents{suggestion(key, known)}"
        self.gone(node, old, text)

    def set(self, node: Node, *place: str) -> None:
        """Set the behavior's value at `place`, without a record."""
        target = self.behavior
        for key in place[:-1]:
            if not isinstance(target.get(key), dict):  # also for the node of an empty section
                target[key] = {}
            target = target[key]
        target[place[-1]] = node


def convert_section(section: Section) -> Node:
    """Return the behavior that a section describes; the section's `trainer` must be valid."""
    section.left = dict(section.entries)
    for put in (
        *(_put_trainer, _put_moved, _put_updates, _put_memory),
        *(_put_reward_signals, _put_cloning, _put_self_play, _put_schedules),
    ):
        put(section)
    # Keys that remain after all conversions are unknown.
    for key, item in section.left.items():
        if key in GONE:
            section.gone(item, key, f"no equivalent: {GONE[key]}", warns=key == "burn_in_ratio")
        elif key != "curriculum":  # `FlatFile` converts this key itself
            section.unknown(item, key, FLAT_KEYS)
    return _as_node(section.behavior, section.node)


def _as_node(value: Any, place: Node) -> Node:
    if isinstance(value, Node):
        return value
    entries = {key: _as_node(item, place) for key, item in value.items()}
    # A built section has no line of its own; the line of its first key is the most helpful line.
    first = next(iter(entries.values()), place)
    return Node(entries, first.source, first.line)


def _put_trainer(section: Section) -> None:
    node = section.left.pop("trainer")
    named = node.value
    if named not in IMITATING_TRAINERS:
        section.kind = named
        section.put(node, "trainer_type", old="trainer")
        # ML-Agents refused a section without these keys; here it gets the present defaults.
        missing = [key for key in REQUIRED.get(named, ()) if key not in section.left]
        if missing:
            text = f"keys that the {named} trainer needed are missing: {', '.join(missing)}; the "
            section.changes.note(section.node, section.old, f"{text}present defaults are used")
        return
    section.kind = "ppo"
    text = f"{named!r} only imitated; ppo with behavioral_cloning learns from the environment's "
    text += "reward as well"
    ppo = replace(node, value="ppo", text="ppo")
    section.put(ppo, "trainer_type", old="trainer", text=text, warns=True)
    # The old section may give demo_path directly, outside its cloning settings.
    if "demo_path" in section.left and not section.left.keys() & _CLONING:
        for key, item in section.take("demo_path", "batch_size").items():
            section.put(item, "behavioral_cloning", key, old=key)


def _put_moved(section: Section) -> None:
    known = setting_hints(HYPERPARAMETERS[section.kind])
    for key, node in section.take(*(key for key in section.left if key in MOVED)).items():
        place = MOVED[key]
        # A SAC section inherits beta and epsilon of a PPO default section, but does not use them.
        if place[0] == "hyperparameters" and key not in known:
            section.gone(node, key, f"is not used by the trainer {section.kind}", warns=False)
            continue
        text = "was a folder of TensorFlow checkpoints; must be a .pt file"
        is_weights = key == "init_path"
        section.put(node, *place, old=key, text=text if is_weights else "", warns=is_weights)


def _put_updates(section: Section) -> None:
    """Convert SAC's `num_update` and `train_interval`, which counted environment steps."""
    # The keys are always taken, because remaining keys are reported as unknown.
    counters = section.take("train_interval", "num_update")
    is_sac = section.kind == "sac"
    is_given = is_sac and "steps_per_update" in section.behavior.get("hyperparameters", {})
    if not is_sac or is_given:
        by = "SAC with steps_per_update" if is_given else f"the trainer {section.kind}"
        for key, node in counters.items():
            section.gone(node, key, f"is not used by {by}", warns=False)
        return
    numbers = {key: read(Positive, node, join(section.old, key)) for key, node in counters.items()}
    # Old files gave numbers of updates and of environment steps; today it is steps per update.
    ratio = numbers.get("train_interval", 1.0) / numbers.get("num_update", 1.0)
    text = "train_interval / num_update; all agents' steps count now, so multiply this by the"
    for key, node in counters.items():
        section.put_ratio(node, ratio, "steps_per_update", old=key, text=f"{text} number of agents")


def _put_memory(section: Section) -> None:
    used = False
    for key, node in section.take("use_recurrent").items():
        used = read(bool, node, join(section.old, key))
        value = replace(node, value={} if used else None, text=None)
        section.put(value, "network_settings", "memory", old=key, text="" if used else "null")
    for key, node in section.take("sequence_length", "memory_size").items():
        if used:
            section.put(node, "network_settings", "memory", key, old=key)
        else:
            section.gone(node, key, "is not used here without use_recurrent", warns=False)


def _put_cloning(section: Section) -> None:
    cloning_maps = section.take(*_CLONING)
    # `behavioral_cloning` replaced `pretraining` in 0.13, so it wins where both are given.
    used = next(iter(cloning_maps), None)
    for key, node in cloning_maps.items():
        if key == used:
            _put_map(section, node, key, "behavioral_cloning", BehavioralCloningSettings)
        else:
            section.gone(node, key, f"is not used together with {used}")
    for key, node in section.take("demo_path").items():
        section.gone(node, key, "is used by offline_bc only")


def _put_self_play(section: Section) -> None:
    for key, node in section.take("self_play").items():
        _put_map(section, node, key, "self_play", SelfPlaySettings)
        if isinstance(node.value, dict) and "swap_steps" not in node.value:
            # Release 1 had 20000; the present default of 2000 would change the training.
            section.put_old_default(node, 20000, "self_play", "swap_steps")


def _put_map(section: Section, node: Node, old: str, new: str, cls: type) -> None:
    """Convert a map to the keys of the class `cls`; `_RENAMED` has old names of keys."""
    if node.value is None:
        section.put(node, new, old=old)
        return
    # An empty map is converted, too: it means the feature with its defaults.
    section.behavior[new] = {}
    known = {key: key for key in setting_hints(cls)} | _RENAMED.get(new, {})
    for key, item in entries_of(node, join(section.old, old)).items():
        if key in known:
            section.put(item, new, known[key], old=f"{old}.{key}")
        else:
            section.unknown(item, f"{old}.{key}", known)


def _put_schedules(section: Section) -> None:
    """Write linear schedules of beta and epsilon: until 0.16 both values always decreased."""
    # Today the schedules of beta and epsilon copy a constant schedule of the learning rate.
    rate = section.behavior.get("hyperparameters", {}).get("learning_rate_schedule")
    if section.kind == "ppo" and rate is not None and rate.value == "constant":
        for key in ("beta_schedule", "epsilon_schedule"):
            section.put_old_default(rate, "linear", "hyperparameters", key)


def _put_reward_signals(section: Section) -> None:
    """Convert `reward_signals`, or the single keys that older releases had instead."""
    early = section.take("gamma", "use_curiosity", *_CURIOSITY)
    if "reward_signals" not in section.left:
        _put_early_signals(section, early)
        return
    for key, item in early.items():
        section.gone(item, key, "is not used together with reward_signals")
    node = section.left.pop("reward_signals")
    signals = dict(entries_of(node, join(section.old, "reward_signals")))
    _put_signal_updates(section, signals)
    section.behavior["reward_signals"] = {}
    for name, signal in signals.items():
        _put_signal(section, name, signal)


def _put_early_signals(section: Section, early: dict[str, Node]) -> None:
    # Until 0.8 there was one discount, for the sum of extrinsic and curiosity reward.
    gamma, use_curiosity = early.pop("gamma", None), early.pop("use_curiosity", None)
    if gamma is not None:
        section.put(gamma, "reward_signals", "extrinsic", "gamma", old="gamma")
    path = join(section.old, "use_curiosity")
    if use_curiosity is None or not read(bool, use_curiosity, path):
        if use_curiosity is not None:
            text = "is not needed without curiosity"
            section.gone(use_curiosity, "use_curiosity", text, warns=False)
        for key, item in early.items():
            section.gone(item, key, "is not used without use_curiosity", warns=False)
        return
    empty = replace(use_curiosity, value={}, text=None)
    section.put(empty, "reward_signals", "curiosity", old="use_curiosity")
    for key, item in early.items():
        section.put(item, "reward_signals", "curiosity", *_CURIOSITY[key], old=key)
    if gamma is None:
        section.set(empty, "reward_signals", "extrinsic")
    else:  # gamma discounted the sum of both rewards
        section.set(gamma, "reward_signals", "curiosity", "gamma")


def _put_signal_updates(section: Section, signals: dict[str, Node]) -> None:
    """Convert the update counts of SAC's reward signals, which were keys among the signals."""
    key_of_today = "reward_signal_steps_per_update"
    keys = {"reward_signal_num_update", key_of_today}
    updates = {key: signals.pop(key) for key in sorted(keys & signals.keys())}
    for key, node in updates.items():
        old = f"reward_signals.{key}"
        if section.kind != "sac":
            section.gone(node, old, f"is not used by the trainer {section.kind}", warns=False)
        elif key == key_of_today:
            section.put(node, "hyperparameters", key_of_today, old=old)
        elif key_of_today not in updates:
            # `train_interval` is read from `entries`, because it was removed from `left`.
            interval = section.entries.get("train_interval")
            steps = 1.0 if interval is None else read(Positive, interval, section.old)
            # This conversion is the same as for the policy's updates in `_put_updates`.
            ratio = float(steps / read(Positive, node, join(section.old, old)))
            text = "train_interval / reward_signal_num_update; multiply by the number of agents"
            section.put_ratio(node, ratio, key_of_today, old=old, text=text)


def _put_signal(section: Section, name: str, node: Node) -> None:
    at = f"reward_signals.{name}"
    # An unknown signal is refused, unlike unknown keys: without its reward the run would differ.
    if name not in REWARD_SIGNALS:
        raise unknown_key(node, join(section.old, "reward_signals"), name, REWARD_SIGNALS)
    settings: dict[str, object] = {}
    section.behavior["reward_signals"][name] = settings
    for key, item in entries_of(node, join(section.old, at)).items():
        if key not in SIGNAL_KEYS:
            section.unknown(item, f"{at}.{key}", SIGNAL_KEYS)
        # ML-Agents ignored keys of other signals, so they are dropped with a note only.
        elif name not in SIGNAL_KEYS[key]:
            section.gone(item, f"{at}.{key}", f"is not used by {name}", warns=False)
        else:
            place = ("network_settings", "hidden_units") if key == "encoding_size" else (key,)
            section.put(item, "reward_signals", name, *place, old=f"{at}.{key}")
    if name == "gail" and "network_settings" not in settings:
        units = from_plain(_GAIL_UNITS, node.source, node.line)
        settings["network_settings"] = {"hidden_units": units}
        if section.is_own(node):
            text = f"its networks are {_GAIL_UNITS} units wide, the old default of encoding_size"
            section.changes.note(node, join(section.old, at), text, warns=False)


class FlatFile:
    """The sections of a flat file, with the key path `below`, converted to the present format.

    A section is a map, or the name of another section.
    """

    def __init__(self, sections: dict[str, Node], below: str, changes: Changes) -> None:
        self.sections, self.below, self.changes = sections, below, changes
        self.default: Node | None = None
        self.over_default = dict[str, Node]()
        """Behaviors without the settings that they inherit from the default."""
        self.complete = dict[str, Node]()
        """Behaviors with all settings, including those that they inherit from the default."""
        self.curricula = dict[str, Node]()
        self.refused = dict[str, str]()
        """Behaviors that cannot be trained as written, with the reason."""
        # Without a default section, sections inherit nothing.
        shared = Node({}, "")
        if _DEFAULT in sections:
            shared = self._resolved(_DEFAULT)
            self.default = self._default_settings(shared)
        for name in sections:
            if name != _DEFAULT:
                self._convert(name, shared)
        # A behavior that cannot be trained does not prevent training of the other behaviors.
        if self.refused and not self.complete and self.default is None:
            raise SettingsError(next(iter(self.refused.values())))

    def not_over_default(self) -> str | None:
        """Return a behavior that `mlagents-learn` cannot merge over the default, or None."""
        if self.default is None:
            return None
        trainer = self.default.value["trainer_type"].value
        for name, node in self.over_default.items():
            # In ML-Agents, a behavior cannot remove an inherited reward signal, and cannot inherit
            # from defaults with another trainer.
            signals, kind = node.value.get("reward_signals"), node.value.get("trainer_type")
            takes_away = signals and any(item.value is None for item in signals.value.values())
            if takes_away or (kind is not None and kind.value != trainer):
                return name
        return None

    def _default_settings(self, shared: Node) -> Node | None:
        node, old = self.sections[_DEFAULT], join(self.below, _DEFAULT)
        has_trainer = "trainer" in shared.value
        if not has_trainer or self._cannot_imitate(_DEFAULT, shared.value):
            text = f"has no {'demonstration' if has_trainer else 'trainer'}, so behaviors that are "
            text += "not listed cannot be trained"
            self.changes.note(node, old, text, warns=has_trainer)
            return None
        section = Section(
            entries=shared.value, node=node, old=old, new="default_settings", changes=self.changes
        )
        return convert_section(section)

    def _convert(self, name: str, shared: Node) -> None:
        node, old, new = self.sections[name], join(self.below, name), f"behaviors.{name}"
        target = self._resolved(name)
        # A flat section replaces whole values of the default section, maps included.
        entries = shared.value | target.value
        inherited = frozenset(item.where for _, item in walk(shared))
        # Changes in another section are reported once, where that section is converted.
        elsewhere = inherited
        if target is not node:
            elsewhere |= frozenset(item.where for _, item in walk(target))
            text = f"named the section {node.value}; the settings of that section are copied"
            self.changes.moved(node, old, new, text)
        if self._cannot_imitate(name, entries):
            return
        section = Section(entries=entries, node=node, old=old, new=new, changes=self.changes)
        section.inherited = elsewhere
        full = convert_section(section)
        self.complete[name] = self.over_default[name] = full
        if self.default is not None:
            self.over_default[name] = _over_default(full, self.default, new, inherited)
        if "curriculum" in entries:
            self.curricula[name] = entries["curriculum"]

    def _resolved(self, name: str) -> Node:
        node, passed = self.sections[name], [name]
        while isinstance(node.value, str):
            path, sections = join(self.below, passed[-1]), self.sections
            if node.value in passed:
                circle = " -> ".join([*passed, node.value])
                raise fail(node, path, f"{circle} is a circular reference")
            if node.value not in sections:
                hint = suggestion(node.value, sections)
                raise fail(node, path, f"there is no section {node.value!r}{hint}")
            passed.append(node.value)
            node = sections[node.value]
        if not isinstance(node.value, dict):
            expected = "a map of settings, or the name of another section"
            path = join(self.below, passed[-1])
            raise fail(node, path, f"needs {expected}, got {display(node)}")
        return node

    def _cannot_imitate(self, name: str, entries: dict[str, Node]) -> bool:
        """Return whether a section imitates without a demonstration, and record it as refused."""
        old = join(self.below, name)
        if "trainer" not in entries:
            text = "the 'trainer' key must be set here or in the default section."
            listed = ", ".join(HYPERPARAMETERS)
            raise fail(self.sections[name], old, f"{text} Add one of: {listed}")
        at = entries["trainer"]
        named = choice(at, join(old, "trainer"), (*HYPERPARAMETERS, *IMITATING_TRAINERS))
        cloning = (entries[key].value for key in _CLONING if key in entries)
        # If there is a behavioral_cloning map, the demo_path of the section itself is not used.
        learned_from = next((map_ for map_ in cloning if isinstance(map_, dict)), entries)
        if named not in IMITATING_TRAINERS or learned_from.get("demo_path") is not None:
            return False
        text = (
            f"the trainer {named!r} was removed, and there is no demonstration to learn from. "
            "Record one, and write trainer: ppo with behavioral_cloning: {demo_path: ...}; or "
            "remove this section"
        )
        if name != _DEFAULT:
            self.refused[name] = f"{at.where}: {old}.trainer: {text}."
            self.changes.gone(at, f"{old}.trainer", f"{text}. The section is skipped")
        return True


def _over_default(full: Node, default: Node, path: str, inherited: frozenset[str]) -> Node:
    """Return a behavior that gives the settings of `full` when it is merged over `default`."""
    # In a flat file a section replaces whole values of the default section; the present format
    # merges at every depth. Values that would differ after the merge are therefore written out, and
    # a reward signal that only `default` has becomes null.
    # Complete plain settings are compared, so that equal values in other spellings are equal.
    target = to_map(read(TrainerSettings, full, path))
    kind = {"trainer_type": full.value["trainer_type"]}
    default_alone = behavior_over(replace(full, value=kind), path, expanded(default))
    base = to_map(read(TrainerSettings, default_alone, path))
    return replace(full, value=_difference(full, target, base, inherited))


def _difference(
    full: Node, target: dict[str, Any], base: dict[str, Any], inherited: frozenset[str]
) -> dict[str, Node]:
    """Return entries that change `base` into `target`, and all entries written in the section."""
    entries: dict[str, Node] = {}
    written = full.value if isinstance(full.value, dict) else {}
    for key in {**written, **target}:
        node = written.get(key)
        want, have = target.get(key), base.get(key, _MISSING)
        if isinstance(want, dict) and isinstance(have, dict):
            inner = _difference(node or Node({}, full.source, full.line), want, have, inherited)
            if inner:
                first = next(iter(inner.values()))
                entries[key] = Node(inner, first.source, first.line)
        elif want != have or (node is not None and node.where not in inherited):
            entries[key] = node or from_plain(want, full.source, full.line)
    # null removes an inherited entry, see `behavior_over`.
    taken_away = {key: Node(None, full.source, full.line) for key in base if key not in target}
    return entries | taken_away
