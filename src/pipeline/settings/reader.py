"""Conversion of maps to dataclasses, according to the dataclasses' type hints.

A settings class is a dataclass with one field for each key. The field gives the key's name, type
(a hint, which may have `Bounds`) and default. Classes with special rules have their own
`from_node(node, path)`.

All functions that read a node, `from_node` included, raise `SettingsError` with the node's place,
its key path, its value and the allowed values; errors that do not depend on each other are raised
together.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.errors import Mistakes, SettingsError
from pipeline.plugins import Group
from pipeline.settings.nodes import Node, fail, find, join, to_plain

K = TypeVar("K")
T = TypeVar("T")

_YAML_1_1 = dict.fromkeys(("yes", "Yes", "YES", "on", "On", "ON"), True)
_YAML_1_1 |= dict.fromkeys(("no", "No", "NO", "off", "Off", "OFF"), False)
"""Words that ML-Agents reads as true or false, because its YAML reader follows YAML 1.1."""

_LARGEST_WHOLE = 2**63 - 1  # arrays and messages use 64-bit integers


class ContradictionError(ValueError):
    """Two values contradict each other; `key` is the dotted key of the value to change."""

    def __init__(self, key: str, message: str) -> None:
        # Callers that build settings in Python have no file that shows the key.
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The allowed numbers of a setting, as a part of the setting's type hint."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None

    def broken_by(self, value: float) -> str | None:
        """Return a text with the bound that `value` violates; None if the value is allowed."""
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least}"
        if self.above is not None and value <= self.above:
            return f"must be greater than {self.above}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most}"
        # Only the first violated bound is returned, so that a number has one error and not several.
        if self.multiple_of is not None and value % self.multiple_of:
            return f"must be divisible by {self.multiple_of}"
        return None


Count = Annotated[int, Bounds(at_least=1)]
"""A whole number of at least 1."""
CountOrZero = Annotated[int, Bounds(at_least=0)]
"""A whole number of at least 0."""
CountOrUnlimited = Annotated[int, Bounds(at_least=-1)]
"""A whole number of at least 0, or -1, which stands for no limit or for a number not given."""
Fraction = Annotated[float, Bounds(at_least=0, at_most=1)]
"""A number in [0, 1]."""
NonNegative = Annotated[float, Bounds(at_least=0)]
"""A number of at least 0."""
Positive = Annotated[float, Bounds(above=0)]
"""A number above 0."""
PositiveOrAuto = Positive | Literal["auto"]
"""A number above 0, or `auto`: the run chooses the number from its own measurements."""


def read(hint: Any, node: Node, path: str) -> Any:
    """Return the value of `node` converted to the type `hint`."""
    origin = get_origin(hint)
    # An annotated type has bounds, or names of a group, that the value must match.
    if origin is Annotated:
        return _read_limited(hint, node, path)
    # `X | None` and `Optional[X]` have different origins, but the same arguments.
    if origin in (Union, UnionType):
        return _read_optional(hint, node, path)
    if hint is Any:
        return to_plain(node)
    if origin is Literal:
        return choice(node, path, get_args(hint))
    if origin is dict:
        # The type of the keys is ignored, because keys are always text.
        value_hint = get_args(hint)[1]
        entries = entries_of(node, path)
        return each(entries, lambda key, item: read(value_hint, item, join(path, key)))
    if origin is tuple:
        return _read_tuple(hint, node, path)
    if hint in _SCALARS:
        return _SCALARS[hint](node, path)
    # A class with special rules has its own `from_node`, which replaces `read_dataclass`.
    if hasattr(hint, "from_node"):
        return hint.from_node(node, path)
    return read_dataclass(hint, node, path)


def each(entries: Mapping[K, Node], reader: Callable[[K, Node], T]) -> dict[K, T]:
    """Return a map from each key to `reader(key, value)`; raise the errors of all keys together."""
    values, mistakes = {}, Mistakes()
    for key, item in entries.items():
        with mistakes:
            values[key] = reader(key, item)
    mistakes.refuse()
    return values


def read_dataclass(
    cls: Any,
    node: Node,
    path: str,
    *,
    hints: Mapping[str, Any] | None = None,
    mistakes: Mistakes | None = None,
) -> Any:
    """Return an instance of the settings class `cls`, read from the map at the key path `path`.

    A field's metadata may have `copies`, the name of another field: if only the other field is
    written, this field gets the other field's value, multiplied by the metadata `times` if given.
    Fields with the metadata `internal` are not settings. `hints` replace type hints in the class;
    `mistakes` found earlier are raised together with the errors of the keys.
    """
    known = {**setting_hints(cls), **(hints or {})}
    # `memory: true` is a common mistake; the error shows how the section is written.
    if path and (isinstance(node.value, bool) or node.text in _YAML_1_1):
        raise fail(node, path, f"needs a map of keys to values, got {display(node)}{_example(cls)}")
    entries = entries_of(node, path)
    mistakes = mistakes or Mistakes()
    for key in entries:
        if key not in known:
            with mistakes:
                raise unknown_key(entries[key], path, key, known)
    # The flag is set before the values are read, because their errors go into the same list.
    is_misspelt = bool(mistakes.found)
    values: dict[str, Any] = {}
    failed: set[str] = set()
    for item in fields(cls):
        # A field may copy another, as ML-Agents' beta_schedule copies learning_rate_schedule.
        copied = item.metadata.get("copies")
        with mistakes:
            if item.name in entries:
                at = join(path, item.name)
                values[item.name] = read(known[item.name], entries[item.name], at)
            elif copied in entries and copied not in failed:
                # An error has the key of this field, and the line of the copied key.
                source = read(known[item.name], entries[copied], join(path, item.name))
                times = item.metadata.get("times")
                values[item.name] = source if times is None else source * times
            # If a key is misspelt, the error about that key helps more than "is required".
            elif item.default is MISSING and item.default_factory is MISSING and not is_misspelt:
                raise fail(node, path, f"the key {item.name!r} is required")
        # A field that copies this one must not report the same error again.
        if item.name in entries and item.name not in values:
            failed.add(item.name)
    mistakes.refuse()
    try:
        # The class itself refuses contradictions between valid values, in `__post_init__`.
        return cls(**values)
    except ContradictionError as error:
        raise fail(find(node, error.key), join(path, error.key), error.message) from error


def _example(cls: Any) -> str:
    """Return a hint on how to write a section with its defaults; empty if a key has no default."""
    if any(item.default is MISSING and item.default_factory is MISSING for item in fields(cls)):
        return ""
    values = to_map(cls())
    # More values would not fit into one line of an error, and null would not be a useful example.
    if len(values) > 2 or None in values.values():
        return "; write {} for the defaults, or leave it out"
    written = ", ".join(f"{key}: {value}" for key, value in values.items())
    return f"; write {{{written}}}, or leave it out"


def setting_hints(cls: Any) -> Mapping[str, Any]:
    """Return the type of each key of the settings class `cls`, in the order of the fields."""
    return _hints(cls)  # mypy rejects a class as argument of a cached function


@cache  # resolving type hints is slow
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls) if not f.metadata.get("internal")}


def to_map(value: Any) -> Any:
    """Return `value` as plain maps, lists and scalars, from which `read` makes an equal value.

    Keys with default values are written, too. Only additions to ML-Agents' format (metadata
    `addition`) are omitted if they have their default, so that `mlagents-learn` can read the
    result.
    """
    # If a value may be written in several forms, its class chooses the form, in `to_plain`.
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if is_dataclass(value):
        return fields_to_map(value)
    if isinstance(value, dict):
        return {key: to_map(item) for key, item in value.items()}
    # Tuples become lists, because YAML has no tuples.
    return [to_map(item) for item in value] if isinstance(value, tuple) else value


def fields_to_map(value: Any) -> dict[str, Any]:
    """Return the map from keys to plain values of the settings object `value`; see `to_map`."""
    return {
        item.name: to_map(getattr(value, item.name))
        for item in fields(value)
        if "internal" not in item.metadata
        and not ("addition" in item.metadata and getattr(value, item.name) == item.default)
    }


def entries_of(node: Node, path: str) -> dict[str, Node]:
    """Return the entries of a map; refuse a node that is not a map."""
    if not isinstance(node.value, dict):
        raise fail(node, path, f"needs a map of keys to values, got {display(node)}")
    return node.value


def choice(node: Node, path: str, allowed: Collection[str]) -> str:
    """Return the text of a node; raise an error if the text is not in `allowed`."""
    # The original text is compared, because a name may look like a number. A list has no text.
    text = node.value if isinstance(node.value, str) else node.text
    if text is None or text not in allowed:
        hint = suggestion(text or "", allowed)
        names = [*allowed, *(["module:Class"] if getattr(allowed, "takes_files", False) else [])]
        listed = f"{', '.join(names)}{getattr(allowed, 'more', '')}"
        raise fail(node, path, f"{display(node)} is not allowed{hint} Allowed: {listed}")
    return text


def part(group: Group[T], name: str, node: Node, path: str) -> T:
    """Return the part `name` of a group; an import error gets the file and line of `node`."""
    try:
        # The look-up imports the plug-in, which may fail for any reason.
        return group[name]
    except SettingsError as error:
        raise fail(node, path, str(error)) from error


def unknown_key(node: Node, path: str, key: str, known: Mapping[str, Any]) -> Exception:
    """Return the error for a key that is not in `known`, a map from names of keys to types."""
    # A key at the wrong level is more common than a misspelt key, so this is checked first.
    deeper = [name for name, hint in known.items() if key in keys_below(hint)]
    hint = f"; it belongs under {deeper[0]!r}." if deeper else suggestion(key, known)
    more = getattr(known, "more", "")
    allowed = f"Allowed: {', '.join(known)}{more}" if known else "No key is allowed here"
    return fail(node, path, f"unknown key {key!r} (value {display(node)}){hint} {allowed}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the most similar `known` name; `.` if none is similar."""
    near = nearest(word, known)
    return "." if near is None else f"; did you mean {near!r}?"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to a word; None if none is similar."""
    # Words are compared in lower case, because `difflib` treats `A` and `a` as different letters.
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), by_lower, n=1)
    if not near:  # the word may be a part of a name, such as `min` of `min_value`
        near = [name for name in by_lower if word.lower() in name.split("_")]
    return by_lower[near[0]] if near else None


def display(node: Node) -> str:
    """Return a node's value as text for an error message, shortened to one line."""
    if node.value is None:
        return "nothing (null)"
    text = repr(to_plain(node))
    # Errors are one line; 57 characters and three dots make 60.
    return text if len(text) <= 60 else text[:57] + "..."


