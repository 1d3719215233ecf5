"""How a stage's process starts and ends: signals, orphans, exit codes, and its log."""

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

# From linux/prctl.h; Python has no name for it.
_PR_SET_PDEATHSIG = 1
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # the last two are unknown on Windows
_HANDLED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_HAS_TIMER = hasattr(signal, "setitimer")  # not on Windows
_TIME_IS_UP = 128 + 10
"""Exit code for SIGUSR1, with which schedulers warn of a time limit."""
_REQUEUE_CODE = "PIPELINE_REQUEUE_EXIT_CODE"
_RARELY = (50_000, 5, 20)
"""Thresholds for `gc`: new objects per scan of the youngest, and scans until older ones follow."""
_AGAIN_S = 0.1
_GRACE_S = 0.5
"""What stops a whole group of processes may end environments before its signal comes here."""
_WATCH = "watch of the parent"
_SHELLS = frozenset({"sh", "ash", "dash", "bash", "ksh", "zsh", "fish", "busybox"})
_received: list[int] = []
_short: list[bool] = []


class Stopped(KeyboardInterrupt):
    """A signal to stop; like KeyboardInterrupt, no `except Exception` swallows it."""

    exit_code = 130
    """Exit code of a process that ends for this reason."""


def run(work: Callable[[], None], *, short: bool = False) -> int:
    """Do a stage's work and return the exit code of its process.

    0 means that every declared output is in place. A mistake that the user can act on is one line
    on standard error; SIGINT gives 130, SIGTERM 143, and SIGUSR1 what `exit_code` makes of 138,
    however the work has handled the signal.

    `short` work does little more than import. For it Python looks for cycles of objects less often:
    while large packages are imported it would scan their objects again and again, a fifth of the
    time of a stage that imports PyTorch and MLflow. Training does not use this, because a few
    objects in a cycle may hold large arrays.
    """
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    _short[:] = [short]
    threshold = gc.get_threshold()
    try:
        with signals():
            if short:
                gc.set_threshold(*_RARELY)
            die_with_parent()
            work()
            stop_if_signalled()
    except (KeyboardInterrupt, Interrupted) as error:
        sys.stderr.write(f"interrupted: {one_line(error) or 'stopped by a signal'}\n")
        if _received:
            return exit_code(128 + _received[0])
        return exit_code(error.exit_code) if isinstance(error, Interrupted) else 130
    except (PipelineError, OSError) as error:
        sys.stderr.write(f"error: {one_line(error)}\n")
        return int(getattr(error, "exit_code", PipelineError.exit_code))
    finally:
        gc.set_threshold(*threshold)
    return 0


