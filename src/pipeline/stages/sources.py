"""Which source files a stage really imports, read from the import statements.

Neither DVC nor Snakemake can know this. A stage's fingerprint uses it, and a test compares it with
what `dvc.yaml` declares.
"""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_PACKAGE = "pipeline"
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements hold statements."""


def closure(src: Path, *modules: str) -> set[Path]:
    """Files below `src` that `modules` import, directly or not, lazily or at once.

    Imports for type checkers only are left out. A text that names a module of the package, as in
    `import_module` or as `module:attribute`, counts as an import; one that ends in a dot, as the
    start of an f-string does, stands for the whole package. What a package's `__getattr__` would
    import is left out: that is for the package's users, not for its own modules.
    """
    found: set[Path] = set()
    named: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in named:
            continue
        named.add(module)
        for file in _files(src, module):
            if file not in found:
                found.add(file)
                waiting += _imports(src, file)
    return found


def ids(src: Path, used: Iterable[Path]) -> dict[str, str]:
    """The id that git gives the content of each file, by its path below `src`."""
    return {file.relative_to(src).as_posix(): git_id(file) for file in sorted(used)}


def git_id(file: Path) -> str:
    """The id of a blob with this content, as `git hash-object` gives it."""
    content = file.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _files(src: Path, module: str) -> list[Path]:
    """The module's file and the `__init__` files that importing it runs; empty when unknown."""
    parts = module.split(".")
    whole = parts[-1] == ""
    base = src.joinpath(*(parts[:-1] if whole else parts))
    if whole:
        return sorted(base.rglob("*.py")) if base.is_dir() else []
    own = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not own.exists():
        return []
    parents = [src.joinpath(*parts[:n]) / "__init__.py" for n in range(1, len(parts))]
    return [own, *(file for file in parents if file.exists())]


def _imports(src: Path, file: Path) -> Iterator[str]:
    """Dotted names of the package's modules that `file` may import."""
    here = list(file.relative_to(src).with_suffix("").parts)
    text = file.read_text(encoding="utf-8")
    in_texts = any(f"{quote}{_PACKAGE}" in text for quote in "\"'")
    for node in _runtime(ast.parse(text), in_texts=in_texts):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            if _ours(module):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and _names_module(node.value):
            yield str(node.value).partition(":")[0]


def _names_module(value: object) -> bool:
    return isinstance(value, str) and value.startswith(f"{_PACKAGE}.") and " " not in value


def _ours(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")


def _runtime(tree: ast.Module, *, in_texts: bool) -> Iterator[ast.AST]:
    """All statements, without the bodies of `if TYPE_CHECKING`.

    Args:
        tree: of a file.
        in_texts: whether a text in it may name a module; then expressions come too.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            continue
        if isinstance(node, ast.If) and _is_for_types(node.test):
            waiting += node.orelse
        elif in_texts:
            waiting += ast.iter_child_nodes(node)
        else:
            for part in _PARTS:
                waiting += getattr(node, part, ())


def _is_for_types(test: ast.expr) -> bool:
    names = (getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(test))
    return "TYPE_CHECKING" in names
