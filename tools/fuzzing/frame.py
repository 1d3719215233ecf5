"""What no input may do, whatever it holds, and the runs of examples that look for one that does.

A target is a file of this folder: `fuzz` turns each check in it into a test. The suite runs a round
of each with the seed 0; `python tools/fuzzing` sets PIPELINE_FUZZ_SECONDS, for rounds with one seed
after another. A round can be repeated: PIPELINE_FUZZ_SEED=<seed> python -m pytest <file>::<test>
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import hypothesis

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

HANG_S = 5.0
"""An example may take this long, not counting the time that it waits for a processor."""
_LONGEST_S = 900.0
"""The process is ended after this long, for code that lets no signal handler have its turn."""
EXTRA_BYTES = 200 << 20
TIMES_INPUT = 10
"""An example may take `EXTRA_BYTES` and so many times the bytes of its input."""
_TEMPORARY = r"\..+\.[a-z0-9_]{8}\.tmp"
"""Names that `files.whole` gives."""
_NO_MEMORY = r"(?i)bad.?alloc|cannot allocate memory|failed to allocate|unable to allocate"
REFUSALS = (PipelineError, OSError)
"""What the command line turns into one line and the exit code 2."""


class BrokenPromiseError(AssertionError):
    """An example has taken too long or too much memory, or has written where it may not."""


class _HangError(BaseException):
    """Raised by the timer, so that no `except Exception` holds it up."""


@dataclass(slots=True)
class Tally:
    """What has been seen of the examples so far; the runner prints it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refused_at: Counter[str] = field(default_factory=Counter)
    """Places in `pipeline` that refused an example."""
    most_bytes: int = 0
    """Growth of the resident memory during an example."""
    most_s: float = 0.0
    """Without the time that it had no processor."""
    rounds: int = 0

    def note(self, test: str, seed: int) -> None:
        """Write for the runner, if there is one, what was seen before this round."""
        file = os.environ.get("PIPELINE_FUZZ_STATE")
        if file is None:
            return
        used = [
            resource.getrusage(target)
            for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        state = {
            "outcomes": self.outcomes,
            "refused_at": self.refused_at,
            "most_bytes": self.most_bytes,
            "most_s": self.most_s,
            "rounds": self.rounds,
            "cpu_s": sum(usage.ru_utime + usage.ru_stime for usage in used),
            "round": f"{test} with seed {seed}",
            "seed": seed,
        }
        Path(file).write_text(json.dumps(state))


TALLY = Tally()


def size_of(example: Any) -> int:
    """Return the number of bytes and characters in a nested example."""
    if isinstance(example, str | bytes):
        return len(example)
    parts = example.values() if isinstance(example, dict) else example
    return sum(map(size_of, parts)) if isinstance(example, dict | list | tuple) else 0


def fuzz(
    strategy: SearchStrategy[Any],
    *,
    examples: int = 100,
    explicit: Sequence[Any] = (),
    size: Callable[[Any], int] = size_of,
    refusals: tuple[type[Exception], ...] = REFUSALS,
    warm_up: Callable[[], object] = lambda: None,
) -> Callable[[Callable[[Any, Path], object]], Callable[[], None]]:
    """A decorator that makes a test of `check(example, folder)`, which gives False for a refusal.

    Args:
        strategy: makes examples.
        examples: of a round.
        explicit: examples that every round begins with: those that failed once.
        size: bytes of an example, which limit its memory.
        refusals: what a check may raise.
        warm_up: called before, for imports whose memory is not that of an example.
    """

    def decorate(check: Callable[[Any, Path], object]) -> Callable[[], None]:
        def checked(example: Any) -> None:
            with _sandbox() as folder, _limits(size(example)):
                _run(check, example, folder, refusals)

        def one_round(seed: int) -> None:
            run = hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                # Not `explain`, which traces every line: examples then take longer than they may.
                phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
                report_multiple_bugs=False,
                suppress_health_check=list(hypothesis.HealthCheck),
            )(hypothesis.given(strategy)(checked))
            for example in reversed(explicit):
                run = hypothesis.example(example)(run)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
                    hypothesis.seed(seed)(run)()
            except BaseException as error:
                error.add_note(
                    f"repeat: PIPELINE_FUZZ_SEED={seed} python -m pytest -n 0 "
                    f"tests/fuzz/{Path(check.__code__.co_filename).name}::{check.__name__}"
                )
                raise

        def test() -> None:
            end = time.monotonic() + float(os.environ.get("PIPELINE_FUZZ_SECONDS", "0"))
            warm_up()
            for seed in itertools.count(int(os.environ.get("PIPELINE_FUZZ_SEED", "0"))):
                TALLY.note(check.__name__, seed)
                TALLY.rounds += 1
                try:
                    one_round(seed)
                finally:
                    TALLY.note(check.__name__, seed)
                if time.monotonic() >= end:
                    return

        test.__name__ = test.__qualname__ = check.__name__
        test.__doc__, test.__module__ = check.__doc__, check.__module__
        return test

    return decorate


