"""Start and end of a stage's process: signals, killed parents, exit codes, and the log."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipeline.errors import (
    Interrupted,
    PipelineError,
    UnityCommunicatorStoppedException,
    UnityProcessEndedException,
    one_line,
)

_log = logging.getLogger(__name__)

# Number of prctl's option PR_SET_PDEATHSIG in linux/prctl.h; Python has no constant for it.
_PR_SET_PDEATHSIG = 1
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # Windows does not have the last two
_HANDLED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HAS_TIMER = hasattr(signal, "setitimer")  # Windows does not have this function
# Shells report 128 plus the number of a signal that ended a process; SIGUSR1 is 10 on Linux.
_TIME_IS_UP = 128 + 10
"""Exit code for SIGUSR1, which schedulers send before a time limit."""
_REQUEUE_CODE = "PIPELINE_REQUEUE_EXIT_CODE"
_RARELY = (50_000, 5, 20)
"""Thresholds of `gc.set_threshold` for rare collections."""
# Seconds between two attempts to raise `Stopped`, which is raised again until it is handled.
_AGAIN_S = 0.1
_GRACE_S = 0.5
"""Seconds to wait for a signal after an environment has ended: a signal to a whole process group
may end environments before it arrives in this process."""
_WATCH = "watch of the parent"
_SHELLS = frozenset({"sh", "ash", "dash", "bash", "ksh", "zsh", "fish", "busybox"})
# Numbers of the signals that have arrived, and whether the work is short (see `run`).
_received: list[int] = []
_short: list[bool] = []


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the work; `except Exception` does not catch it."""

    exit_code = 130
    """Exit code of a process that the signal has ended."""


def run(work: Callable[[], None], *, short: bool = False) -> int:
    """Run a stage's work and return the exit code of its process.

    0 means that every declared output is in place. An error that the user can act on is one line on
    standard error. SIGINT gives 130, SIGTERM 143, and SIGUSR1 the code that `exit_code` returns for
    138, even if the work has caught the signal's exception.

    `short` is for work that does little more than import: garbage collections are made rare,
    because repeated scans of imported objects take a fifth of the time of a stage that imports
    PyTorch and MLflow. Training does not set `short`, because a reference cycle of a few objects
    may keep large arrays.
    """
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    _short[:] = [short]
    threshold = gc.get_threshold()
    try:
        with signals():
            if short:
                gc.set_threshold(*_RARELY)
            stop_with_parent()
            work()
            stop_if_signalled()
    except (KeyboardInterrupt, Interrupted) as error:
        sys.stderr.write(f"interrupted: {one_line(error) or 'stopped by a signal'}\n")
        if _received:
            return exit_code(128 + _received[0])
        return exit_code(error.exit_code) if isinstance(error, Interrupted) else 130
    except (PipelineError, OSError) as error:
        # Other exceptions are mistakes in the code, so Python prints their traceback.
        sys.stderr.write(f"error: {one_line(error)}\n")
        return int(getattr(error, "exit_code", PipelineError.exit_code))
    finally:
        gc.set_threshold(*threshold)
    return 0