def keys_below(hint: Any) -> set[str]:
    """Return the keys of the settings class `hint`, or of all settings classes in a union."""
    if get_origin(hint) in (Union, UnionType, Annotated):
        return set().union(*(keys_below(part) for part in get_args(hint)))
    # A key of deeper sections may belong in too many sections.
    return set(setting_hints(hint)) if isinstance(hint, type) and is_dataclass(hint) else set()


def _read_limited(hint: Any, node: Node, path: str) -> Any:
    inner, *limits = get_args(hint)
    # Installed packages extend a group's names, so the type cannot be a Literal.
    if isinstance(limits[0], Group):
        return choice(node, path, limits[0])
    value = read(inner, node, path)
    for broken in filter(None, (limit.broken_by(value) for limit in limits)):
        raise fail(node, path, f"{broken}, got {display(node)}")
    return value


def _read_optional(hint: Any, node: Node, path: str) -> Any:
    options = [part for part in get_args(hint) if part is not NoneType]
    # The type is a number, or a word in its place.
    if len(options) == 2 and get_origin(options[1]) is Literal:
        words = get_args(options[1])
        if node.value in words:
            return node.value
        if _number(node) is None:
            raise fail(node, path, f"needs a number or {', '.join(words)}, got {display(node)}")
        return read(options[0], node, path)
    # The type is a value, or a list of values.
    if len(options) == 2 and get_origin(options[1]) is tuple:
        return read(options[isinstance(node.value, list)], node, path)
    if len(options) != 1:
        # This is a mistake in a settings class, and not in the user's file.
        raise TypeError(f"{hint} needs a from_node that selects the type")
    return None if node.value is None else read(options[0], node, path)


