"""A flat section's keys, one group after another, to those of a present behavior."""

from __future__ import annotations

from dataclasses import replace

from pipeline.settings.legacy.keys import (
    CLONING_KEYS,
    CLONING_TRAINERS,
    FLAT_KEYS,
    GONE,
    MOVED,
    REQUIRED,
    SELF_PLAY_KEYS,
)
from pipeline.settings.legacy.section import Section, truth
from pipeline.settings.legacy.signals import put_reward_signals
from pipeline.settings.nodes import Node, fail, from_plain, join
from pipeline.settings.reader import choice, entries_of, read, setting_hints
from pipeline.settings.schema import HYPERPARAMETERS
from pipeline.settings.schema.kinds import Positive

_BOOLS = ("normalize", "threaded", "save_replay_buffer")


def trainer_of(entries: dict[str, Node], node: Node, path: str) -> str:
    """The trainer that a section names.

    Raises:
        SettingsError: It names none, or one that never was.
    """
    if "trainer" not in entries:
        raise fail(
            node,
            path,
            "the 'trainer' key must be set here or in the default section. "
            f"Add one of: {', '.join(HYPERPARAMETERS)}",
        )
    return choice(entries["trainer"], join(path, "trainer"), (*HYPERPARAMETERS, *CLONING_TRAINERS))


def demonstration_of(entries: dict[str, Node]) -> Node | None:
    """The demonstration that a section of a trainer that only imitates could learn from."""
    for key in ("behavioral_cloning", "pretraining"):
        if key in entries and isinstance(entries[key].value, dict):
            given: dict[str, Node] = entries[key].value
            return given.get("demo_path")
    return entries.get("demo_path")


def put_behavior(section: Section) -> None:
    """Fill in the behavior that a section describes.

    Raises:
        SettingsError: A value is not one that the key ever had.
    """
    entries = dict(section.entries)
    named = trainer_of(entries, section.node, section.old)
    node = entries.pop("trainer")
    kind = named
    if named in CLONING_TRAINERS:
        kind = "ppo"
        section.put(
            replace(node, value="ppo", text="ppo"),
            "trainer_type",
            old="trainer",
            text=f"{named!r} only imitated; ppo with behavioral_cloning learns from the "
            "environment's reward as well",
            warns=True,
        )
        _put_imitation(section, entries)
    else:
        section.put(node, "trainer_type", old="trainer")
        _note_missing(section, kind, entries)
    _put_moved(section, kind, entries)
    _put_updates(section, kind, entries)
    _put_memory(section, entries)
    put_reward_signals(section, kind, entries)
    _put_cloning(section, entries)
    _put_self_play(section, entries)
    _put_schedules(section, kind)
    for key, item in entries.items():
        if key in GONE:
            section.gone(item, key, f"no equal any more: {GONE[key]}", warns=key == "burn_in_ratio")
        elif key != "curriculum":  # which is not the behavior's any more
            section.unknown(item, key, FLAT_KEYS)


def _note_missing(section: Section, kind: str, entries: dict[str, Node]) -> None:
    missing = [key for key in REQUIRED.get(kind, ()) if key not in entries]
    if missing:
        section.changes.note(
            section.node,
            section.old,
            f"keys that the {kind} trainer needed are missing: {', '.join(missing)}; today's "
            "defaults are used",
        )


def _put_moved(section: Section, kind: str, entries: dict[str, Node]) -> None:
    known = setting_hints(HYPERPARAMETERS[kind])
    for key in [key for key in entries if key in MOVED]:
        node = entries.pop(key)
        place = MOVED[key]
        if place[0] == "hyperparameters" and key not in known:
            section.gone(node, key, f"is not used by the trainer {kind}", warns=False)
            continue
        text = ""
        if key == "init_path":
            text = "a folder of TensorFlow checkpoints then; today a .pt file"
        section.put(
            truth(node) if key in _BOOLS else node, *place, old=key, text=text, warns=bool(text)
        )


