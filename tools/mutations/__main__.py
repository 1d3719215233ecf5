"""Makes small mistakes in the package and runs the nearest unit tests: which go unnoticed?

`make test-mutations` runs it in full; `python tools/mutations --help` lists what else it does.

A process that has imported what the tests need from others, and nothing of the package, forks for
every mutation. The child gives the import system the mutated module, without writing a file, runs
the tests that execute the changed line, quickest first, and ends with the first that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import inside
import pytest
import yaml
from changes import Mutation, mutations_of, sample
from lines import QUIET, REPOSITORY, Record, record

os.environ["OMP_NUM_THREADS"] = "1"
os.chdir(REPOSITORY)

SAMPLES = {"algos": 330, "data": 150, "nets": 150, "wire": 330, "export": 150, "trainer": 150}
"""How many mutations of each package `make test-mutations` tries."""
NEIGHBOURS = {"data": ("algos",), "nets": ("algos", "export")}
"""Packages whose unit tests, too, are near; those of the package itself always are."""
LEAST_SHARE = 0.85
KEPT = REPOSITORY / "build" / "mutations"
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
MEMORY = 12 << 30
"""Bytes of address space for a child."""
PRELOADED = (
    *("torch", "numpy", "onnx", "onnxruntime", "grpc", "google.protobuf", "yaml", "PIL.Image"),
    *("hypothesis", "_hypothesis_pytestplugin", "xdist.plugin", "pytest_timeout", "psutil"),
    *("gymnasium", "pettingzoo", "requests", "rich", "filelock"),
)
T = TypeVar("T")
CAUGHT, TIMED_OUT, SURVIVED, EQUAL = "caught", "by time-out", "survived", "equivalent, with reason"


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no child behind
    for name in PRELOADED:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    equivalent = {
        (entry["file"], entry["mutation"]): entry["reason"]
        for entry in yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    }
    table = []
    for package in options.package or SAMPLES:
        mutations = _chosen(package, options)
        if options.list:
            for mutation in mutations:
                _say(f"{mutation.path}:{mutation.lines[0]}: {mutation.text}")
            continue
        start = time.monotonic()
        files = options.tests or _nearest_tests(package)
        verdicts = _verdicts(package, mutations, equivalent, files, options.jobs)
        table.append(_row(package, list(verdicts.values()), time.monotonic() - start))
        _keep(package, mutations, verdicts)
    if table:
        _say("\n".join([_HEAD, *(row for row, _ in table)]))
    return int(any(share < LEAST_SHARE for _, share in table))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/mutations", description=__doc__)
    parser.add_argument("--package", nargs="+", help="packages below src/pipeline")
    parser.add_argument(
        "--module", nargs="+", default=[""], help="only files whose path contains one of these"
    )
    parser.add_argument("--tests", nargs="+", help="files of tests to run instead of the nearest")
    parser.add_argument("--sample", type=int, help="mutations of each package; 0: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at a time")
    parser.add_argument("--again", action="store_true", help="only the last run's survivors")
    parser.add_argument("--list", action="store_true", help="list the mutations, try none")
    return parser.parse_args()


def _chosen(package: str, options: argparse.Namespace) -> list[Mutation]:
    """Return a package's mutations: of each file as many as its share of them all."""
    files = {}
    for path in sorted((REPOSITORY / "src" / "pipeline" / package).rglob("*.py")):
        name = path.relative_to(REPOSITORY).as_posix()
        if "/generated/" not in name:
            files[name] = mutations_of(name, path.read_text(encoding="utf-8"))
    n_wanted = SAMPLES.get(package, 100)
    in_module = {name for name in files if any(text in name for text in options.module)}
    if options.sample is not None:
        files = {name: files[name] for name in in_module}
        n_wanted = options.sample or sum(map(len, files.values()))
    n_all = max(sum(map(len, files.values())), 1)
    chosen = []
    for name, mutations in files.items():
        if name in in_module:
            share = min(-(-n_wanted * len(mutations) // n_all), len(mutations))
            chosen += sample(mutations, share, options.seed)
    if options.again:
        last = json.loads((KEPT / f"{package}.json").read_text())
        chosen = [mutation for mutation in chosen if last.get(mutation.key) == SURVIVED]
    return chosen


def _keep(package: str, mutations: list[Mutation], verdicts: dict[str, str]) -> None:
    path = KEPT / f"{package}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    last = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(last | verdicts, indent=1))


_HEAD = (
    "| package | mutations | caught | by time-out | equivalent, with reason | survived "
    "| share caught | minutes |\n|---|---|---|---|---|---|---|---|"
)


def _row(package: str, verdicts: list[str], seconds: float) -> tuple[str, float]:
    """Return a line of the table, and the share that is caught."""
    counts = [verdicts.count(verdict) for verdict in (CAUGHT, TIMED_OUT, EQUAL, SURVIVED)]
    caught, timed_out, equal, _ = counts
    share = (caught + timed_out) / max(len(verdicts) - equal, 1)
    cells = [package, len(verdicts), *counts, f"{100 * share:.1f} %", f"{seconds / 60:.1f}"]
    return f"| {' | '.join(map(str, cells))} |", share


def _nearest_tests(package: str) -> list[str]:
    return [
        path.relative_to(REPOSITORY).as_posix()
        for near in (package, *NEIGHBOURS.get(package, ()))
        for path in sorted((REPOSITORY / "tests" / "unit" / near).rglob("test_*.py"))
    ]


def _verdicts(
    package: str,
    mutations: list[Mutation],
    equivalent: dict[tuple[str, str], str],
    files: list[str],
    jobs: int,
) -> dict[str, str]:
    """Try every mutation; the survivors are printed as they are met."""
    records = _records(package, files, jobs)
    verdicts = {}
    waiting = []
    for mutant in mutations:
        tests = sorted(
            test
            for file_record in records
            for test in file_record.tests_of(
                mutant.path, range(mutant.lines[0], mutant.lines[1] + 1)
            )
        )
        if (mutant.path, mutant.text) in equivalent:
            verdicts[mutant.key] = EQUAL
        elif tests:
            waiting.append((mutant, tests))
        else:
            verdicts[mutant.key] = SURVIVED
            _say(f"{mutant.path}:{mutant.lines[0]}: {mutant.text}   (no test runs this line)")
    progress = _Progress(package, len(waiting))

    def judge(task: tuple[Mutation, list[tuple[bool, float, str]]], status: int) -> None:
        mutation = task[0]
        verdict = {_EXIT_PASSED: SURVIVED, _EXIT_TIME_OUT: TIMED_OUT}.get(status, CAUGHT)
        verdicts[mutation.key] = verdict
        progress.step()
        if verdict == SURVIVED:
            _say(f"{mutation.path}:{mutation.lines[0]}: {mutation.text}")

    _in_children(waiting, lambda task: _try(*task), judge, jobs)
    return verdicts


def _records(package: str, files: list[str], jobs: int) -> list[Record]:
    """Return the lines that the tests run; files with a current record are not run again."""

    def kept(file: str) -> Path:
        return KEPT / "lines" / f"{file.replace('/', '.')}.json"

    def known(file: str) -> Record | None:
        if not kept(file).is_file():
            return None
        record = Record(**json.loads(kept(file).read_text()))
        return record if record.is_current() else None

    missing = [file for file in files if known(file) is None]
    progress = _Progress(f"lines that the tests of {package} run", len(missing))
    for file in missing:
        kept(file).unlink(missing_ok=True)
    _in_children(
        missing,
        lambda file: record(file, kept(file)) or 0,
        lambda _file, _status: progress.step(),
        jobs,
    )
    records = {file: known(file) for file in files}
    for file, result in records.items():
        if result is None or not result.seconds:
            _say(f"no test of {file} passes here; it is left out")
    return [file_record for file_record in records.values() if file_record]


_EXIT_PASSED, _EXIT_TIME_OUT, _EXIT_NO_TESTS, _EXIT_BROKEN = 10, 1, 15, 70
"""pytest's exit codes and ten; 1 is how `faulthandler` ends a process; 70: a mistake in here."""


def _try(mutation: Mutation, tests: list[tuple[bool, float, str]]) -> int:
    """Run the tests on the mutated module, in a process of its own; return its exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    inside.mutate(mutation)
    inside.tell_children("mutation", inside.written(mutation))
    limits = {test: max(20.0, 10 * seconds) for _, seconds, test in tests}
    watchdog = _Watchdog(limits)
    try:
        return 10 + pytest.main([*QUIET, "-x", *limits], plugins=[watchdog])
    except Exception:  # noqa: BLE001  # warnings that are errors, after the last test
        return 10 + pytest.ExitCode.TESTS_FAILED


class _Watchdog:
    """Ends the process when a test takes far longer than it does on the unchanged package."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
        self._arm(60.0)  # imports and collection

    def _arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._nowhere)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._arm(self._limits.get(nodeid, 60.0))


def _in_children(
    tasks: list[T], work: Callable[[T], int], done: Callable[[T, int], None], jobs: int
) -> None:
    """Do each task in a forked process, `jobs` at a time."""
    running: dict[int, tuple[T, str]] = {}
    todo = iter(tasks)
    try:
        while True:
            while len(running) < jobs and (task := next(todo, None)) is not None:
                scratch = tempfile.mkdtemp(prefix="mutation-")
                running[_fork(lambda task=task: work(task), scratch)] = (task, scratch)
            if not running:
                return
            pid, status = os.waitpid(-1, 0)
            task, scratch = running.pop(pid)
            status = os.waitstatus_to_exitcode(status)
            if status in {_EXIT_BROKEN, _EXIT_NO_TESTS}:
                raise RuntimeError(f"{task}: {Path(scratch, 'output').read_text()}")
            _clean_up(pid, scratch)
            done(task, status)
    finally:
        for pid, (_, scratch) in running.items():
            _clean_up(pid, scratch)
            os.waitpid(pid, 0)


def _fork(work: Callable[[], int], scratch: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = _EXIT_BROKEN
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(f"{scratch}/output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        status = work()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _clean_up(pid: int, scratch: str) -> None:
    """End what a child has started, and remove what it has written."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


class _Progress:
    """How much is done and how long the rest will take, on standard error."""

    def __init__(self, label: str, n: int) -> None:
        self._label, self._n, self._done, self._start = label, n, 0, time.monotonic()

    def step(self) -> None:
        self._done += 1
        if self._done % 10 == 0 or self._done == self._n:
            spent = time.monotonic() - self._start
            left = spent / self._done * (self._n - self._done)
            sys.stderr.write(f"{self._label}: {self._done}/{self._n}, {left:.0f} s left\n")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
