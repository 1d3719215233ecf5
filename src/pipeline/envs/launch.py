"""Processes of environments: finds an executable, and starts, watches and ends its process."""

import contextlib
import ctypes
import errno
import logging
import numbers
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil

from pipeline import files
from pipeline.errors import (
    UnityEnvironmentException,
    UnityProcessEndedException,
    UnityWorkerInUseException,
    shell_command,
)
from pipeline.wire.transport.peers import MARK, PeerCheck
from pipeline.wire.transport.server import AnyServer, open_server

_log = logging.getLogger(__name__)

# The port that ML-Agents' Unity package calls when a user presses Play in the Editor.
EDITOR_PORT = 5004
_LAST_PORT = 65535
PRESS_PLAY = "Listening on port %d. Start training by pressing the Play button in the Unity Editor."
EDITOR_PORT_TAKEN = (
    "The Unity Editor calls on this port only: end the process that listens there, such as another "
    "training without an executable."
)

_SYSTEM = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, "Linux")
_EXTENSIONS = (".app", ".exe", ".x86_64", ".x86")
# Number of the option PR_SET_PDEATHSIG in linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Largest number of lines, and of bytes, of the output that an error message quotes.
_TAIL_LINES, _TAIL_BYTES = 20, 4096
_OUTPUT_LIMIT_BYTES = 1 << 20


def find_executable(file_name: str | Path) -> Path:
    """Return the executable `file_name`, which may be given with or without its extension."""
    name = str(file_name).strip()
    bare = name
    for extension in _EXTENSIONS:
        # The extension is removed wherever it occurs in the name, as in ML-Agents.
        bare = bare.replace(extension, "")
    # The unchanged name is tried, too, because a folder in the path may have such an extension.
    for candidate in [*_candidates(Path(bare)), Path(name)]:
        if candidate.is_file():
            return candidate.absolute()
    raise UnityEnvironmentException(
        f"Couldn't launch the {Path(bare).name} environment. Provided filename does not match any "
        f"environments. Looked for {name} from the folder {Path.cwd()}."
    )


def _candidates(path: Path) -> list[Path]:
    """Return the paths at which an executable may be on this system, in the order of the search."""
    if not path.name:  # the current folder has no name
        return [path]
    if sys.platform == "darwin":
        folder = path.with_name(path.name + ".app") / "Contents" / "MacOS"
        return [folder / path.name, *sorted(folder.glob("*")), path]
    if sys.platform == "win32":
        inside = [
            p for p in sorted(path.glob("*.exe")) if not p.name.startswith("UnityCrashHandler")
        ]
        return [path.with_name(path.name + ".exe"), *inside, path]
    return [*(path.with_name(path.name + end) for end in (".x86_64", ".x86")), path]


