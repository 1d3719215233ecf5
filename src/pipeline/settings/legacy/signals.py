"""Rewards of a flat section: `reward_signals`, and the single keys from before there were any."""

from __future__ import annotations

from dataclasses import replace

from pipeline.settings.legacy.keys import SIGNAL_KEYS, SIGNAL_UPDATES
from pipeline.settings.legacy.section import Section, truth
from pipeline.settings.nodes import Node, from_plain, join
from pipeline.settings.reader import entries_of, read, unknown_key
from pipeline.settings.schema import REWARD_SIGNALS
from pipeline.settings.schema.kinds import Positive

_CURIOSITY = {
    "curiosity_strength": ("strength",),
    "curiosity_enc_size": ("network_settings", "hidden_units"),
}
_GAIL_UNITS = 64
"""Width of GAIL's network where a file said nothing; today it is 128."""


def put_reward_signals(section: Section, kind: str, entries: dict[str, Node]) -> None:
    """Fill in the behavior's `reward_signals`.

    Raises:
        SettingsError: A value is not one that the key ever had.
    """
    node = entries.pop("reward_signals", None)
    early = {
        key: entries.pop(key) for key in ("gamma", "use_curiosity", *_CURIOSITY) if key in entries
    }
    if node is None:
        _put_early(section, early)
        return
    for key, item in early.items():
        section.gone(item, key, "is not used beside reward_signals")
    signals = dict(entries_of(node, join(section.old, "reward_signals")))
    updates = {key: signals.pop(key) for key in SIGNAL_UPDATES if key in signals}
    _put_updates(section, kind, updates)
    section.made["reward_signals"] = {}
    for name, signal in signals.items():
        _put_signal(section, name, signal)


def _put_early(section: Section, early: dict[str, Node]) -> None:
    """`gamma` and the keys of curiosity, until 0.8."""
    gamma, wanted = early.pop("gamma", None), early.pop("use_curiosity", None)
    if gamma is not None:
        section.put(gamma, "reward_signals", "extrinsic", "gamma", old="gamma")
    if wanted is not None and read(bool, truth(wanted), join(section.old, "use_curiosity")):
        _put_early_curiosity(section, wanted, gamma, early)
        return
    if wanted is not None:
        section.gone(wanted, "use_curiosity", "needs no equal: there is no curiosity", warns=False)
    for key, item in early.items():
        section.gone(item, key, "is not used without use_curiosity", warns=False)


def _put_early_curiosity(
    section: Section, wanted: Node, gamma: Node | None, sizes: dict[str, Node]
) -> None:
    empty = replace(wanted, value={}, text=None)
    section.put(empty, "reward_signals", "curiosity", old="use_curiosity")
    if sizes or gamma is not None:
        section.made["reward_signals"]["curiosity"] = {}
    for key, item in sizes.items():
        section.put(item, "reward_signals", "curiosity", *_CURIOSITY[key], old=key)
    if gamma is None:
        section.made["reward_signals"]["extrinsic"] = empty
    else:  # both rewards were added up before they were discounted
        section.made["reward_signals"]["curiosity"]["gamma"] = gamma


def _put_updates(section: Section, kind: str, updates: dict[str, Node]) -> None:
    """How often SAC trains the reward signals."""
    place = ("hyperparameters", "reward_signal_steps_per_update")
    for key, node in updates.items():
        old = f"reward_signals.{key}"
        if kind != "sac":
            section.gone(node, old, f"is not used by the trainer {kind}", warns=False)
        elif key == "reward_signal_steps_per_update":
            section.put(node, *place, old=old)
        elif "reward_signal_steps_per_update" not in updates:
            interval = section.entries.get("train_interval")
            steps = 1.0 if interval is None else read(Positive, interval, section.old)
            ratio = float(steps / read(Positive, node, join(section.old, old)))
            section.put(
                replace(node, value=ratio, text=str(ratio)),
                *place,
                old=old,
                text="train_interval / reward_signal_num_update; multiply it by the number of "
                "agents",
                warns=True,
            )


def _put_signal(section: Section, name: str, node: Node) -> None:
    at = f"reward_signals.{name}"
    if name not in REWARD_SIGNALS:
        raise unknown_key(node, join(section.old, "reward_signals"), name, REWARD_SIGNALS)
    made: dict[str, object] = {}
    section.made["reward_signals"][name] = made
    for key, item in entries_of(node, join(section.old, at)).items():
        old = f"{at}.{key}"
        if key == "encoding_size":
            if name == "extrinsic":
                section.gone(item, old, "is not used by extrinsic", warns=False)
            else:
                place = ("reward_signals", name, "network_settings", "hidden_units")
                section.put(item, *place, old=old)
        elif key in SIGNAL_KEYS:
            _put_signal_key(section, name, key, item)
        else:
            section.unknown(item, old, SIGNAL_KEYS)
    if name == "gail" and "network_settings" not in made:
        units = from_plain(_GAIL_UNITS, node.source, node.line)
        made["network_settings"] = {"hidden_units": units}
        if section.is_own(node):
            text = f"its networks are {_GAIL_UNITS} units wide, as they were without encoding_size"
            section.changes.note(node, join(section.old, at), text, warns=False)


def _put_signal_key(section: Section, name: str, key: str, item: Node) -> None:
    at = f"reward_signals.{name}"
    known = ("strength", "gamma") if name == "extrinsic" else SIGNAL_KEYS
    demonstrates = key in ("demo_path", "use_actions", "use_vail")
    if key not in known or (demonstrates and name != "gail"):
        section.gone(item, f"{at}.{key}", f"is not used by {name}", warns=False)
        return
    value = truth(item) if key in ("use_actions", "use_vail") else item
    section.put(value, "reward_signals", name, key, old=f"{at}.{key}")
