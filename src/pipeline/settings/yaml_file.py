"""Reader and writer of YAML files, with the scalars of YAML 1.2, and line numbers for errors.

PyYAML follows YAML 1.1, where `1e-5` is text, `on` is true and `010` is eight. DVC and most people
expect YAML 1.2, so the rules of YAML 1.2's core schema replace PyYAML's rules for scalars here.
"""

import codecs
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import SettingsError
from pipeline.files import foreign, listed, similar
from pipeline.settings.nodes import Node, join

_MOST_VALUES = 50_000
"""Maximum number of values in a file, because nested aliases can expand to more values than fit
into memory."""
_MOST_CHARACTERS = 4_000_000
"""Maximum number of characters in a file: longer files would take many seconds to read."""

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that YAML's escapes can write, but that paths and terminals do not accept."""

_NULL, _BOOL, _INT, _FLOAT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "merge")
)
# The rules are in YAML 1.2.2, section 10.3.2; only merge keys are from YAML 1.1. The last item of a
# rule lists the first characters of a match, for speed.
_CORE_SCHEMA: tuple[tuple[str, str, list[str]], ...] = (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    (_MERGE, r"<<", ["<"]),
)


# DVC reads YAML with ruamel.yaml, which accepts a few more forms than the core schema.
_DVC_READS = {
    kind: re.compile(rf"(?:{pattern})\Z")
    for kind, pattern in {
        "a number": r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
        r"|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+",
        "a truth value": r"true|True|TRUE|false|False|FALSE",
        "nothing": r"~|null|Null|NULL|",
        "a date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
        r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}.*",
    }.items()
}
"""Patterns of unquoted text that DVC reads as another value, by the kind of that value."""


_PYTHON = "tag:yaml.org,2002:python"
_BEHAVIORS = f"{_PYTHON}/object/apply:mlagents.trainers.settings.DefaultTrainerDict"
"""ML-Agents 0.2x writes `behaviors` as an object of this class, with the map under `dictitems`."""
_DEFAULT = f"{_PYTHON}/name:mlagents.trainers.settings.TrainerSettings"
"""Tag of the class in the arguments of the object `_BEHAVIORS`; the arguments are not read."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema of YAML 1.2; tags are errors.

    The only exceptions are the tags that ML-Agents writes for its map of behaviors and for the
    map's arguments: the map is read as a plain map, and no Python object is made.
    """

    # The inherited resolvers follow YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML has this class attribute
    _n_nodes = 0
    _is_in_args = False

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A tag is checked before the values below it, so that the first refused tag is reported.
        event = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML lacks it
        tag = getattr(event, "tag", None)
        is_part = getattr(parent, "tag", None) == _BEHAVIORS
        # The arguments of the map are under `args`; a map without behaviors is a list of them.
        self._is_in_args |= is_part and (index == 0 or getattr(index, "value", None) == "args")
        if tag not in (None, _BEHAVIORS) and not (tag == _DEFAULT and self._is_in_args):
            raise _error(event, f"the tag {tag!r} is not allowed, because settings are plain data")
        # Values are counted here, because composing very many values is slow in itself.
        self._n_nodes += 1
        if self._n_nodes > _MOST_VALUES:
            raise _too_many(event)
        node: yaml.Node | None = super().compose_node(parent, index)
        if is_part:
            self._is_in_args = False
        # In a map of behaviors that ML-Agents wrote, only the map below `dictitems` has settings.
        if node is not None and tag == _BEHAVIORS:
            return _behaviors(node)
        if isinstance(node, yaml.ScalarNode) and (bad := _UNUSABLE.search(node.value)):
            raise _error(node, f"the character U+{ord(bad[0]):04X} is not allowed")
        return node


