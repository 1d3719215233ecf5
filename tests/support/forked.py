"""Runs Python programs in new processes that do not import the libraries again.

A process that has imported the libraries, and runs no thread, forks for every program. A program's
arguments, folder, variables and streams, and its end, are as with `subprocess.run`. Its parent is
a fork, so a test in which the parent process dies starts the program itself.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

from forked_command import request, status

_COMMAND = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
from forked_command import main
sys.exit(main({address!r}, [*{first!r}, *sys.argv[1:]]))
"""


class ForkingInterpreter:
    """A `python` that has imported `modules` before it runs programs.

    Args:
        modules: modules that the programs need; their import must not start a thread.
        hash_seed: PYTHONHASHSEED of the programs.
    """

    def __init__(self, *modules: str, hash_seed: str = "random") -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._address = str(self._folder / "socket")
        variables = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": hash_seed,
        }
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._address)
        listener.listen()
        self._process = subprocess.Popen(  # noqa: S603  # this file
            [sys.executable, __file__, str(listener.fileno()), *modules],
            env=os.environ | variables,
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )
        listener.close()

    def run(
        self,
        *arguments: str,
        timeout: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments` (-c, -m or a file first); return its code and its output."""
        with (
            Path(os.devnull).open() as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            variables = dict(os.environ if env is None else env)
            folder = str(cwd or Path.cwd())
            # The first program waits until the libraries are imported.
            limit = 60 + timeout
            program, pid = request(self._address, arguments, folder, variables, streams, limit)
            with program:
                program.settimeout(timeout)
                try:
                    code = status(program)
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
        return subprocess.CompletedProcess(arguments, code, *texts)

    def commands(self, **first: tuple[str, ...]) -> Path:
        """Return a folder for PATH with commands that this interpreter runs.

        Args:
            first: arguments that precede a command's own, by its name: `dvc=("-m", "dvc")`.
        """
        folder = self._folder / "bin"
        folder.mkdir(exist_ok=True)
        for name, arguments in first.items():
            text = _COMMAND.format(
                python=sys.executable,
                folder=str(Path(__file__).parent),
                address=self._address,
                first=arguments,
            )
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return folder

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@functools.cache
def forking(*modules: str, hash_seed: str = "random") -> ForkingInterpreter:
    """Return an interpreter that all tests of this process share, until the process ends."""
    interpreter = ForkingInterpreter(*modules, hash_seed=hash_seed)
    atexit.register(interpreter.close)
    return interpreter


def _program(listener: socket.socket, lifeline: int) -> list[str] | None:
    """Return a program's arguments, in the process that runs it; None after the last program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while listener in select.select([listener, lifeline], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _forked(connection)
    return None


def _forked(connection: socket.socket) -> list[str]:
    """Fork again for the program, so that programs run at the same time; report its exit code."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    task = json.loads(data)
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(task["cwd"])
        os.environ.clear()
        os.environ.update(task["env"])
        return task["arguments"]
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(arguments: list[str]) -> None:
    """Run a program as `python *arguments` does."""
    kind, *rest = arguments
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).parent))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _run_to_its_end(arguments: list[str]) -> None:
    """Run the program and end this process without unloading the libraries.

    Unloading would touch all of their memory, which the processes share until one of them writes
    to it, and takes longer than most programs.
    """
    code: object = None
    try:
        _run(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  # as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(_name)
    gc.freeze()  # a program's garbage collector would touch all of the libraries' memory
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _arguments = _program(_listener, sys.stdin.fileno())
    if _arguments is not None:
        _run_to_its_end(_arguments)
