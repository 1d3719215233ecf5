"""Every public name of the installed `mlagents_envs`, and what the page of names says of it.

Names are read from the sources, because importing some of its modules asks a server for manifests.
A name is public without a leading underscore; those that a module imports are listed for packages.
Of classes with an equivalent, the public members and the arguments of the constructor are compared.

    python benchmarks/peer_names.py
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import peer

if TYPE_CHECKING:
    from collections.abc import Iterator


PAGE = Path(__file__).resolve().parents[1] / "docs/reference/ml-agents-names.md"


def package() -> Path:
    """Return the folder of `mlagents_envs` beside the peer's program."""
    library = Path(peer.peer_command()).parent.parent / "lib"
    return next(library.glob("python*/site-packages/mlagents_envs"))


def public_names(folder: Path) -> dict[str, ast.AST]:
    """Return the public names of a package, dotted, with what defines each."""
    definitions: dict[str, ast.AST] = {}
    for file in sorted(folder.rglob("*.py")):
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        dotted = module.removesuffix(".__init__")
        for name, node in _defined(ast.parse(file.read_text()), imports=dotted != module):
            if not name.startswith("_"):
                definitions[f"{dotted}.{name}"] = node
    return definitions


def _defined(tree: ast.AST, *, imports: bool) -> Iterator[tuple[str, ast.AST]]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and imports:
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _defined(node, imports=imports)


def absent(node: ast.ClassDef, ours: type) -> Iterator[str]:
    """Yield the public members that a class of ours lacks.

    An argument of the constructor is `(name)`; ours must have it at the same place.
    """
    # A base class of others may annotate what nobody gives a value, as PettingZoo's do.
    annotated = (cls for cls in ours.__mro__ if cls.__module__.startswith("pipeline."))
    known = {name for cls in annotated for name in getattr(cls, "__annotations__", ())}
    known |= {name for cls in ours.__mro__ for name in _assigned(cls)}
    for name, member in _defined(node, imports=False):
        if name == "__init__" and isinstance(member, ast.FunctionDef):
            parameters = inspect.signature(ours.__init__).parameters.values()  # type: ignore[misc]
            places = [
                parameter.name
                for parameter in parameters
                if parameter.kind is not parameter.KEYWORD_ONLY
            ]
            for place, argument in enumerate(member.args.args):
                if argument.arg not in places[place : place + 1]:
                    yield f"({argument.arg})"
        elif not (name.startswith("_") or name in known or hasattr(ours, name)):
            yield name


def _assigned(cls: type) -> Iterator[str]:
    """Yield the attributes that a class gives a value; none of one without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # built in
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def _bases(node: ast.ClassDef, definitions: dict[str, ast.AST]) -> Iterator[ast.ClassDef]:
    named = {base.id for base in node.bases if isinstance(base, ast.Name)}
    classes = {
        definition.name: definition
        for definition in definitions.values()
        if isinstance(definition, ast.ClassDef)
    }
    return (classes[name] for name in named & classes.keys())


@functools.cache
def known_members() -> list[str]:
    """Return the members and arguments that the guide says are lacking, in the page's last table.

    The name of an argument of a constructor is in brackets.
    """
    text = PAGE.read_text(encoding="utf-8").partition("## Every name\n")[2]
    return re.findall(r"^\| `([^`]+)` \| [^|]+ \|$", text, re.MULTILINE)


@functools.cache
def equivalents() -> dict[str, str]:
    """Return each name of the page's first table, with the place of its equivalent or ''."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(mlagents\S+)` \| (?:`(\S+)`)? \| .*\|$", text, re.MULTILINE))


def lacking() -> Iterator[str]:
    """Yield the names, members and arguments for which there is neither equivalent nor reason."""
    theirs = public_names(package())
    for name, node in theirs.items():
        place = equivalents().get(name)
        if place is None:
            yield name
        elif place and isinstance(node, ast.ClassDef):
            module, _, last = place.rpartition(".")
            ours = getattr(import_module(module), last)
            members = {*absent(node, ours)}
            for base in _bases(node, theirs):
                members |= {member for member in absent(base, ours) if not member.startswith("(")}
            missing = (f"{node.name}.{member}" for member in sorted(members))
            yield from (label for label in missing if label not in known_members())


def main() -> int:
    """Count, and list what is lacking."""
    theirs = public_names(package())
    equivalent = sum(bool(equivalents().get(name)) for name in theirs)
    missing = list(lacking())
    ours = {qualified for qualified in equivalents() if qualified.startswith(f"{package().name}.")}
    unknown = sorted(ours - theirs.keys())
    print(f"{len(theirs)} public names of {package().name}: {equivalent} have an equivalent,")  # noqa: T201
    print(f"{len(theirs) - equivalent} have none and a reason; {len(missing)} are missing")  # noqa: T201
    print(f"{len(known_members())} members and arguments have none and a reason")  # noqa: T201
    for name in [*missing, *(f"{qualified} (only here)" for qualified in unknown)]:
        print(f"  {name}")  # noqa: T201
    return int(bool(missing or unknown))


if __name__ == "__main__":
    sys.exit(main())
