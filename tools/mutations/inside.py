"""What a process with the package in it needs here: a mutated module, or which lines run.

Processes that tests start need it, too: `children/sitecustomize.py` asks for what their parent had.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from changes import Mutation

REPOSITORY = Path(__file__).parents[2]
SOURCE = str(REPOSITORY / "src" / "pipeline")
CHILDREN = str(Path(__file__).with_name("children"))
_VARIABLE = "PIPELINE_MUTATIONS"


def tell_children(kind: str, path: str) -> None:
    """Have the Python processes that tests start do the same, by `kind`: `mutation` or `lines`."""
    os.environ[_VARIABLE] = f"{kind}:{path}"
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, CHILDREN)  # tests hand on this, too


def be_child() -> None:
    """Mutate a module or trace lines, as the process that runs the tests does."""
    kind, _, path = os.environ.get(_VARIABLE, "").partition(":")
    if kind == "mutation":
        mutate(pickle.loads(Path(path).read_bytes()))  # noqa: S301  # our parent wrote it
    elif kind == "lines":
        lines: dict[str, set[int]] = {}
        Tracer(lines).start()
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        atexit.register(_write_lines, lines, test, Path(path) / f"{os.getpid()}.json")


def _write_lines(lines: dict[str, set[int]], test: str, target: Path) -> None:
    sys.settrace(None)
    listed = {path: sorted(numbers) for path, numbers in lines.items()}
    target.write_text(json.dumps([test, listed]))


def written(mutation: Mutation) -> str:
    """Return a temporary file with the mutation."""
    path = Path(tempfile.mkdtemp(), "mutation")
    path.write_bytes(pickle.dumps(mutation))
    return str(path)


class Tracer:
    """Notes the lines of the package that run, by file."""

    def __init__(self, lines: dict[str, set[int]]) -> None:
        self.lines = lines

    def start(self) -> None:
        """Begin, or begin again after others have set a trace function."""
        sys.settrace(self._enter)
        threading.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(SOURCE):
            return None
        lines = self.lines.setdefault(path, set())
        lines.add(frame.f_lineno)

        def line(frame: FrameType, _event: str, _arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


def mutate(mutation: Mutation) -> None:
    """Have the import system give the mutated module."""
    sys.meta_path.insert(0, _Finder(mutation))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._path = REPOSITORY / mutation.path
        parts = Path(mutation.path).with_suffix("").parts[1:]
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self._mutation = mutation

    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, str(self._path))
        loader.mutation = self._mutation
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002  # the import system's call
        tree = self.mutation.apply(Path(self.path).read_text(encoding="utf-8"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile(tree, self.path, "exec", dont_inherit=True)
