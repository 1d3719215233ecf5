"""Python programs in processes of their own that need not import the libraries again.

A process that has imported them, and runs no thread, forks for every program. What a program is
given (arguments, folder, variables, streams) and how it ends is as with `subprocess.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path


class ForkingInterpreter:
    """`python` that has imported `modules`.

    Args:
        modules: what the programs need; none of it may start a thread when it is imported.
        hash_seed: PYTHONHASHSEED of the programs.
    """

    def __init__(self, *modules: str, hash_seed: str = "random") -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": hash_seed,
        }
        self._process = subprocess.Popen(  # noqa: S603  # this file
            [sys.executable, __file__, str(other.fileno()), *modules],
            env=os.environ | variables,
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
        )
        other.close()
        self._socket = own

    def run(
        self,
        *arguments: str,
        timeout: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`python *arguments`, which begin with -c, -m or a file, and what it printed."""
        task = {"arguments": arguments, "cwd": str(cwd or Path.cwd())}
        task["env"] = dict(os.environ if env is None else env)
        with (
            Path(os.devnull).open() as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [json.dumps(task).encode()], streams)
            self._socket.settimeout(60 + timeout)  # before the first the libraries are imported
            pid = int(self._socket.recv(100))
            self._socket.settimeout(timeout)
            try:
                status = int(self._socket.recv(100))
            except TimeoutError:
                os.kill(pid, 9)
                self._socket.settimeout(None)
                self._socket.recv(100)
                raise
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def forking(*modules: str, hash_seed: str = "random") -> ForkingInterpreter:
    """The same interpreter for all tests of this process, until it ends."""
    interpreter = ForkingInterpreter(*modules, hash_seed=hash_seed)
    atexit.register(interpreter.close)
    return interpreter


def _next_task(tasks: socket.socket) -> list[str] | None:
    """The arguments of a program, in the process that is to run it; None at the end."""
    while True:
        data, streams, _, _ = socket.recv_fds(tasks, 1 << 20, 3)
        if not data:
            return None
        task = json.loads(data)
        pid = os.fork()
        if pid == 0:
            tasks.close()
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
            tasks.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            tasks.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(arguments: list[str]) -> None:
    """Do what `python` does with these arguments."""
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


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(_name)
    with socket.socket(fileno=int(sys.argv[1])) as _tasks:
        _arguments = _next_task(_tasks)
    if _arguments is not None:
        _run(_arguments)
