"""Which lines of the package each unit test runs, and how long it takes."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from inside import REPOSITORY, Tracer, tell_children

QUIET = (
    *("-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins are imported before the fork
)
"""Options of every run of tests here."""


@dataclass
class Record:
    """What the tests of one file run."""

    digests: dict[str, str]
    """Every file of the repository that was imported; the record holds while none changes."""
    imported: dict[str, list[int]] = field(default_factory=dict)
    """Lines that run while the tests are collected, by file."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test that passes."""
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Lines that each test runs, by file."""

    def is_current(self) -> bool:
        """Whether no file that it depends on has changed."""
        return all(digest(REPOSITORY / name) == recorded for name, recorded in self.digests.items())

    def tests_of(self, path: str, lines: Iterable[int]) -> Iterator[tuple[bool, float, str]]:
        """Yield the tests that may notice a change of the lines.

        A line that runs while a module is imported may matter to every test that imports it; then
        the tests that run other lines of its file come first.
        """
        lines = set(lines)
        at_import = not lines.isdisjoint(self.imported.get(path, ()))
        for test, seconds in self.seconds.items():
            ran = self.lines[test].get(path, [])
            if at_import or not lines.isdisjoint(ran):
                yield not ran, seconds, test


def digest(path: Path) -> str:
    """Return the digest of a file, or nothing if it is gone."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class _Recorder:
    """Notes which test runs which lines, as a plugin of pytest."""

    def __init__(self) -> None:
        self.imported: dict[str, set[int]] = {}
        self.lines: dict[str, dict[str, set[int]]] = {}
        self.seconds: dict[str, float] = {}
        self._tracer = Tracer(self.imported)
        self._tracer.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.lines = self.lines.setdefault(item.nodeid, {})
        self._tracer.start()  # pytest's own plugins may have stopped it
        start = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What several tests share matters to each of them, as imports do."""
        before = self._tracer.lines
        if fixturedef.scope != "function":
            self._tracer.lines = self.imported
        result = yield
        self._tracer.lines = before
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.lines.pop(report.nodeid, None)

    def add_children(self, folder: Path) -> None:
        """Add what the processes noted that tests have started."""
        for path in folder.iterdir():
            started_in, lines = json.loads(path.read_text())
            test, _, phase = started_in.rpartition(" ")
            target = self.imported if phase == "(setup)" else self.lines.get(test, {})
            for file, numbers in lines.items():
                target.setdefault(file, set()).update(numbers)


def record(test_file: str, target: Path) -> None:
    """Run the tests of a file and write what they ran; a process does this once.

    Tests that do not pass as things are, skipped ones included, are left out.
    """
    recorder = _Recorder()
    folder = Path(tempfile.mkdtemp())
    tell_children("lines", str(folder))
    status = pytest.main([*QUIET, test_file], plugins=[recorder])
    sys.settrace(None)
    if status not in {0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}:
        raise RuntimeError(f"{test_file}: its tests cannot be run")
    recorder.add_children(folder)
    ours = (f"{REPOSITORY}/src/", f"{REPOSITORY}/tests/")
    names = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    inside = {name for name in names if name.startswith(ours)}
    inside |= {name for lines in (recorder.imported, *recorder.lines.values()) for name in lines}
    result = Record(
        digests={_below(path): digest(Path(path)) for path in sorted(inside)},
        imported={_below(path): sorted(lines) for path, lines in recorder.imported.items()},
        seconds={test: recorder.seconds[test] for test in recorder.lines},
        lines={
            test: {_below(path): sorted(lines) for path, lines in files.items()}
            for test, files in recorder.lines.items()
        },
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(vars(result)))


def _below(path: str | Path) -> str:
    return Path(path).relative_to(REPOSITORY).as_posix()
