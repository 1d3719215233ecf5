"""What bringing a file to the present format has changed, key by key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipeline.settings.nodes import Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What became of one key, or what was noticed about it."""

    kind: Literal["moved", "gone", "note"]
    """Whether the key has a new place, has no equal any more, or is only remarked on."""
    where: str
    """`file:line` of the key."""
    old: str
    """Its key path in the old file."""
    new: str = ""
    """Its key path in the present format."""
    text: str = ""
    """Why, and what to use instead."""
    warns: bool = False
    """Whether a user who only trains should be told as well."""

    def __str__(self) -> str:
        """One line about the change."""
        if self.kind == "moved":
            said = f" ({self.text})" if self.text else ""
            return f"{self.where}: {self.old} -> {self.new}{said}"
        return f"{self.where}: {self.old}: {self.text}"


@dataclass(slots=True)
class Changes:
    """The changes so far, in the order in which they were made."""

    made: list[Change] = field(default_factory=list)

    def moved(self, node: Node, old: str, new: str, text: str = "", *, warns: bool = False) -> None:
        """Say that what stood at `old` stands at `new`."""
        self.made.append(
            Change(kind="moved", where=node.where, old=old, new=new, text=text, warns=warns)
        )

    def gone(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Say that `old` has no equal any more."""
        self.made.append(Change(kind="gone", where=node.where, old=old, text=text, warns=warns))

    def note(self, node: Node, old: str, text: str, *, warns: bool = True) -> None:
        """Say something about `old` that a user should know."""
        self.made.append(Change(kind="note", where=node.where, old=old, text=text, warns=warns))