def command(*arguments: str | Path) -> bool:
    """Whether a `pipeline` command accepts its input; else it has said why."""
    from pipeline.cli import main as cli

    out, err = io.StringIO(), io.StringIO()
    report = cli._report

    def noted(error: BaseException) -> int:
        note_refusal(error)
        return report(error)

    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(cli, "_report", noted),
    ):
        code = cli.main([str(argument) for argument in arguments])
    out.getvalue().encode()  # what a terminal would refuse to show
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert (code, bool(errors)) in ((0, False), (2, True)), (code, lines)
    return code == 0


def note_refusal(error: BaseException) -> None:
    """Count the place in `pipeline` that an error comes from.

    Raises:
        BrokenPromiseError: The memory that an example may take was not enough, and that was taken
            for a mistake in the input.
    """
    if re.search(_NO_MEMORY, str(error)) or isinstance(error.__cause__, MemoryError):
        TALLY.outcomes["memory"] += 1
        raise BrokenPromiseError(f"it takes over the memory allowed: {error}") from error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/pipeline/" in f.filename]
    if frames:
        TALLY.refused_at[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1


def _run(
    check: Callable[[Any, Path], object],
    example: Any,
    folder: Path,
    refusals: tuple[type[Exception], ...],
) -> None:
    try:
        accepted = check(example, folder) is not False
    except refusals as error:
        accepted = False
        if not str(error).strip():
            raise BrokenPromiseError(f"a refusal without a message: {error!r}") from error
        note_refusal(error)
    TALLY.outcomes["accepted" if accepted else "refused"] += 1
    left = [path for path in folder.rglob(".*.tmp") if re.fullmatch(_TEMPORARY, path.name)]
    if left:
        raise BrokenPromiseError(f"temporary files are left: {left}")


@contextlib.contextmanager
def _sandbox() -> Iterator[Path]:
    """A folder that a check may write to, which is the present one meanwhile."""
    before, temporary = Path.cwd(), tempfile.tempdir
    around = Path(tempfile.mkdtemp(prefix="fuzz")).resolve()
    folder = around / "folder"
    (around / "tmp").mkdir()
    folder.mkdir()
    try:
        os.chdir(folder)
        tempfile.tempdir = str(around / "tmp")
        _WRITES.begin(around)
        yield folder
        _WRITES.end()
        beside = [path for path in around.rglob("*") if folder not in (path, *path.parents)]
        if beside != [around / "tmp"]:
            raise BrokenPromiseError(f"written outside the folder: {beside}")
    finally:
        _WRITES.end_quietly()
        os.chdir(before)
        tempfile.tempdir = temporary
        shutil.rmtree(around, ignore_errors=True)


class _Writes:
    """Notices files that this process opens for writing, makes, moves or removes elsewhere.

    It notices Python's own calls only: that is how `pipeline` writes. Other new files beside the
    folder of an example are found by listing them.
    """

    _PATHS: ClassVar = {
        "open": (0,),
        "os.link": (1,),
        "os.mkdir": (0,),
        "os.remove": (0,),
        "os.rename": (0, 1),
        "os.rmdir": (0,),
        "os.symlink": (1,),
        "os.truncate": (0,),
    }
    """Which arguments of an audit event are changed paths."""
    _WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    _HARMLESS = ("/dev/", "/proc/")

    def __init__(self) -> None:
        self._inside: str | None = None
        self._elsewhere: list[str] = []
        self._installed = False

    def begin(self, inside: Path) -> None:
        if not self._installed:
            sys.addaudithook(self._on_audit_event)
            self._installed = True
        self._elsewhere = []
        self._inside = str(inside)

    def end(self) -> None:
        self._inside = None
        if self._elsewhere:
            raise BrokenPromiseError(f"written elsewhere: {self._elsewhere}")

    def end_quietly(self) -> None:
        self._inside = None

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside is None:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & self._WRITING):
            return
        for index in self._PATHS.get(event, ()):
            if isinstance(arguments[index], str | bytes | os.PathLike):
                self._check_path(os.fsdecode(arguments[index]))

    def _check_path(self, path: str) -> None:
        inside = self._inside
        folder, name = os.path.split(path)
        try:
            place = os.path.join(os.path.realpath(folder), name)  # noqa: PTH118
        except ValueError:  # a NUL: nothing is opened
            return
        if inside is None or place.startswith((inside + os.sep, *self._HARMLESS)):
            return
        if "__pycache__" not in place:
            self._elsewhere.append(place)


