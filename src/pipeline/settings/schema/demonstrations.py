"""`demo_path`: which demonstrations are imitated, and how often each of them is drawn."""

from dataclasses import dataclass
from typing import Any, Self

from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import read, read_dataclass, shown
from pipeline.settings.schema.kinds import Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSource:
    """One file of demonstrations, or one folder of them."""

    path: str
    """The file, or the folder of which all `.demo` files are read."""
    weight: Positive = 1.0
    """How often each of its steps is drawn, against a step of weight 1."""

    def to_plain(self) -> str | dict[str, Any]:
        """What `DemoPath.from_node` reads."""
        return self.path if self.weight == 1 else {"path": self.path, "weight": self.weight}


@dataclass(frozen=True, slots=True)
class DemoPath:
    """A path, as in ML-Agents, or a list of paths and of maps with `path` and `weight`."""

    sources: tuple[DemoSource, ...]
    """At least one."""

    @classmethod
    def of(cls, *paths: str) -> Self:
        """Sources of the same weight."""
        return cls(tuple(DemoSource(path=one) for one in paths))

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read either form.

        Raises:
            SettingsError: It is neither, or a list without entries.
        """
        if not isinstance(node.value, list):
            return cls((_source(node, path),))
        if not node.value:
            raise fail(node, path, "needs at least one demonstration, got an empty list")
        return cls(tuple(_source(one, join(path, i)) for i, one in enumerate(node.value)))

    def to_plain(self) -> Any:
        """The shortest form that says the same."""
        plain = [one.to_plain() for one in self.sources]
        return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain

    @property
    def paths(self) -> tuple[str, ...]:
        """Of every source."""
        return tuple(one.path for one in self.sources)


def _source(node: Node, path: str) -> DemoSource:
    if isinstance(node.value, dict):
        source: DemoSource = read_dataclass(DemoSource, node, path)
        return source
    if not isinstance(node.value, str | int | float) or isinstance(node.value, bool):
        wanted = "a path, or a list of paths and of maps with 'path' and 'weight'"
        raise fail(node, path, f"needs {wanted}, got {shown(node)}")
    return DemoSource(path=read(str, node, path))
