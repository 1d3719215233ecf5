"""Flat files: a default section, a section for each behavior, and names that stand for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError
from pipeline.settings.legacy.behavior import demonstration_of, put_behavior, trainer_of
from pipeline.settings.legacy.inherited import inherits_alone, over_default
from pipeline.settings.legacy.keys import CLONING_TRAINERS
from pipeline.settings.legacy.section import Section
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import shown, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.settings.legacy.changes import Changes

_DEFAULT = "default"


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
        """Bring every section to the present format.

        Raises:
            SettingsError: A section has no trainer, an unknown one, or a value that is not allowed;
                or none of them can be used.
        """
        if _DEFAULT in self.sections:
            self.default = self._default_settings()
        for name in self.sections:
            if name != _DEFAULT:
                self._convert(name)
        if self.refused and not self.complete and self.default is None:
            raise SettingsError(next(iter(self.refused.values())))

    def not_over_default(self) -> str | None:
        """A behavior that `mlagents-learn` could not lay over the default, if there is one."""
        if self.default is None:
            return None
        for name, node in self.over_default.items():
            if not inherits_alone(node, self.default):
                return name
        return None

    def _default_settings(self) -> Node | None:
        node, old = self.sections[_DEFAULT], join(self.below, _DEFAULT)
        entries = self._resolved(_DEFAULT).value
        if "trainer" not in entries:
            text = "has no trainer, so behaviors that are not listed cannot be trained"
            self.changes.note(node, old, text, warns=False)
            return None
        if self._cannot_imitate(_DEFAULT, entries):
            text = "has no demonstration, so behaviors that are not listed cannot be trained"
            self.changes.note(node, old, text)
            return None
        section = Section(
            entries=entries, node=node, old=old, new="default_settings", changes=self.changes
        )
        put_behavior(section)
        return section.behavior()

    def _convert(self, name: str) -> None:
        node, old, new = self.sections[name], join(self.below, name), f"behaviors.{name}"
        target = self._resolved(name)
        if target is not node:
            text = f"stood for {node.value}, whose settings are written out"
            self.changes.moved(node, old, new, text)
        shared = Node({}, node.source)
        if _DEFAULT in self.sections:
            shared = self._resolved(_DEFAULT)
        entries = shared.value | target.value
        if self._cannot_imitate(name, entries):
            return
        inherited = frozenset(_places(shared))
        elsewhere = inherited if target is node else inherited | frozenset(_places(target))
        section = Section(
            entries=entries,
            node=node,
            old=old,
            new=new,
            changes=self.changes,
            inherited=elsewhere,
        )
        put_behavior(section)
        full = section.behavior()
        self.complete[name] = full
        self.over_default[name] = full
        if self.default is not None:
            self.over_default[name] = over_default(
                full, self.default, new, is_own=lambda one: _place(one) not in inherited
            )
        if "curriculum" in entries:
            self.curricula[name] = entries["curriculum"]

    def _resolved(self, name: str) -> Node:
        """The map of a section, or of that which it stands for."""
        node, passed = self.sections[name], [name]
        while isinstance(node.value, str):
            path, known = join(self.below, passed[-1]), self.sections
            if node.value in passed:
                raise fail(node, path, f"{' -> '.join([*passed, node.value])} goes in a circle")
            if node.value not in known:
                hint = suggestion(node.value, known)
                raise fail(node, path, f"there is no section {node.value!r}{hint}")
            passed.append(node.value)
            node = known[node.value]
        if not isinstance(node.value, dict):
            raise fail(
                node,
                join(self.below, passed[-1]),
                f"needs a map of settings, or the name of another section, got {shown(node)}",
            )
        return node

    def _cannot_imitate(self, name: str, entries: dict[str, Node]) -> bool:
        """Whether a section only imitates, and has nothing to imitate; that is then recorded."""
        old = join(self.below, name)
        named = trainer_of(entries, self.sections[name], old)
        if named not in CLONING_TRAINERS or demonstration_of(entries) is not None:
            return False
        text = (
            f"the trainer {named!r} is no more, and there is no demonstration to learn from. "
            "Record one, and write trainer: ppo with behavioral_cloning: {demo_path: ...}; or "
            "remove this section"
        )
        at = entries["trainer"]
        if name != _DEFAULT:
            self.refused[name] = f"{at.where}: {old}.trainer: {text}."
            self.changes.gone(at, f"{old}.trainer", f"{text}. It is left out")
        return True


def _place(node: Node) -> tuple[str, int | None]:
    return node.source, node.line


def _places(node: Node) -> Iterator[tuple[str, int | None]]:
    """Where everything stands that a section has."""
    if not isinstance(node.value, dict):
        return
    for item in node.value.values():
        yield _place(item)
        yield from _places(item)