_WRITES = _Writes()


@contextlib.contextmanager
def _limits(size: int) -> Iterator[None]:
    """Limit time and memory of one example of `size` bytes."""
    most = TIMES_INPUT * size + EXTRA_BYTES
    began, waited, resident = time.perf_counter(), _waited(), _resident()
    try:
        with _memory(most), _deadline():
            yield
    except _HangError as error:
        TALLY.outcomes["hang"] += 1
        raise BrokenPromiseError(f"still at it after {HANG_S:g} s") from error
    except MemoryError as error:
        TALLY.outcomes["memory"] += 1
        raise BrokenPromiseError(f"an input of {size} bytes takes over {most} bytes") from error
    finally:
        grown = _peak() - resident
        TALLY.most_bytes = max(TALLY.most_bytes, grown)
        passed = time.perf_counter() - began - (_waited() - waited)
        TALLY.most_s = max(TALLY.most_s, passed)
    if grown > most:
        TALLY.outcomes["memory"] += 1
        raise BrokenPromiseError(f"an input of {size} bytes takes {grown} bytes, {most} allowed")


@contextlib.contextmanager
def _memory(most: int) -> Iterator[None]:
    """Fail what asks for more than `most` bytes, so that no example takes the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData:") + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Raise `_HangError` after `HANG_S`."""
    began, waited = time.perf_counter(), _waited()

    def ring(*_: object) -> None:
        passed = time.perf_counter() - began
        left = HANG_S - (passed - (_waited() - waited))
        if left <= 0:
            raise _HangError
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.1))

    handler = signal.signal(signal.SIGALRM, ring)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, HANG_S)  # pytest-timeout's
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, handler)


def _waited() -> float:
    """Seconds that threads of this process could have run, but had no processor."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_bytes().split()[1])
    return total / 1e9


def _resident() -> int:
    """Bytes of resident memory; from here on `_peak` gives the most."""
    Path("/proc/self/clear_refs").write_bytes(b"5")
    return _status("VmRSS:")


def _peak() -> int:
    return _status("VmHWM:")


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(key) + len(key) :].split(maxsplit=1)[0]) << 10
