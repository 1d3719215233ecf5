"""The source files that each stage imports, found by its import statements.

DVC and Snakemake cannot find these files, and lists written by hand would become outdated. The
Snakefile calls `watched`, and its rules have the returned files as inputs. DVC cannot call a
function, so each stage of DVC depends on a file in `workflow/code`, which `note` writes and the
stage `check` updates. A stage's fingerprint has the files that `closure` returns for the stage.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline import files
from pipeline.settings.project.claims import CLAIMS, LOCK

CODE = Path("workflow/code")
"""Folder of the files on which DVC's stages depend."""
_SCRIPTS = "workflow/scripts"
_PACKAGE = "pipeline"
_BY_MODULE = {"env": ("envs", "dag")}
"""For each stage: packages of which only the imported modules count as sources; an imported
subfolder counts as a whole. If all modules of `envs` counted, the stage `env` would rebuild Unity
projects after each edit of code that drives environments."""
_PACKED = {"env": ("core",)}
"""For each stage: packages that it packs into executables, in addition to those that it imports."""
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of `ast` statements that contain further statements."""


def stages(root: Path) -> list[str]:
    """Return the stages that have sources to watch: every script except that of `check`."""
    return sorted({file.stem for file in (root / _SCRIPTS).glob("[a-z]*.py")} - {"check"})


def src_of(code: Path) -> Path:
    """Return the folder that has the package: `src` of a checkout, or a wheel's site folder."""
    folder = code / "src"
    return folder if folder.is_dir() or code.parent.name != _PACKAGE else code.parents[1]


def place(code: Path, name: str) -> Path:
    """Return the path of a file that `watched` names; `src/` in a name means `src_of(code)`."""
    return src_of(code) / name[len("src/") :] if name.startswith("src/") else code / name


def watched(root: Path, stage: str) -> list[str]:
    """Return the source files of a stage: an edit of one of them makes engines rerun the stage.

    The names are relative to a checkout. If a stage imports any module of a package, the whole
    package counts, because other modules may be imported by name. `root` is a checkout, or the
    folder with `workflow` in the installed package; names are the same for both.
    """
    src = src_of(root)
    package = src / _PACKAGE
    by_module = _BY_MODULE.get(stage, ("dag",))
    places = {Path(name) for name in _PACKED.get(stage, ())}
    for file in closure(src, f"{_PACKAGE}.dag.stages.{stage}"):
        parts = file.relative_to(package).parts
        # Of the stages and of the packages in `by_module`, only the imported modules are listed.
        # Every other package is listed as a whole.
        depth = 3 if parts[:2] == ("dag", "stages") else 2 if parts[0] in by_module else 1
        places.add(Path(*parts[:depth]))
    paths: list[Path] = []
    for relative in places:
        path = package / relative
        paths += path.rglob("*") if path.is_dir() else [path]
    names = [
        f"src/{file.relative_to(src).as_posix()}"
        for file in paths
        if file.is_file() and "__pycache__" not in file.parts
    ]
    # Every script of a stage imports `_start`, which is outside of the package.
    scripts = (f"{_SCRIPTS}/{name}.py" for name in ("_start", stage))
    return sorted([*names, *(script for script in scripts if (root / script).is_file())])


def note(root: Path, stage: str, code: Path | None = None) -> None:
    """Write the file with git's ids of a stage's source files, if an id has changed.

    `code` is the folder of the code that makes the project's results; None for the project itself.
    """
    code = code or root
    noted = {name: place(code, name) for name in watched(code, stage)}
    if stage == "report":
        noted |= {name: root / name for name in claims_of(root)}
    text = "".join(f"{git_id(file)}  {name}\n" for name, file in noted.items())
    path = root / CODE / f"{stage}.txt"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        files.write_whole(path, text)


def claims_of(root: Path) -> list[str]:
    """Return a project's files with claims; the stage `report` reads the files if they exist."""
    # dvc.yaml does not list these files, because DVC refuses a dependency that does not exist.
    return [str(path) for path in (CLAIMS, LOCK) if (root / path).is_file()]


def closure(src: Path, *modules: str) -> set[Path]:
    """Return the files below `src` that modules import, directly or indirectly, also in functions.

    Imports under `TYPE_CHECKING` are left out. A string with the name of a module of the package,
    as for `import_module` or as `module:attribute`, counts as an import; a string that ends in a
    dot, like the start of an f-string, counts as the whole package. Imports in a package's
    `__getattr__` are left out: only users of the package need them, not its modules.
    """
    files_read: set[Path] = set()
    named: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in named:
            continue
        named.add(module)
        for file in _files(src, module):
            if file not in files_read:
                files_read.add(file)
                waiting += _imports(src, file.relative_to(src), file.stat().st_mtime_ns)
    return files_read


def ids(src: Path, used: Iterable[Path]) -> dict[str, str]:
    """Return git's id of each file's content, by the file's path below `src`."""
    return {file.relative_to(src).as_posix(): git_id(file) for file in sorted(used)}


def git_id(file: Path) -> str:
    """Return git's id of a file's content, as `git hash-object` computes it."""
    content = file.read_bytes()
    # Git hashes a header before the content
    # (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _files(src: Path, module: str) -> list[Path]:
    """Return the files that the import of a module runs; [] if there is no such module."""
    parts = module.split(".")
    whole_package = parts[-1] == ""
    base = src.joinpath(*(parts[:-1] if whole_package else parts))
    if whole_package:
        return sorted(base.rglob("*.py")) if base.is_dir() else []
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return []
    # Importing `a.b.c` runs the `__init__.py` of `a` and `a.b` first.
    parents = [src.joinpath(*parts[:n]) / "__init__.py" for n in range(1, len(parts))]
    return [path, *(file for file in parents if file.exists())]


@functools.cache
def _imports(src: Path, file: Path, changed_ns: int) -> tuple[str, ...]:  # noqa: ARG001  # part of the cache's key
    """Return dotted names of this package's modules that `file` may import; cached."""
    module_parts = file.with_suffix("").parts
    text = (src / file).read_text(encoding="utf-8")
    # Expressions are walked only if the file has names of modules in strings, because the walk is
    # slow and few files have such strings.
    in_strings = any(f"{quote}{_PACKAGE}" in text for quote in "\"'")
    names: list[str] = []
    for node in _runtime(ast.parse(text), in_strings=in_strings):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if _ours(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            # A relative import begins at the file's own dotted name without its last `level` parts.
            start = ".".join(module_parts[: -node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            if _ours(module):
                # In `from package import name` the name may be a module; if not, `_files` ignores
                # it.
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and _names_module(node.value):
            names.append(str(node.value).partition(":")[0])
    return tuple(names)


def _names_module(value: object) -> bool:
    return isinstance(value, str) and value.startswith(f"{_PACKAGE}.") and " " not in value


def _ours(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")


def _runtime(tree: ast.Module, *, in_strings: bool) -> Iterator[ast.AST]:
    """Yield all nodes of a module's statements, except statements in bodies of `if TYPE_CHECKING`.

    With `in_strings` also yield the nodes of expressions, because strings may be names of modules.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        # Only users of a package need the imports in its `__getattr__` (see `closure`).
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif in_strings:
            waiting += ast.iter_child_nodes(node)
        else:
            for part in _PARTS:
                waiting += getattr(node, part, ())