def _read_tuple(hint: Any, node: Node, path: str) -> tuple[Any, ...]:
    parts = get_args(hint)
    if not isinstance(node.value, list):
        # A single scalar was probably meant as a list of one value, so the error proposes the list.
        of_scalars = not is_dataclass(parts[0]) and get_origin(parts[0]) not in (tuple, dict)
        is_one = of_scalars and node.text and node.value is not None
        remedy = f"; write [{node.text}]" if is_one else ""
        raise fail(node, path, f"needs a list, got {display(node)}{remedy}")
    if parts[-1] is Ellipsis:
        # `tuple[X, ...]` has any length, `tuple[X, Y]` exactly two values.
        parts = (parts[0],) * len(node.value)
    if len(parts) != len(node.value):
        raise fail(node, path, f"needs {len(parts)} values, got {len(node.value)}: {display(node)}")
    items = dict(enumerate(node.value))
    return tuple(each(items, lambda i, item: read(parts[i], item, join(path, i))).values())


def _read_bool(node: Node, path: str) -> bool:
    # The text `"false"` and the number 0 are refused as probable mistakes. The node of a text in
    # quotes has no `text`.
    value = node.value if isinstance(node.value, bool) else _YAML_1_1.get(node.text or "")
    if value is None:
        raise fail(node, path, f"needs true or false, got {display(node)}")
    return value


def _read_text(node: Node, path: str) -> str:
    if isinstance(node.value, str):
        return node.value
    # A number may be meant as text, as in `run_id: 007`; true and false may not.
    if isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return str(node.text)
    raise fail(node, path, f"needs text, got {display(node)}")


def _read_float(node: Node, path: str) -> float:
    number = _number(node)
    if number is None:
        raise fail(node, path, f"needs a number, got {display(node)}")
    # The conversion of a Decimal to float rounds once, as if the text had been read directly.
    return float(number)


def _read_int(node: Node, path: str) -> int:
    number = _number(node)
    # `1e6` and `1000000.0` are whole numbers; ML-Agents takes them only for max_steps.
    if number is None or number != number.to_integral_value():
        raise fail(node, path, f"needs a whole number, got {display(node)}")
    if abs(number) > _LARGEST_WHOLE:
        raise fail(node, path, f"is too large (the limit is 2^63), got {display(node)}")
    return int(number)


def _number(node: Node) -> Decimal | None:
    """Return a node's number, also from text such as `"1e6"`; None if it is no finite number."""
    if isinstance(node.value, bool) or not isinstance(node.value, int | float | str):
        return None
    try:
        # Decimal recognises whole numbers exactly, also in text that a float would round.
        number = Decimal(node.value)
        return number if number.is_finite() and math.isfinite(float(number)) else None
    except (InvalidOperation, OverflowError):
        return None


_SCALARS: dict[Any, Callable[[Node, str], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_text,
}