def _behaviors(written: yaml.Node) -> yaml.Node:
    """Return the plain map of behaviors in an object that ML-Agents wrote."""
    items = written.value if isinstance(written, yaml.MappingNode) else []
    parts = {str(key.value): value for key, value in items}
    if isinstance(written, yaml.ScalarNode) or not parts.keys() <= {"args", "dictitems"}:
        raise _error(written, "below ML-Agents' tag only the keys args and dictitems are allowed")
    nothing = yaml.MappingNode("tag:yaml.org,2002:map", [], written.start_mark)
    behaviors: yaml.Node = parts.get("dictitems", nothing)
    return behaviors


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes all text which YAML 1.1 or 1.2 would not read as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML has this class attribute
        # PyYAML's own lists are those of all users of PyYAML in this process.
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    # With an alias, an edit of one of two equal maps would change the other.
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # the signature is PyYAML's
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a text; Unicode line breaks would be folded without double quotes."""
        style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)

for _tag, _pattern, _first in _CORE_SCHEMA:
    _compiled = re.compile(rf"(?:{_pattern})\Z")
    _Loader.add_implicit_resolver(_tag, _compiled, _first)
    _Dumper.add_implicit_resolver(_tag, _compiled, _first)


class Repeat(NamedTuple):
    """A repeated key of a map, with its line, and the line at which the key occurs first."""

    node: Node
    first: int


def read_yaml(
    path: Path | str, *, what: str = "Config file", repeats: list[Repeat] | None = None
) -> Node:
    """Return the content of a YAML file, called `what` in errors; see `parse_yaml`."""
    return parse_yaml(read_text(path, what=what), source=str(path), repeats=repeats)


def read_text(path: Path | str, *, what: str = "Config file") -> str:
    """Return the text of a settings file, without a byte order mark."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        # The parameter file gets no list of other files, because its name is fixed.
        others = "" if what == "Parameter file" else listed(path, ".yaml", ".yml")
        is_ours = what in ("Config file", "Parameter file")
        remedy = " `pipeline init DIR` writes a project with one." if is_ours else ""
        hint = similar(path) or f"{others}.{remedy}"
        raise SettingsError(f"{what} could not be found at {path.absolute()}{hint}") from error
    except OSError as error:
        raise SettingsError(f"{path}: {what} cannot be read: {error.strerror}.") from error
    # A wrong file, such as an ONNX model, gets its own message before any parsing.
    if data and (kind := foreign(data)):
        raise SettingsError(f"{path}: {what} {kind}")
    try:
        # Editors on Windows write a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise SettingsError(f"{path}: {what} has binary data; name a YAML file") from error
        # UTF-16 and Windows-1252 files of Windows editors are refused here.
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        text = f"{what} is not UTF-8 (byte 0x{byte:02x}). Save it with the encoding UTF-8."
        raise SettingsError(f"{path}:{line}: {text}") from error