def leave(code: int) -> NoReturn:
    """End the process; at once if a thread is still at work.

    Python aborts if it shuts down while a daemon thread is inside foreign code, such as a thread
    that writes to a slow store. The engine would then delete complete outputs.
    """
    if any(_short):
        gc.freeze()  # a last search for cycles in all modules would take half a second
    if any(thread.name != _WATCH for thread in threading.enumerate()[1:]):
        # `os._exit` runs no exit handlers and flushes nothing, so both are done by hand.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(code: int) -> int:
    """Return the exit code for the scheduler, after a signal that gives `code`.

    PIPELINE_REQUEUE_EXIT_CODE replaces the code of SIGUSR1 for schedulers that need another one to
    queue the job again: 99 for Grid Engine, 85 for HTCondor. 0 is refused, since an engine would
    think that the stage is done.
    """
    text = os.environ.get(_REQUEUE_CODE, "")
    if code != _TIME_IS_UP or not text:
        return code
    if text.isdecimal() and 0 < int(text) < 256:  # exit codes are bytes
        return int(text)
    _log.warning("%s is %r, no exit code from 1 to 255; it is not used", _REQUEUE_CODE, text)
    return code


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP into `Stopped`; a second kills at once.

    An ignored SIGHUP stays ignored, as `nohup` asks for.

    `Stopped` is raised even where the block turns it into another error: a module that is being
    imported may do that, or code that takes the end of its environment for a failure. The code that
    runs at that moment may also drop what a handler raises: Python itself in a finalizer and in the
    hooks around a fork, a library in a bare `except`, C code that asks for an attribute. The stage
    would work on for ever, since the signal does not come a second time; so a timer raises
    `Stopped` again until it is handled.
    """
    _received.clear()
    hook = sys.unraisablehook

    def quiet(ignored: sys.UnraisableHookArgs) -> None:
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
        _await_signal_after(error)
        if _received:
            raise _stopped() from error
        raise
    finally:
        if _HAS_TIMER:  # before its handler goes: SIGALRM's default is to kill the process
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_wanted(number: int) -> bool:
    """Return whether a signal asks to stop; `nohup` has SIGHUP ignored."""
    is_hangup = number == getattr(signal, "SIGHUP", None)
    return not (is_hangup and signal.getsignal(number) is signal.SIG_IGN)


def _await_signal_after(error: Exception) -> None:
    """After the end of an environment wait a moment for the signal that may have ended it."""
    if isinstance(error, UnityProcessEndedException | UnityCommunicatorStoppedException):
        time.sleep(_GRACE_S)  # a handler that raises ends it


def _raise_unless_handled(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    error = sys.exc_info()[1]  # what the interrupted code is handling
    while error is not None:
        if isinstance(error, Stopped):
            return
        # A handler that failed while it dealt with `Stopped` has it in its context.
        error = error.__context__
    raise _stopped()


def stop_if_signalled() -> None:
    """Raise `Stopped` when a signal came, even if the work in between went on to its end."""
    if _received:
        raise _stopped()


def die_with_parent() -> None:
    """End as after SIGTERM when the parent ends, so that no killed engine leaves orphans.

    Linux sends the signal also when only the parent's starting thread ends, so the handler checks
    whether the parent itself is gone. Linux sends nothing for a parent behind a shell: DVC runs
    stages by `$SHELL -c`, and dash, unlike bash, stays until its command ends. A thread watches
    such a parent.

    Raises:
        Stopped: The parent has ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = _PARENT

    def leave_with_parent(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        # A stage that is stopping already is saving what it has.
        is_stopping = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if _parent() != parent and not is_stopping:
            try:
                _log.warning("the process that started this stage is gone; the stage stops")
            finally:  # the log fails if it is what this handler has interrupted
                os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, leave_with_parent)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR2), 0, 0, 0) != 0:
        _log.warning("this process will outlive its parent: prctl failed (%s)", ctypes.get_errno())
    # The parent may have ended before prctl was called, and then no signal will come.
    if _parent() != parent or _is_adopted(parent):
        _received.append(signal.SIGTERM)
        raise Stopped("the process that started this stage is gone")
    # Only behind a shell: prctl watches the direct parent, which the shell is.
    if parent != os.getppid():
        threading.Thread(target=_watch, args=(parent,), name=_WATCH, daemon=True).start()


def _watch(parent: int) -> None:
    main = threading.main_thread().ident
    while main is not None:
        time.sleep(1)
        if _parent() != parent:  # repeated each second: a wait that just begins may miss a signal
            signal.pthread_kill(main, signal.SIGUSR2)


def _parent() -> int:
    """Return the id of the process that started this one, past shells that only run a command."""
    parent = os.getppid()
    try:
        while _is_shell_with_command(parent):
            status = Path(f"/proc/{parent}/status").read_text()
            parent = int(status.partition("PPid:")[2].split(maxsplit=1)[0])
    except OSError:
        pass  # the shell has just ended, or may not be looked at
    return parent


def _is_shell_with_command(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return Path(command[0]).name in _SHELLS and "-c" in command[1:]


def _is_adopted(parent: int) -> bool:
    """Return whether `parent` has adopted this process: it is of another session."""
    session = os.getsid(0)
    try:
        return session != os.getpid() and parent != 0 and os.getsid(parent) != session
    except OSError:
        return False  # another process's session may be hidden


def _stopped() -> Stopped:
    number = _received[0]
    stopped = Stopped(f"stopped by {signal.Signals(number).name}")
    stopped.exit_code = exit_code(128 + number)
    return stopped


def _on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # a handler's form
    # A signal handler may run between any two instructions, and what it raises may be lost; so it
    # records the signal first.
    _received.append(number)
    for handled in _HANDLED:
        if signal.getsignal(handled) is signal.SIG_IGN:
            continue
        # Python's own default for SIGINT would raise again; the system's ends the process.
        signal.signal(handled, signal.SIG_DFL)
    if _HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise _stopped()


_PARENT = _parent()
"""Id of the process that started this one, taken as soon as this module is imported."""