def leave(code: int) -> NoReturn:
    """End the process; without Python's shutdown if another thread is still running.

    Python may abort during its shutdown if a daemon thread runs native code, such as a thread that
    writes to a slow store. The engine would then delete complete outputs.
    """
    if any(_short):
        gc.freeze()  # a last garbage collection of all modules would take half a second
    if any(thread.name != _WATCH for thread in threading.enumerate()[1:]):
        # `os._exit` neither ends logging nor flushes streams, so both are done here.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(code: int) -> int:
    """Return the exit code for the scheduler; `code` is the usual exit code after a signal.

    PIPELINE_REQUEUE_EXIT_CODE replaces the code of SIGUSR1 for schedulers that need another code to
    queue the job again: 99 for Grid Engine, 85 for HTCondor. 0 is refused, because an engine would
    take the stage as done.
    """
    text = os.environ.get(_REQUEUE_CODE, "")
    if code != _TIME_IS_UP or not text:
        return code
    if text.isdecimal() and 0 < int(text) < 256:  # exit codes are bytes
        return int(text)
    _log.warning("%s is %r, not an exit code from 1 to 255; it is ignored", _REQUEUE_CODE, text)
    return code


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Raise `Stopped` at the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP; a second one kills at once.

    A SIGHUP that is ignored, as by `nohup`, stays ignored.

    If the block raises another exception after a signal, `Stopped` is raised in its place. This
    happens, for example, during an import, or if the signal also ends the environment.

    The interrupted code may drop `Stopped`: Python does so in a finalizer and in the hooks of a
    fork, a library in a bare `except`, C code while it reads an attribute. The stage would then run
    to its end, because the signal arrives only once; so a timer raises `Stopped` again until it is
    handled.
    """
    _received.clear()
    hook = sys.unraisablehook

    def quiet(ignored: sys.UnraisableHookArgs) -> None:
        # Python passes exceptions in finalizers to this hook. A `Stopped` that was lost in a
        # finalizer needs no report, because the timer raises it again.
        if not isinstance(ignored.exc_value, Stopped):
            hook(ignored)

    handlers: dict[int, Any] = {number: _on_signal for number in _HANDLED if _is_wanted(number)}
    if _HAS_TIMER:
        handlers[signal.SIGALRM] = _raise_unless_handled
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    sys.unraisablehook = quiet
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if isinstance(error, UnityProcessEndedException | UnityCommunicatorStoppedException):
            # A signal may have ended the environment; the handler raises and so ends the sleep.
            time.sleep(_GRACE_S)
        if _received:
            raise _stopped() from error
        raise
    finally:
        # The timer stops first, because without its handler SIGALRM would kill the process.
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_wanted(number: int) -> bool:
    """Return whether to handle a signal: all except a SIGHUP that `nohup` ignores."""
    is_hangup = number == getattr(signal, "SIGHUP", None)
    return not (is_hangup and signal.getsignal(number) is signal.SIG_IGN)


def _raise_unless_handled(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    error = sys.exc_info()[1]  # the exception that the interrupted code is handling
    while error is not None:
        if isinstance(error, Stopped):
            return
        # An exception raised while `Stopped` was handled has `Stopped` in its context.
        error = error.__context__
    raise _stopped()


def stop_if_signalled() -> None:
    """Raise `Stopped` if a signal has arrived, even if its exception was dropped."""
    if _received:
        raise _stopped()


def stop_with_parent() -> None:
    """Stop as after SIGTERM when the parent ends, so that a killed engine leaves no stages running.

    Linux is asked to send SIGUSR2 at the end of the parent. It also sends SIGUSR2 if only the
    thread that started this process ends (prctl(2)), so the handler checks whether the parent
    process has ended. Linux sends no signal if a shell is between the parent and this process: DVC
    runs stages by `$SHELL -c`, and dash, unlike bash, runs until its command ends. A thread watches
    such a parent.

    Raises:
        Stopped: The parent has ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = _PARENT

    def leave_with_parent(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        # A stage that is already stopping is saving its state, and must not be killed by a second
        # SIGTERM.
        is_stopping = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if _parent() != parent and not is_stopping:
            try:
                _log.warning("the process that started this stage has ended; the stage stops")
            finally:  # logging fails if this handler has interrupted a log call
                os.kill(os.getpid(), signal.SIGTERM)

    # The kernel sends the signal when the parent's thread ends, even if the parent process goes on.
    # So the signal is SIGUSR2, and its handler checks whether the parent has ended; SIGTERM would
    # stop the stage.
    signal.signal(signal.SIGUSR2, leave_with_parent)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR2), 0, 0, 0) != 0:
        _log.warning(
            "if the engine is killed, this stage goes on: prctl failed with errno %s",
            ctypes.get_errno(),
        )
    # The parent may have ended before prctl was called, or even before `_PARENT` was read; then no
    # signal will come.
    if _parent() != parent or _is_adopted(parent):
        _received.append(signal.SIGTERM)
        raise Stopped("the process that started this stage has ended")
    # prctl watches only the direct parent. A thread watches an engine behind a shell.
    if parent != os.getppid():
        threading.Thread(target=_watch, args=(parent,), name=_WATCH, daemon=True).start()


def _watch(parent: int) -> None:
    main = threading.main_thread().ident
    while main is not None:
        time.sleep(1)
        # The signal is sent again each second, because the main thread may miss a signal that
        # arrives just before a wait begins.
        if _parent() != parent:
            signal.pthread_kill(main, signal.SIGUSR2)


def _parent() -> int:
    """Return the id of the parent process; a shell that runs a command with `-c` is skipped."""
    parent = os.getppid()
    try:
        # The loop is needed, because a shell may have been started by another shell.
        while _is_shell_with_command(parent):
            status = Path(f"/proc/{parent}/status").read_text()
            parent = int(status.partition("PPid:")[2].split(maxsplit=1)[0])
    except OSError:
        pass  # the shell has just ended, or its files cannot be read
    return parent


def _is_shell_with_command(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return Path(command[0]).name in _SHELLS and "-c" in command[1:]


def _is_adopted(parent: int) -> bool:
    """Return whether `parent` adopted this process when its first parent ended.

    A process that adopts others, such as init, belongs to another session.
    """
    session = os.getsid(0)
    try:
        # A session's first process has a parent of another session, and 0 is a parent outside of
        # this container: both are usual.
        return session != os.getpid() and parent != 0 and os.getsid(parent) != session
    except OSError:
        return False  # the session of a process of another user may be hidden


def _stopped() -> Stopped:
    number = _received[0]
    stopped = Stopped(f"stopped by {signal.Signals(number).name}")
    stopped.exit_code = exit_code(128 + number)
    return stopped


def _on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # handlers get both arguments
    # The signal is recorded first, because the exception that a handler raises may be lost.
    _received.append(number)
    for handled in _HANDLED:
        if signal.getsignal(handled) is signal.SIG_IGN:
            continue
        # With SIG_DFL a second signal ends the process at once; Python's default handler for SIGINT
        # would raise an exception instead.
        signal.signal(handled, signal.SIG_DFL)
    if _HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise _stopped()


_PARENT = _parent()
"""Id of the parent process, read when this module is imported."""