def parse_yaml(text: str, *, source: str, repeats: list[Repeat] | None = None) -> Node:
    """Return the value of YAML text, with the line of every key and value.

    Empty text is an empty map. Repeated keys are appended to `repeats` and take their last value;
    they are refused if `repeats` is None.

    Raises:
        SettingsError: The text is not one YAML document, has a key twice, or uses a tag.
    """
    if len(text) > _MOST_CHARACTERS:
        limit = f"more than the maximum of {_MOST_CHARACTERS} for settings"
        raise SettingsError(f"{source}: has {len(text)} characters, {limit}.")
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return Node({}, source, 1)
        # PyYAML counts lines from 0, editors from 1.
        node = _Builder(source, repeats).build(root, root.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        raise SettingsError(_syntax_message(error, source)) from error
    except yaml.reader.ReaderError as error:
        line, code = text.count("\n", 0, error.position) + 1, ord(text[error.position])
        said = f"{source}:{line}: the character U+{code:04X} is not allowed."
        raise SettingsError(said) from error
    # PyYAML composes nested lists by recursion, so depth is limited by Python's stack.
    except RecursionError as error:
        raise SettingsError(f"{source}: the values are nested too deeply.") from error
    # A file with only `null` or `---` is read like an empty file.
    return Node({}, source, 1) if node.value is None else node


def unusable_for_dvc(path: Path, named: Collection[str]) -> Iterator[tuple[str, Node, str]]:
    """Yield each text that needs quotes: its dotted key, its node, and the kind that DVC reads.

    DVC can neither sort keys of several types nor record a date. `named` has the sections whose
    keys are names chosen by the user.
    """
    root = yaml.compose(read_text(path), Loader=_Loader)

    def misread(node: yaml.Node) -> str | None:
        # A scalar with a style is quoted, and DVC reads it as text.
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return None
        return next((kind for kind, form in _DVC_READS.items() if form.match(node.value)), None)

    def walk(node: yaml.Node | None, at: str) -> Iterator[tuple[str, Node, str]]:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from walk(item, join(at, index))
        elif isinstance(node, yaml.MappingNode):
            kinds = [misread(key) for key, _ in node.value]
            for (key, value), kind in zip(node.value, kinds, strict=True):
                inside, line = join(at, key.value), key.start_mark.line + 1
                # Names must be text; one number among other text keys makes the keys unsortable.
                if kind is not None and (at in named or len(set(kinds)) > 1):
                    yield inside, Node(key.value, str(path), line), kind
                yield from walk(value, inside)
        elif node is not None and misread(node) == "a date":
            yield at, Node(node.value, str(path), node.start_mark.line + 1), "a date"

    return walk(root, "")


def shared_maps(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line and dotted key of each alias of a map, and the dotted key of its anchor."""
    places: dict[int, str] = {}

    def walk(node: yaml.Node | None, at: str, line: int) -> Iterator[tuple[int, str, str]]:
        if not isinstance(node, yaml.MappingNode):
            return
        # An alias gives the same node object as its anchor.
        first = places.setdefault(id(node), at)
        if first != at:
            yield line, at, first
            return
        for key, value in node.value:
            yield from walk(value, join(at, key.value), key.start_mark.line + 1)

    return walk(yaml.compose(read_text(path), Loader=_Loader), "", 1)


def dump_yaml(value: Any) -> str:
    """Return block-style YAML that `parse_yaml`, and any YAML 1.1 reader, reads back as equal."""
    # Names in other alphabets are written without escapes, so that they stay readable.
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 100}
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=False, **options)
    return text


class _Builder:
    """Convert PyYAML's nodes to `Node`; refuse constructs that settings must not use."""

    def __init__(self, source: str, repeats: list[Repeat] | None) -> None:
        self._source = source
        self._repeats = repeats
        self._n_values = 0
        # These are the ids of the nodes on the path from the root to the present node.
        self._open: set[int] = set()

    def build(self, node: yaml.Node, line: int) -> Node:
        self._n_values += 1
        if self._n_values > _MOST_VALUES:
            raise _too_many(node)
        if isinstance(node, yaml.ScalarNode):
            written = None if node.style else node.value
            return Node(_scalar(node), self._source, line, written)
        if id(node) in self._open:
            raise _error(node, "an alias stands for a value that contains the alias")
        # Only ancestors are recorded, because siblings may use the same anchor.
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.build(item, item.start_mark.line + 1) for item in node.value]
        else:
            value = self._entries(node)
        self._open.remove(id(node))
        return Node(value, self._source, line)

    def _entries(self, node: yaml.Node) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error(key_node, "a key must be text, not a list or a map")
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in lines:
                if self._repeats is None:
                    text = f"the key {key!r} is written twice, first in line {lines[key]}"
                    raise _error(key_node, text)
                self._repeats.append(Repeat(Node(key, self._source, line), lines[key]))
            lines.setdefault(key, line)
            # YAML 1.2 dropped merge keys, but people and ML-Agents' files use them.
            if key_node.tag == _MERGE:
                merged |= self._merged(value_node)
            else:
                entries[key] = self.build(value_node, line)
        return merged | entries  # a map's own keys win over merged keys

    def _merged(self, node: yaml.Node) -> dict[str, Node]:
        """Return the entries that a merge key `<<` adds; in a list of maps the first map wins."""
        built = self.build(node, node.start_mark.line + 1)
        result: dict[str, Node] = {}
        # Items are merged in reverse order, so that the entries of the first map win.
        for item in reversed(built.value if isinstance(built.value, list) else [built]):
            if not isinstance(item.value, dict):
                raise _error(node, "a merge key '<<' needs a map or a list of maps")
            result |= item.value
        return result


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag == _FLOAT:
        # Python reads `inf` and `nan` without the dot that YAML puts before them.
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if node.tag != _INT:
        return text
    try:
        number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        str(number)  # for some bases Python limits the number of digits only in `str`
    except ValueError as error:
        raise _error(node, "the number has too many digits") from error
    return number


def _error(place: Any, message: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, message, place.start_mark)


def _too_many(place: Any) -> yaml.MarkedYAMLError:
    return _error(place, f"the file has more than {_MOST_VALUES} values")


def _syntax_message(error: yaml.MarkedYAMLError, source: str) -> str:
    # The most common mistakes get a sentence of their own; for others, PyYAML's words are used.
    mark = error.problem_mark or error.context_mark
    place = f"{source}:{mark.line + 1}" if mark else source
    parts = [part for part in (error.context, error.problem) if part]
    if "'\\t'" in str(error.problem):
        return f"{place}: this line has a tab, where YAML allows only spaces; use spaces."
    if str(error.context).startswith("while parsing a flow ") and error.context_mark:
        bracket = "[" if "sequence" in str(error.context) else "{"
        line = error.context_mark.line + 1
        return f"{source}:{line}: cannot be read as YAML: the '{bracket}' here is not closed."
    if mark and re.search("found '<block (mapping|sequence) start>'", str(error.problem)):
        return (
            f"{place}: this line begins in column {mark.column + 1}, in which no block above "
            "begins; begin it in the column of the lines that it belongs to."
        )
    return f"{place}: cannot be read as YAML: {', '.join(parts)}."