def command_line(
    executable: Path,
    *,
    port: int,
    no_graphics: bool = False,
    log: Path | None = None,
    additional_args: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts an environment, with arguments in ML-Agents' order."""
    additional_args = words_of(additional_args)
    command = [str(executable)]
    if no_graphics:
        command += ["-nographics", "-batchmode"]
    command += ["--mlagents-port", str(port)]
    # A -logFile among the user's arguments has precedence.
    if log is not None and not any(arg.lower() == "-logfile" for arg in additional_args):
        command += ["-logFile", str(log)]
    return [*command, *additional_args]


def words_of(arguments: Sequence[Any]) -> list[str]:
    """Return command-line arguments, which may be texts, numbers and paths, as a list of texts."""
    if isinstance(arguments, str | bytes):
        text = arguments if isinstance(arguments, str) else arguments.decode(errors="replace")
        raise UnityEnvironmentException(
            f"additional_args (or env_args): {text!r} is one text; give a list, as in "
            f"{text.split()}"
        )
    for argument in arguments:
        if not isinstance(argument, str | numbers.Real | os.PathLike):
            raise UnityEnvironmentException(
                f"additional_args (or env_args): {argument!r} is not a text; give a list of texts, "
                "as in ['--level', '7']"
            )
    return [str(argument) for argument in arguments]


class EnvironmentProcess:
    """The process of one environment; on Linux it is killed when this process ends.

    The environment's output goes to an unnamed temporary file, for error messages; `trim` keeps the
    file small. If this module logs at DEBUG level, the output goes to this process's standard error
    instead. Error messages quote the file `log` of the environment before its output. `peers`
    checks that clients belong to the environment, and gets the id of the process.

    Raises:
        UnityEnvironmentException: The system cannot run the executable.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path | None = None, peers: PeerCheck | None = None
    ) -> None:
        self._log = log
        self._output = _appended_file()
        self._prints_to_stderr = _log.isEnabledFor(logging.DEBUG)
        _log.debug("starting %s", shlex.join(command))
        try:
            self._process = start(
                command,
                2 if self._prints_to_stderr else self._output,  # 2: this process's standard error
                mark=peers.mark if peers is not None else "",
            )
        except OSError as error:
            self._output.close()
            raise _cannot_start(command[0], error) from error
        if peers is not None:
            peers.pid = self._process.pid

    def check(self) -> None:
        """Raise UnityProcessEndedException, with exit code and output, if the process has ended."""
        if has_ended(self._process):
            code, name = self._process.returncode, ""
            with contextlib.suppress(ValueError):
                # A negative code is the number of the signal that ended the process.
                name = f" ({signal.Signals(-code).name})" if code < 0 else ""
            raise UnityProcessEndedException(
                f"Environment shut down with return code {code}{name}.{self.tail()}"
            )

    def trim(self) -> None:
        """Drop all but the end of the process's output if it has more than 1 MiB."""
        # Only POSIX files are truncated: there the child appends, but on other systems it would
        # continue at its old position.
        if os.name != "posix" or os.fstat(self._output.fileno()).st_size <= _OUTPUT_LIMIT_BYTES:
            return
        # The file is truncated and not replaced, because the child continues to write to it.
        end = _last_bytes(self._output)
        self._output.truncate(0)
        self._output.write(end)
        self._output.flush()

    def tail(self) -> str:
        """Return the last lines of the environment's log and output, to append to a message."""
        texts = {}
        if self._log is not None and self._log.is_file():
            with self._log.open("rb") as file:
                texts[str(self._log)] = _last_lines(file)
        # The log file does not have the messages of a wrapper script, but the output does.
        if not self._output.closed:
            texts["output"] = _last_lines(self._output)
        quotes = [
            f"The last lines of the environment's {x}:\n{text}" for x, text in texts.items() if text
        ]
        said = "'s output is above." if self._prints_to_stderr else " printed nothing."
        return " " + ("\n".join(quotes) or f"The environment{said}")

    def wait(self, wait_s: float) -> bool:
        """Wait up to `wait_s` until the process ends by itself, and return whether it has."""
        deadline, pause_s = time.monotonic() + wait_s, 0.0005
        while not has_ended(self._process):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # The first pauses are short, because most environments end within milliseconds.
            pause_s = min(2 * pause_s, left, 0.05)
            time.sleep(pause_s)
        return True

    def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` until the process ends by itself, then kill it and its children."""
        if not self.wait(wait_s):
            kill(self._process)
        self._output.close()


def start(
    command: Sequence[str], output: BinaryIO | int, *, mark: str = ""
) -> subprocess.Popen[bytes]:
    """Start a process that writes to `output`, and that on Linux is killed when this process ends.

    The process and its children have the environment variable `MARK` with the value `mark`, by
    which `PeerCheck` recognizes them.
    """
    return subprocess.Popen(  # noqa: S603  # the user chose the executable
        list(command),
        # Ctrl+C and text typed in the terminal are for the trainer.
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # Packed executables look for a Python of their version, and try this Python first.
        env={**os.environ, "PIPELINE_PYTHON": sys.executable, MARK: mark},
        # The environment gets a new process group, so that Ctrl+C does not end it before the
        # trainer has saved, and so that its children can be killed together with it.
        start_new_session=os.name == "posix",
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # calls only prctl
    )


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process from `start` has ended; if so, kill its process group.

    A wrapper script may have started helpers, such as a display, which would never end.
    """
    if process.returncode is not None or os.name != "posix":
        return process.poll() is not None
    # The status is read without reaping the process: once the process is reaped, another process
    # group could get its number.
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(process.pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        kill(process)
    return process.poll() is not None


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process from `start`, and its children."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # `start` made a new session, so the process group has the process's number.
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    # The process is reaped at once: otherwise it would remain a zombie until this process ends.
    process.wait()


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function that makes a child process end when its parent dies, even by kill -9.

    The child calls the function before it runs the executable. Linux kills the child when the
    thread that started it ends (prctl(2), PR_SET_PDEATHSIG), so the result is None in all but the
    main thread.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    if "grpc" in sys.modules and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "0":
        return None  # gRPC's fork handlers may end the child before it runs the executable
    # The library is loaded now, because this is impossible between fork and exec.
    prctl = ctypes.CDLL(None).prctl

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return set_death_signal


def _cannot_start(path: str, error: OSError) -> UnityEnvironmentException:
    # After these errors the file exists, so its first bytes can tell what it is.
    is_found = isinstance(error, PermissionError) or error.errno == errno.ENOEXEC
    kind = files.kind_of(path, program="name a build for this system") if is_found else None
    if kind and not (isinstance(error, PermissionError) and f"for {_SYSTEM};" in kind):
        why = f"the file {kind}"
    elif isinstance(error, PermissionError):
        # The path is normalized, because a path with `..` may contain a folder that does not exist
        # any more.
        target = os.path.normpath(path)
        why = f"the file may not be executed. Try `{shell_command('chmod', '-R', '755', target)}`"
    elif error.errno == errno.ENOEXEC:
        why = (
            "this system cannot run the file (exec format error): it is a build for another "
            "platform, a script without a '#!' line, or not an executable"
        )
    elif isinstance(error, FileNotFoundError):
        why = "the file, or the interpreter that its '#!' line names, does not exist"
    else:
        why = str(error)
    return UnityEnvironmentException(f"Couldn't launch the environment {path}: {why}.")


def _appended_file() -> BinaryIO:
    """Return a temporary file to which all writes are appended, even after truncation (POSIX)."""
    file = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # the caller closes it
    if sys.platform != "win32":
        import fcntl

        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # `tempfile` ignores the mode "a"
    return cast("BinaryIO", file)


def _last_lines(file: BinaryIO) -> str:
    lines = _last_bytes(file).decode("utf-8", errors="replace").rstrip().splitlines()
    # Environments of this project log the cause of their end last, below a traceback.
    return "\n".join(lines[-1 if lines and lines[-1].startswith("ERROR ") else -_TAIL_LINES :])


def _last_bytes(file: BinaryIO) -> bytes:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _TAIL_BYTES))
    return file.read()


def listening(
    executable: Path | None, base_port: int | None, worker_id: int, **options: Any
) -> AnyServer:
    """Return a server that listens for `executable`, or for the Unity Editor if it is None.

    `options` are as for `open_server`.
    """
    # The system chooses a port for an executable; the Editor always calls on the same port.
    port = 0 if executable is not None else EDITOR_PORT
    if base_port is not None:
        given: tuple[object, ...] = (base_port, worker_id)  # users' scripts may pass other types
        are_numbers = all(isinstance(number, int) for number in given)
        if not are_numbers or not 0 <= base_port + worker_id <= _LAST_PORT:
            raise UnityEnvironmentException(
                f"base_port: {base_port!r} and the worker {worker_id!r} give no port; their sum "
                f"must be a number from 0 to {_LAST_PORT}"
            )
        port = base_port + worker_id
    remedy = EDITOR_PORT_TAKEN if executable is None else None
    return listen_for(worker_id, port, remedy, **options)


def listen_for(worker_id: int, port: int, remedy: str | None, **options: Any) -> AnyServer:
    """Return a server that listens for a worker on `port`; `options` are as for `open_server`.

    Raises:
        UnityWorkerInUseException: The port is taken; `remedy` says what to do.
    """
    try:
        return open_server(port, **options)
    except (OSError, OverflowError) as error:  # a port above 65535 raises OverflowError
        raise UnityWorkerInUseException(worker_id, port, remedy=remedy) from error