def _put_updates(section: Section, kind: str, entries: dict[str, Node]) -> None:
    """SAC's `num_update` and `train_interval`, which counted steps of the environment."""
    given = {key: entries.pop(key) for key in ("train_interval", "num_update") if key in entries}
    used = kind == "sac" and "steps_per_update" not in section.made.get("hyperparameters", {})
    if not used:
        why = f"the trainer {kind}" if kind != "sac" else "SAC beside steps_per_update"
        for key, node in given.items():
            section.gone(node, key, f"is not used by {why}", warns=False)
        return
    numbers = {"train_interval": 1.0, "num_update": 1.0}
    for key, node in given.items():
        numbers[key] = read(Positive, node, join(section.old, key))
    ratio = numbers["train_interval"] / numbers["num_update"]
    for key, node in given.items():
        section.put(
            replace(node, value=ratio, text=str(ratio)),
            *("hyperparameters", "steps_per_update"),
            old=key,
            text="train_interval / num_update; it counts the steps of every agent, so multiply it "
            "by the number of agents",
            warns=True,
        )


def _put_memory(section: Section, entries: dict[str, Node]) -> None:
    recurrent = entries.pop("use_recurrent", None)
    sizes = {key: entries.pop(key) for key in ("sequence_length", "memory_size") if key in entries}
    used = False
    if recurrent is not None:
        used = read(bool, truth(recurrent), join(section.old, "use_recurrent"))
        place = replace(recurrent, value={} if used else None, text=None)
        text = "" if used else "null"
        section.put(place, "network_settings", "memory", old="use_recurrent", text=text)
    if used:
        section.made["network_settings"]["memory"] = {}
    for key, node in sizes.items():
        if used:
            section.put(node, "network_settings", "memory", key, old=key)
        else:
            section.gone(node, key, "is not used here without use_recurrent", warns=False)


def _put_imitation(section: Section, entries: dict[str, Node]) -> None:
    """`demo_path` and `batch_size` of a trainer that only imitates."""
    if "demo_path" not in entries or "behavioral_cloning" in entries or "pretraining" in entries:
        return
    section.put(entries.pop("demo_path"), "behavioral_cloning", "demo_path", old="demo_path")
    if "batch_size" in entries:
        node = entries.pop("batch_size")
        section.put(node, "behavioral_cloning", "batch_size", old="batch_size")


def _put_cloning(section: Section, entries: dict[str, Node]) -> None:
    given = [key for key in ("behavioral_cloning", "pretraining") if key in entries]
    nodes = [(key, entries.pop(key)) for key in given]
    for key, node in nodes[1:]:
        section.gone(node, key, f"is not used beside {nodes[0][0]}")
    if nodes:
        key, node = nodes[0]
        _put_map(section, node, key, "behavioral_cloning", dict.fromkeys(CLONING_KEYS))
    if "demo_path" in entries:
        section.gone(entries.pop("demo_path"), "demo_path", "is used by offline_bc only")


def _put_self_play(section: Section, entries: dict[str, Node]) -> None:
    node = entries.pop("self_play", None)
    if node is None:
        return
    _put_map(section, node, "self_play", "self_play", SELF_PLAY_KEYS)
    if isinstance(node.value, dict) and "swap_steps" not in node.value:
        _put_old_default(section, node, 20000, "self_play", "swap_steps")


def _put_map(
    section: Section, node: Node, old: str, new: str, known: dict[str, str] | dict[str, None]
) -> None:
    """A map whose keys are those of `known`, some under another name."""
    if node.value is None:
        section.put(node, new, old=old)
        return
    section.made[new] = {}
    for key, item in entries_of(node, join(section.old, old)).items():
        if key in known:
            section.put(item, new, known[key] or key, old=f"{old}.{key}")
        else:
            section.unknown(item, f"{old}.{key}", known)


def _put_schedules(section: Section, kind: str) -> None:
    """Until 0.16, beta and epsilon fell whatever the learning rate did."""
    made = section.made.get("hyperparameters", {})
    rate = made.get("learning_rate_schedule")
    if kind == "ppo" and rate is not None and rate.value == "constant":
        for key in ("beta_schedule", "epsilon_schedule"):
            _put_old_default(section, rate, "linear", "hyperparameters", key)


def _put_old_default(section: Section, place: Node, value: object, *keys: str) -> None:
    target = section.made
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    target[keys[-1]] = from_plain(value, place.source, place.line)
    if section.is_own(place):
        at = join(section.new, ".".join(keys))
        text = f"{at} is {value}, which was the value of then"
        section.changes.note(place, section.old, text, warns=False)
