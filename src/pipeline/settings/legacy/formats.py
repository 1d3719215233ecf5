"""The formats of older ML-Agents: their keys, how to tell them apart, and how to read the files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import SettingsError
from pipeline.settings.nodes import Node, fail
from pipeline.settings.reader import entries_of, setting_hints
from pipeline.settings.schema import RunSettings
from pipeline.settings.yaml_file import Repeat, parse_yaml, read_text, read_yaml

Kind = Literal["trainer", "curriculum", "sampler"]

IMITATING_TRAINERS = ("imitation", "online_bc", "offline_bc")
"""Trainers that only imitated; `imitation` until 0.5, the others from 0.6 to 0.12."""

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
"""Keys of a flat section whose value only has another place in a behavior."""

_SET_BY_PROGRAM = "ML-Agents set it itself; runs are written below checkpoint_settings.results_dir"
GONE: dict[str, str] = {
    "summary_path": _SET_BY_PROGRAM,
    "model_path": _SET_BY_PROGRAM,
    "graph_scope": _SET_BY_PROGRAM,
    "burn_in_ratio": "sequences are trained on from their first step",
    "brain_to_imitate": "nobody is imitated while playing any more; name a demonstration in "
    "demo_path",
    "batches_per_epoch": "see behavioral_cloning.samples_per_update and num_epoch",
}
"""Keys without an equal: why, and what to use."""

_RESHAPED = """
    trainer gamma reward_signals use_curiosity curiosity_strength curiosity_enc_size use_recurrent
    sequence_length memory_size num_update train_interval pretraining behavioral_cloning self_play
    demo_path curriculum"""
FLAT_KEYS = {*MOVED, *GONE, *_RESHAPED.split()}
"""Every key that a section of a flat file may have."""

_ALWAYS = """
    batch_size buffer_size hidden_units learning_rate max_steps normalize num_layers time_horizon
    summary_freq use_recurrent"""
REQUIRED: dict[str, list[str]] = {
    "ppo": f"{_ALWAYS} beta epsilon lambd num_epoch".split(),
    "sac": f"{_ALWAYS} buffer_init_steps init_entcoef tau".split(),
}
"""Keys without which ML-Agents did not start, beside those that were renamed later."""

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
"""Keys of a reward signal, and the signals that read each."""
CURRICULUM_KEYS = ["measure", "thresholds", "min_lesson_length", "signal_smoothing", "parameters"]
"""The fields of one curriculum."""
INTERVAL = "resampling-interval"
SAMPLER_TYPES = ("sampler-type", "sampler_type")
"""Both spellings of the key that names a sampler."""
_SECTIONS = ("curriculum", "parameter_randomization")
_NEW_IN_A_BEHAVIOR = {"trainer_type", "hyperparameters", "network_settings"}


class Family(Enum):
    """The formats that a trainer configuration may have; the value is its name in messages."""

    FLAT = "ML-Agents 0.3 to 0.16 (a section with all keys for each behavior)"
    FLAT_BEHAVIORS = "ML-Agents 0.16 to 0.17 ('behaviors' with the keys of a flat file)"
    SECTIONS = "ML-Agents 0.17 ('curriculum' or 'parameter_randomization' of their own)"
    PRESENT = "ML-Agents 0.18 and later"


def kind_of(document: Node) -> Kind:
    """Return the kind of a document, by its keys; in doubt it is a trainer configuration."""
    entries = _map(document)
    # Keys of a trainer file first: in one, curricula and samplers may be sections.
    if entries.keys() & {*setting_hints(RunSettings), *_SECTIONS, "default"}:
        return "trainer"
    if is_curriculum(document) or any(is_curriculum(item) for item in entries.values()):
        return "curriculum"
    named = any(_map(item).keys() & {*SAMPLER_TYPES} for item in entries.values())
    return "sampler" if INTERVAL in entries or named else "trainer"


def is_curriculum(node: Node) -> bool:
    """Whether this is the map of a single curriculum, perhaps with a field missing."""
    # Two keys, since one alone may be the name of a parameter or a behavior.
    return len(_map(node).keys() & set(CURRICULUM_KEYS)) >= 2


def family_of(document: Node) -> Family:
    """Return the format of a trainer configuration."""
    entries = _map(document)
    if "behaviors" in entries and any(map(is_flat, _map(entries["behaviors"]).values())):
        return Family.FLAT_BEHAVIORS
    if any(key in entries for key in _SECTIONS):
        return Family.SECTIONS
    if entries.keys() & set(setting_hints(RunSettings)):
        return Family.PRESENT
    # From here on nothing stands at the top but names of behaviors, or slips of the pen.
    has_default = "default" in entries and isinstance(entries["default"].value, dict)
    # A section without its trainer is a mistake in a flat file, and not an unknown key.
    flat = any(
        is_flat(item) or (len(_map(item).keys() & FLAT_KEYS) >= 2 and not has_present_keys(item))
        for item in entries.values()
    )
    return Family.FLAT if has_default or flat else Family.PRESENT


def is_flat(node: Node) -> bool:
    """Whether this is a section of a flat file that names its trainer."""
    return "trainer" in _map(node) and not has_present_keys(node)


def has_present_keys(node: Node) -> bool:
    """Whether this is a behavior with keys that flat sections never had."""
    return bool(_map(node).keys() & _NEW_IN_A_BEHAVIOR)


def _map(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


@dataclass(frozen=True, slots=True)
class FormatChange:
    """A change of one key of an old file, or a note about it."""

    kind: Literal["moved", "gone", "note"]
    """Whether the key has a new place, has no equal any more, or is only remarked on."""
    where: str
    """`file:line` of the key."""
    old: str
    """Its key path in the old file."""
    new: str
    """Its key path in the present format; empty where it has none."""
    text: str
    """Why, and what to use instead."""
    warns: bool
    """Whether a user who only trains should be told as well."""

    def __str__(self) -> str:
        """One line about the change."""
        if self.kind == "moved":
            note = f" ({self.text})" if self.text else ""
            return f"{self.where}: {self.old} -> {self.new}{note}"
        return f"{self.where}: {self.old}: {self.text}"


@dataclass(slots=True)
class Changes:
    """Changes made while a file was brought to the present format, in order."""

    entries: list[FormatChange] = field(default_factory=list)

    def moved(self, node: Node, old: str, new: str, text: str = "", *, warns: bool = False) -> None:
        """Record that the value at `old` moved to `new`."""
        self.entries.append(FormatChange("moved", node.where, old, new, text, warns))

    def gone(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Record that `old` has no equivalent today."""
        self.entries.append(FormatChange("gone", node.where, old, "", text, warns))

    def note(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Say something about `old` that a user should know."""
        self.entries.append(FormatChange("note", node.where, old, "", text, warns))


def read_document(path: Path, *, what: str = "Config file", changes: Changes | None = None) -> Node:
    """Return the content of a file, read as JSON when its name ends so, else as YAML.

    If a key is written twice in a file of an older format, its last value counts, as it did then;
    this is noted in `changes`.
    """
    repeats: list[Repeat] = []
    read = _read_json if path.suffix == ".json" else read_yaml
    document = read(path, what=what, repeats=repeats)
    # Whether repeated keys are allowed is known only when the file has been read.
    if repeats and kind_of(document) == "trainer" and family_of(document) is Family.PRESENT:
        read(path, what=what)  # which refuses the first of them
    if changes is not None:
        text = "written twice, first in line {}; the last value counts, as it did then"
        for repeat in repeats:
            changes.note(repeat.node, str(repeat.node.value), text.format(repeat.first))
    return document


def _read_json(path: Path, *, what: str, repeats: list[Repeat] | None = None) -> Node:
    """Return the content of a JSON file, with lines; arguments as for `read_yaml`."""
    text = read_text(path, what=what)
    try:
        # Checked as JSON and then read as YAML, which remembers lines.
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path}:{error.lineno}: cannot be read as JSON: {error.msg} (column {error.colno})."
        ) from error
    except ValueError as error:
        raise SettingsError(f"{path}: cannot be read as JSON: {error}.") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: the values are nested too deeply.") from error
    # JSON is YAML but for tabs, which can only stand between its values.
    return parse_yaml(text.replace("\t", " "), source=str(path), repeats=repeats)


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def read_curricula(path: Path, behaviors: list[str], changes: Changes) -> dict[str, Node]:
    """Return curricula by name, of a file or of a folder with a JSON file for each behavior."""
    if not path.is_dir():
        return _by_behavior(read_part(path, "curriculum", changes), behaviors, path.stem)
    curricula = {}
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or file.suffix == ".meta":  # Unity lays one beside every file
            continue
        if file.suffix != ".json":
            raise SettingsError(
                f"{file}: a folder of curricula holds only <Behavior>.json files. Move this one."
            )
        curricula[file.stem] = read_document(file, what="Curriculum file", changes=changes)
    if not curricula:
        raise SettingsError(f"{path}: the folder holds no <Behavior>.json file.")
    return curricula


def read_part(path: Path, expected: Kind, changes: Changes) -> Node:
    """Return the content of a curriculum or sampler file; `changes` gets what a user should know.

    A file of another kind is refused where its keys leave no doubt.
    """
    document = read_document(path, what=f"{expected.capitalize()} file", changes=changes)
    kind = kind_of(document)
    # "trainer" is also the answer in doubt.
    if kind not in (expected, "trainer") or "behaviors" in _map(document):
        called, option = {
            "trainer": ("a trainer configuration", "the trainer configuration"),
            "curriculum": ("a curriculum", "--curriculum"),
            "sampler": ("a sampler file", "--sampler"),
        }[kind]
        raise SettingsError(
            f"{path}: this is {called}, and not a {expected} file. Give it as {option}."
        )
    return document


def _by_behavior(document: Node, behaviors: list[str], stem: str) -> dict[str, Node]:
    """Return the curricula of a file by behavior; find out the behavior of a single curriculum."""
    entries = entries_of(document, "")
    if not entries:
        raise fail(document, "", "holds no curriculum; remove the file or fill it in")
    if not (is_curriculum(document) or entries.keys() & set(CURRICULUM_KEYS)):
        return entries
    if stem in behaviors or not behaviors:
        return {stem: document}
    if len(behaviors) > 1:
        names = " or ".join(f"{name}.json" for name in behaviors[:3])
        text = "it cannot be told which behavior this curriculum measures; name the file after it"
        raise fail(document, "", f"{text}: {names}")
    return {behaviors[0]: document}
