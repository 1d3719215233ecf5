"""Values of settings, each with its file and line for error messages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a settings file: a scalar, a list of nodes, or a map from text to nodes."""

    value: Any
    """None, bool, int, float, str, `list[Node]` or `dict[str, Node]`."""
    source: str
    """The file as the user named it, or another origin, such as `overrides`."""
    line: int | None = None
    """Line of the key (or list item), counted from 1; None for a value that is not from a file."""
    text: str | None = None
    """The original text of a scalar, so that `run_id: 007` keeps its zeros; None if quoted."""

    @property
    def where(self) -> str:
        """The node's place, `file:line`, in the form that editors recognise."""
        # Terminals of editors open `file:line` at a click.
        return self.source if self.line is None else f"{self.source}:{self.line}"


def fail(node: Node, path: str, message: str) -> SettingsError:
    """Return the error `message` with the place of `node` and the key path `path` before it."""
    place = f"{node.where}: {path}" if path else node.where
    error = SettingsError(f"{place}: {message}")
    # `Mistakes` needs `line` and `about`: it sorts errors by line, and reports the same error about
    # a value only once.
    error.line, error.about = node.line, (node, message)
    return error


def join(path: str, key: str | int) -> str:
    """Return the key path of `key` below `path`: `behaviors.Walker`, `curriculum[0]`."""
    if isinstance(key, int):
        # Items of lists are counted from 0, as in Python.
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def from_plain(value: Any, source: str, line: int | None = None) -> Node:
    """Return a plain value as a tree of nodes with `source` and `line`; keys become text."""
    if isinstance(value, dict):
        entries = {str(key): from_plain(item, source, line) for key, item in value.items()}
        return Node(entries, source, line)
    if isinstance(value, list | tuple):
        return Node([from_plain(item, source, line) for item in value], source, line)
    # The text is kept, so that a number from the command line can still be read as a name.
    return Node(value, source, line, None if value is None else str(value))


def to_plain(node: Node) -> Any:
    """Return a node's value without file and line, as plain maps, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: to_plain(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(item) for item in node.value]
    return node.value


def respelled(value: Any) -> Any:
    """Return a plain value in canonical form: sorted keys, whole numbers as int."""
    if isinstance(value, dict):
        return {key: respelled(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [respelled(item) for item in value]
    # Whole numbers become int: 1e4, but not 1e300. From 2**53 on, floats skip whole numbers, so
    # the int could be another number than the user wrote.
    is_whole = isinstance(value, float) and abs(value) < 2**53 and value == int(value)
    return int(value) if is_whole else value


def merge(base: Node, over: Node, *, apart: str | None = None) -> Node:
    """Return `base` merged with `over`: maps merge at every depth, other values are replaced.

    If `apart`, the key path of both, is given, a value in both raises a SettingsError.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        if apart is not None:
            raise fail(over, apart, "is written twice, once with a dotted key; keep one")
        return over
    entries = dict(base.value)
    for key, item in over.value.items():
        at = None if apart is None else join(apart, key)
        # Keys keep the position that they have in `base`; new keys come last.
        entries[key] = merge(entries[key], item, apart=at) if key in entries else item
    # The result has the place of `over`, which the user changed last.
    return Node(entries, over.source, over.line)


def find(node: Node, keys: str) -> Node:
    """Return the node at the dotted `keys` below `node`, or its deepest existing ancestor."""
    for key in keys.split("."):
        # An error about a missing key is placed at the section that lacks it.
        if not isinstance(node.value, dict) or key not in node.value:
            break
        node = node.value[key]
    return node


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield a node at the key path `path`, and all nodes in its maps with their key paths."""
    yield path, node
    for key, item in node.value.items() if isinstance(node.value, dict) else ():
        yield from walk(item, join(path, key))


def fail_at(root: Node, path: str, message: str) -> SettingsError:
    """Return the error `message` about the value at the key path `path` below `root`."""
    return fail(find(root, path), path, message)


def located(node: Node, written: Node) -> Node:
    """Return `node` with the files and lines that `written` has at the same keys.

    A value that `written` has in a list, as a sweep has, gets the place of the equal item.
    """
    if isinstance(node.value, dict):
        # If `written` is a single value, such as null, every key gets the place of this value.
        listed = written.value if isinstance(written.value, dict) else {}
        below: dict[str, Node] = listed or dict.fromkeys(node.value, written)
        entries = {key: located(item, below.get(key) or item) for key, item in node.value.items()}
        return replace(node, value=entries, source=written.source, line=written.line)
    items = written.value if isinstance(written.value, list) else []
    # Values are compared without their places, because equal values have different places.
    place = next((item for item in items if to_plain(item) == to_plain(node)), written)
    return replace(node, source=place.source, line=place.line)


def undotted(overrides: Mapping[str, Any] | Node, source: str, path: str = "") -> Node:
    """Return a map without dotted keys at any depth: `{a: {b: 1}}` for `{"a.b": 1}`.

    Raises:
        SettingsError: A key has an empty part, as in `a..b`, or two keys give the same setting.
    """
    given = overrides if isinstance(overrides, Node) else from_plain(dict(overrides), source)
    if not isinstance(given.value, dict):
        return given
    result = Node({}, given.source, given.line)
    for dotted, item in given.value.items():
        node = undotted(item, source, join(path, dotted))
        # Names of behaviors and parameters may have a dot themselves, such as `My.Agent`.
        is_name = path in ("behaviors", "environment_parameters")
        parts = [dotted] if is_name else dotted.split(".")
        if not all(parts):
            raise fail(node, dotted, "a part of this dotted key is empty")
        # The dotted key becomes nested maps, built from the innermost part outwards.
        for part in reversed(parts):
            node = Node({part: node}, node.source, node.line)
        result = merge(result, node, apart="")
    return result
