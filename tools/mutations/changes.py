"""The mutations of a source file: each is a single small mistake that a test should notice."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("clamp_min", "clamp_max"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("sum", "mean"),
    ("floor", "ceil"),
    ("append", "appendleft"),
    ("pop", "popleft"),
)
NAMES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
"""Functions and methods that are easily taken for each other."""
TEXT_ONLY = {"__repr__", "__str__", "_log", "warnings", "logging"}
"""Functions that only make texts, and what logs them."""
KEPT_CALLS = {
    *("list", "tuple", "dict", "set", "str", "repr", "iter", "super", "cast", "isinstance"),
    *("issubclass", "len", "range", "enumerate", "zip", "type", "TypeVar", "NewType", "getattr"),
}
"""Calls that stay: without them nothing changes, or nothing runs at all."""
KEPT_KEYWORDS = {"strict", "device", "stacklevel", "name", "daemon"}
"""Keywords for what cannot happen (`zip`'s strict), for other devices, and for texts."""


CONTEXT = 24
"""How many characters around a change are shown."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A change of one expression or statement of a file."""

    path: str
    """The file, below the repository."""
    function: str
    """The function or class that it is in; empty at the top of the file."""
    lines: tuple[int, int]
    """First and last line of the statement, or of its head, in the file as it is."""
    kind: str
    text: str
    """What it changes, with a little of the statement around it: before -> after."""
    key: str
    """Tells it from every other mutation, and stays the same while other lines change."""
    place: tuple[tuple[str, int | None], ...]
    """Fields and indices that lead from the module to what is replaced."""
    replacement: ast.AST

    def apply(self, source: str) -> ast.Module:
        """Return the file's syntax tree with the mutation."""
        tree = ast.parse(source)
        _replace(tree, self.place, self.replacement)
        return ast.fix_missing_locations(tree)


def mutations_of(path: str, source: str) -> list[Mutation]:
    """Return every mutation of a file, in the order of its lines."""
    return list(_Walk(path, source).module())


def sample(mutations: list[Mutation], n: int, seed: int) -> list[Mutation]:
    """Return `n` of a file's mutations: the kinds in turn, each in an order that the seed gives.

    The order depends on nothing but the mutations themselves, so a change elsewhere in the file
    leaves the others in the sample.
    """
    kinds: dict[str, list[Mutation]] = {}
    for mutation in sorted(mutations, key=lambda candidate: _digest(f"{seed} {candidate.key}")):
        kinds.setdefault(mutation.kind, []).append(mutation)
    turns = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return sorted(
        [candidate for turn in turns for candidate in turn if candidate is not None][:n],
        key=lambda candidate: (candidate.lines, candidate.key),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Walk:
    """Goes through a file's statements, and through the expressions of each."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._tree = ast.parse(source)
        self._modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        self._alike: Counter[str] = Counter()
        self._scope: tuple[str, ...] = ()

    def module(self) -> Iterator[Mutation]:
        yield from self._body(self._tree.body, ("body",), ())

    def _body(self, body: list[ast.stmt], field: tuple[str], place: tuple) -> Iterator[Mutation]:
        for index, statement in enumerate(body):
            yield from self._statement(statement, (*place, (*field, index)))

    def _statement(self, node: ast.stmt, place: tuple) -> Iterator[Mutation]:
        if _is_left_alone(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in TEXT_ONLY:
                return
            self._scope = (*self._scope, node.name)
        for kind, inner_place, new in self._in_statement(node):
            yield self._mutation(node, place, kind, inner_place, new)
        for field in ("body", "orelse", "finalbody"):
            yield from self._body(getattr(node, field, []), (field,), place)
        for index, part in enumerate([*getattr(node, "handlers", []), *getattr(node, "cases", [])]):
            field = "handlers" if isinstance(part, ast.excepthandler) else "cases"
            yield from self._body(part.body, ("body",), (*place, (field, index)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._scope = self._scope[:-1]

    def _in_statement(self, node: ast.stmt) -> Iterator[tuple[str, tuple, ast.AST]]:
        """Yield kind, place within the statement, and replacement."""
        if _can_be_left_out(node):
            yield "statement left out", (), ast.Pass()
        if isinstance(node, ast.If | ast.While):
            for forced in (True, False):
                if not _is_constant(node.test, forced) and not (
                    isinstance(node, ast.While) and forced
                ):
                    yield "condition", (("test", None),), ast.Constant(forced)
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            yield "operator", (("op", None),), OPERATORS[type(node.op)]()
        if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
            yield "return value", (("value", None),), ast.Constant(None)
        for field in _HEADS.get(type(node), ("value",)):
            part = getattr(node, field, None)
            parts = list(enumerate(part)) if isinstance(part, list) else [(None, part)]
            for index, child in parts:
                if isinstance(child, ast.AST):
                    yield from self._expression(child, ((field, index),))

    def _expression(self, node: ast.AST, place: tuple) -> Iterator[tuple[str, tuple, ast.AST]]:
        if isinstance(node, ast.JoinedStr) or _is_text(node):
            return
        for rule in _RULES:
            for kind, inner_place, new in rule(node, self._modules):
                yield kind, (*place, *inner_place), new
        for field, value in ast.iter_fields(node):
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and field not in {"annotation", "returns"}:
                    yield from self._expression(child, (*place, (field, index)))

    def _mutation(
        self, node: ast.stmt, place: tuple, kind: str, inner_place: tuple, new: ast.AST
    ) -> Mutation:
        changed = copy.deepcopy(node)
        if inner_place:
            _replace(changed, inner_place, new)
        before, after = _head(node), _head(changed if inner_place else new)
        function = ".".join(self._scope)
        key = f"{self._path} {function} {before} -> {after}"
        self._alike[key] += 1
        body = getattr(node, "body", None)
        last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
        return Mutation(
            path=self._path,
            function=function,
            lines=(node.lineno, last),
            kind=kind,
            text=_shortened(before, after),
            key=f"{key} #{self._alike[key]}",
            place=(*place, *inner_place),
            replacement=new,
        )


_HEADS: dict[type[ast.stmt], tuple[str, ...]] = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("iter",),
    ast.With: ("items",),
    ast.FunctionDef: ("args",),
    ast.ClassDef: (),
    ast.Match: ("subject",),
    ast.Assign: ("value", "targets"),
}
"""The expressions at the head of each kind of statement; a statement's `value` otherwise."""


def _is_left_alone(node: ast.stmt) -> bool:
    """Whether a statement has texts, types or names only."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            return ast.unparse(node.value.func).partition(".")[0] in TEXT_ONLY
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign):
        name = node.targets[0]
        return isinstance(name, ast.Name) and (name.id.startswith("__") or name.id in TEXT_ONLY)
    return False


def _can_be_left_out(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_text(node: ast.AST) -> bool:
    """Whether an expression puts texts together."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


_Changes = Iterator[tuple[str, tuple, ast.AST]]


def _operators(node: ast.AST, _modules: set[str]) -> _Changes:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield "operator", (("op", None),), OPERATORS[type(node.op)]()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield "sign", (), ast.UnaryOp(ast.USub(), node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield "sign", (), node.operand
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield "comparison", (("ops", index),), OPERATORS[type(operator)]()


def _constants(node: ast.AST, _modules: set[str]) -> _Changes:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield "constant", (), ast.Constant(not value)
    elif isinstance(value, int | float):
        yield "constant", (), ast.Constant(value + 1)
        if value:
            yield "constant", (), ast.Constant(type(value)(0))


def _conditions(node: ast.AST, _modules: set[str]) -> _Changes:
    if isinstance(node, ast.IfExp):
        yield "condition", (("test", None),), ast.Constant(True)
        yield "condition", (("test", None),), ast.Constant(False)
    if isinstance(node, ast.comprehension):
        for index in range(len(node.ifs)):
            yield "condition", (("ifs", index),), ast.Constant(True)


def _slices(node: ast.AST, _modules: set[str]) -> _Changes:
    if isinstance(node, ast.Slice):
        for field in ("lower", "upper"):
            bound = getattr(node, field)
            if bound is not None and not isinstance(bound, ast.Constant):
                yield "slice", ((field, None),), ast.BinOp(bound, ast.Add(), ast.Constant(1))


def _calls(node: ast.AST, modules: set[str]) -> _Changes:
    if not isinstance(node, ast.Call):
        return
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in NAMES:
        field = "attr" if isinstance(function, ast.Attribute) else "id"
        other = copy.copy(function)
        setattr(other, field, NAMES[name])
        yield "call", (("func", None),), other
    if name not in KEPT_CALLS:
        yield from _without_call(node, name, modules)
    if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
        fewer = copy.copy(node)
        fewer.args = node.args[:-1]
        yield "argument", (), fewer
    for index, keyword in enumerate(node.keywords):
        if keyword.arg and keyword.arg not in KEPT_KEYWORDS and not name[:1].isupper():
            fewer = copy.copy(node)
            fewer.keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield "argument", (), fewer


def _without_call(node: ast.Call, name: str, modules: set[str]) -> _Changes:
    """Yield what a method is called on, or the first argument of another function."""
    if isinstance(node.func, ast.Attribute) and not name[:1].isupper():
        owner = node.func.value
        is_method = not (isinstance(owner, ast.Name) and owner.id in {*modules, "self", "cls"})
        if is_method and not ast.unparse(owner)[:1].isupper():
            yield "call", (), owner
            return
    if node.args and not isinstance(node.args[0], ast.Starred) and not name[:1].isupper():
        yield "call", (), node.args[0]


_RULES: tuple[Callable[[ast.AST, set[str]], _Changes], ...] = (
    _operators,
    _constants,
    _conditions,
    _slices,
    _calls,
)


def _replace(root: ast.AST, place: tuple, new: ast.AST) -> None:
    """Replace the node that `place` leads to."""
    node: object = root
    for field, index in place[:-1]:
        value = getattr(node, field)
        node = value if index is None else value[index]
    field, index = place[-1]
    if index is None:
        setattr(node, field, copy.deepcopy(new))
    else:
        getattr(node, field)[index] = copy.deepcopy(new)


def _head(node: ast.AST) -> str:
    """Return a statement as a line, without the statements within it."""
    node = copy.copy(node)
    for field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if hasattr(node, field):
            setattr(node, field, [])
    return " ".join(ast.unparse(node).split()).removesuffix(":")


def _shortened(before: str, after: str) -> str:
    """Return `before -> after` without what is the same far from the change."""
    start = _n_common(before, after)
    limit = min(len(before), len(after)) - start
    end = min(_n_common(before[::-1], after[::-1]), limit)
    skip = start - CONTEXT if start > CONTEXT + 8 else 0
    keep = len(before) - end + CONTEXT if end > CONTEXT + 8 else len(before)
    head, tail = "... " if skip else "", " ..." if keep < len(before) else ""
    longer = len(after) - len(before)
    return f"{head}{before[skip:keep]}{tail} -> {head}{after[skip : keep + longer]}{tail}"


def _n_common(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
