"""Flat files: a default section, and for each behavior a section or another section's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import SettingsError
from pipeline.settings.inheritance import behavior_over, expanded
from pipeline.settings.legacy.behavior import Section, convert_section
from pipeline.settings.legacy.formats import IMITATING_TRAINERS, Changes
from pipeline.settings.nodes import Node, fail, from_plain, join
from pipeline.settings.reader import choice, display, read, suggestion, to_map
from pipeline.settings.schema import HYPERPARAMETERS, TrainerSettings

_DEFAULT = "default"
_MISSING = object()


@dataclass(kw_only=True, slots=True)
class FlatFile:
    """The sections of a flat file, and what they become."""

    sections: dict[str, Node]
    """Behaviors by name, `default` among them: maps, or the name of another section."""
    below: str
    """Key path of the sections: nothing, or `behaviors`."""
    changes: Changes
    """Where changes are recorded."""
    default: Node | None = None
    """`default_settings`, or None where there are none."""
    over_default: dict[str, Node] = field(default_factory=dict)
    """Behaviors as they are laid over the default."""
    complete: dict[str, Node] = field(default_factory=dict)
    """The same behaviors with everything that they take from the default."""
    curricula: dict[str, Node] = field(default_factory=dict)
    """Curricula by behavior, where sections held them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Behaviors that cannot be trained as they are written, and why."""

    def convert(self) -> None:
        """Bring every section to the present format."""
        shared = Node({}, "")
        if _DEFAULT in self.sections:
            shared = self._resolved(_DEFAULT)
            self.default = self._default_settings(shared)
        for name in self.sections:
            if name != _DEFAULT:
                self._convert(name, shared)
        # One behavior that cannot be trained does not keep the others from it.
        if self.refused and not self.complete and self.default is None:
            raise SettingsError(next(iter(self.refused.values())))

    def not_over_default(self) -> str | None:
        """Return a behavior that `mlagents-learn` could not lay over the default, if any."""
        if self.default is None:
            return None
        trainer = self.default.value["trainer_type"].value
        for name, node in self.over_default.items():
            signals, kind = node.value.get("reward_signals"), node.value.get("trainer_type")
            takes_away = signals and any(item.value is None for item in signals.value.values())
            if takes_away or (kind is not None and kind.value != trainer):
                return name
        return None

    def _default_settings(self, shared: Node) -> Node | None:
        node, old = self.sections[_DEFAULT], join(self.below, _DEFAULT)
        if "trainer" not in shared.value:
            text = "has no trainer, so behaviors that are not listed cannot be trained"
            self.changes.note(node, old, text, warns=False)
            return None
        if self._cannot_imitate(_DEFAULT, shared.value):
            text = "has no demonstration, so behaviors that are not listed cannot be trained"
            self.changes.note(node, old, text)
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
        inherited = frozenset(_places(shared))
        # Changes in another section are reported once, where that section is converted.
        elsewhere = inherited
        if target is not node:
            elsewhere |= frozenset(_places(target))
            text = f"stood for {node.value}, whose settings are written out"
            self.changes.moved(node, old, new, text)
        if self._cannot_imitate(name, entries):
            return
        full = convert_section(
            Section(
                entries=entries,
                node=node,
                old=old,
                new=new,
                changes=self.changes,
                inherited=elsewhere,
            )
        )
        self.complete[name] = self.over_default[name] = full
        if self.default is not None:
            self.over_default[name] = _over_default(full, self.default, new, inherited)
        if "curriculum" in entries:
            self.curricula[name] = entries["curriculum"]

    def _resolved(self, name: str) -> Node:
        """Return the map of a section, or of the section whose name stands in its place."""
        node, passed = self.sections[name], [name]
        while isinstance(node.value, str):
            path, sections = join(self.below, passed[-1]), self.sections
            if node.value in passed:
                raise fail(node, path, f"{' -> '.join([*passed, node.value])} goes in a circle")
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
        """Whether a section imitates without a demonstration; if so, record it.

        A section that names no trainer, or one that never existed, is refused.
        """
        old = join(self.below, name)
        if "trainer" not in entries:
            text = "the 'trainer' key must be set here or in the default section."
            listed = ", ".join(HYPERPARAMETERS)
            raise fail(self.sections[name], old, f"{text} Add one of: {listed}")
        at = entries["trainer"]
        named = choice(at, join(old, "trainer"), (*HYPERPARAMETERS, *IMITATING_TRAINERS))
        if named not in IMITATING_TRAINERS or _demonstration_of(entries) is not None:
            return False
        text = (
            f"the trainer {named!r} is no more, and there is no demonstration to learn from. "
            "Record one, and write trainer: ppo with behavioral_cloning: {demo_path: ...}; or "
            "remove this section"
        )
        if name != _DEFAULT:
            self.refused[name] = f"{at.where}: {old}.trainer: {text}."
            self.changes.gone(at, f"{old}.trainer", f"{text}. It is left out")
        return True


def _demonstration_of(entries: dict[str, Node]) -> Node | None:
    """Return the demonstration from which an imitating section could learn, if it has any."""
    for key in ("behavioral_cloning", "pretraining"):
        if key in entries and isinstance(entries[key].value, dict):
            section: dict[str, Node] = entries[key].value
            return section.get("demo_path")
    return entries.get("demo_path")


def _over_default(full: Node, default: Node, path: str, inherited: frozenset[str]) -> Node:
    """Return a behavior that has the settings of `full` once it is laid over `default`.

    In a flat file a section replaces whole values of the default section; in the present format it
    is laid over them at every depth. Values that would differ by this are written out, and a reward
    signal that only the default has becomes null. `inherited` has the places of values that do not
    stand in the behavior's own section.
    """
    target = to_map(read(TrainerSettings, full, path))
    kind = {"trainer_type": full.value["trainer_type"]}
    default_alone = behavior_over(replace(full, value=kind), path, expanded(default))
    base = to_map(read(TrainerSettings, default_alone, path))
    return replace(full, value=_difference(full, target, base, inherited))


def _difference(
    full: Node, target: dict[str, Any], base: dict[str, Any], inherited: frozenset[str]
) -> dict[str, Node]:
    """Return the entries that turn `base` into `target`, and all that the section itself has.

    `full` has the nodes of written values; other values get nodes with the place of `full`.
    """
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
    taken_away = {key: Node(None, full.source, full.line) for key in base if key not in target}
    return entries | taken_away


def _places(node: Node) -> Iterator[str]:
    """Yield the place of every value of a section."""
    if not isinstance(node.value, dict):
        return
    for item in node.value.values():
        yield item.where
        yield from _places(item)
