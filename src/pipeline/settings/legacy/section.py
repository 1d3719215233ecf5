"""One section of a flat file, on its way to a behavior of the present format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.settings.nodes import Node, join
from pipeline.settings.reader import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.settings.legacy.changes import Changes

_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}


@dataclass(kw_only=True, slots=True)
class Section:
    """The keys that a section has, and the map that it becomes."""

    entries: dict[str, Node]
    """The keys of the section over those of the default section."""
    node: Node
    """The section itself, for its place."""
    old: str
    """Its key path in the old file."""
    new: str
    """Its key path in the present format."""
    changes: Changes
    """Where changes are recorded."""
    inherited: frozenset[tuple[str, int | None]] = frozenset()
    """Places of keys that another section has brought, and which are recorded there."""
    made: dict[str, Any] = field(default_factory=dict)
    """The behavior so far: nodes in nested dictionaries."""

    def is_own(self, node: Node) -> bool:
        """Whether the section itself has the key."""
        return (node.source, node.line) not in self.inherited

    def put(self, node: Node, *place: str, old: str, text: str = "", warns: bool = False) -> None:
        """Give the behavior a value at `place`, which stood at the section's key `old`."""
        target = self.made
        for key in place[:-1]:
            target = target.setdefault(key, {})
        target[place[-1]] = node
        if self.is_own(node):
            new = join(self.new, ".".join(place))
            self.changes.moved(node, join(self.old, old), new, text, warns=warns)

    def gone(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Record that a key has no equal any more, where the section itself has it."""
        if self.is_own(node):
            self.changes.gone(node, join(self.old, old), text, warns=warns)

    def unknown(self, node: Node, old: str, known: Iterable[str]) -> None:
        """Record a key that ML-Agents ignored, and the one that was perhaps meant."""
        key = old.rsplit(".", maxsplit=1)[-1]
        self.gone(node, old, f"unknown key {key!r} is ignored, as it was{suggestion(key, known)}")

    def behavior(self) -> Node:
        """The behavior as a map."""
        return _node(self.made, self.node)


def truth(node: Node) -> Node:
    """The value with YAML 1.1's `yes`, `no`, `on` and `off` as what they meant."""
    said = _YAML_1_1.get(node.value.lower()) if isinstance(node.value, str) else None
    return node if said is None else replace(node, value=said)


def _node(value: Any, place: Node) -> Node:
    if isinstance(value, Node):
        return value
    entries = {key: _node(item, place) for key, item in value.items()}
    first = next(iter(entries.values()), place)
    return Node(entries, first.source, first.line)
