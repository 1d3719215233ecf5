"""MLflow runs of stages, written outside the stage's main thread.

MLflow takes about two seconds of processor time to be imported and to open a store. Below
`pipeline run` one process does both once for all stages: it writes their runs in its threads. The
environment variable `PIPELINE_MLFLOW_WRITER` has its address. A stage that cannot reach it, such as
a stage on another machine, writes the run in a thread of its own, while its main thread works.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import RunKey

WRITER = "PIPELINE_MLFLOW_WRITER"
_END, _KILLED = "end", "killed"
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of `MlflowRun`, with its arguments; the name of the first call is empty."""


class ForwardedRun(MlflowRun):
    """Sends the calls that write to MLflow to the thread that writes them; only `end` waits."""

    def __init__(self, key: RunKey, *, prefix: bool = False) -> None:
        super().__init__(key, prefix=prefix)
        self._connection = _connected()
        self.send("", key, prefix=prefix)

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        """Send a call of the method `name`."""
        try:
            self._connection.send((name, arguments, options))
        except Exception as error:  # noqa: BLE001  # the writing process may have been killed
            self.lose(error)
        except BaseException:
            # A signal may have cut off the message, and the writer would take the next for its end.
            self._connection.close()
            raise

    def end(self, status: str = "FINISHED") -> None:
        """Wait until everything is written, and end the run."""
        if self._is_closed:
            return
        self._is_closed = True
        self.send(_END, status)
        try:
            self.run_id, n_lost = self._connection.recv()
            self.lost += n_lost
        except (EOFError, OSError) as error:
            self.lose(error)
        self._connection.close()


def _forwarded(name: str) -> Callable[..., None]:
    return lambda run, *arguments, **options: run.send(name, *arguments, **options)


for _name in (
    *("on_summary", "on_image", "complete", "points", "describe", "params", "settings", "made"),
    *("artifacts", "picture", "model", "score"),
):
    setattr(ForwardedRun, _name, _forwarded(_name))


def _connected() -> Connection:
    """Return a connection to the process that writes, or else to a new thread."""
    if address := os.environ.get(WRITER):
        # The address is on the machine of `pipeline run`, and gone when that has ended.
        with contextlib.suppress(OSError):
            return Client(address)
    here, there = Pipe()
    threading.Thread(target=_serve, args=(there,), name="mlflow", daemon=True).start()
    return here


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Write the runs of stages in threads; yield the environment variables for the stages."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-"))
        try:
            # Only this user can read the folder, and so connect to the socket.
            listener = stack.enter_context(Listener(str(Path(folder, "mlflow")), "AF_UNIX"))
        except (OSError, ValueError):  # the path is too long for a socket, or this is Windows
            yield {}
            return
        ended = threading.Event()
        threading.Thread(target=_accept, args=(listener, ended), name="mlflow", daemon=True).start()
        try:
            yield {WRITER: str(listener.address)}
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                Client(listener.address).close()  # `accept` waits for a connection


def _accept(listener: Listener, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            connection = listener.accept()
            if ended.is_set():
                return
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: Connection) -> None:
    """Make the calls that a stage sends, until the stage ends its run or is killed."""
    # The calls are read at once, so that a stage never waits for a store that is slow or locked.
    calls: SimpleQueue[_Call] = SimpleQueue()
    thread = threading.Thread(target=_write, args=(calls, connection), name="mlflow", daemon=True)
    thread.start()
    call: _Call = ("", (), {})
    while call[0] not in (_END, _KILLED):
        try:
            call = connection.recv()
        except (EOFError, OSError):
            call = (_KILLED, (), {})
        calls.put(call)


def _write(calls: SimpleQueue[_Call], connection: Connection) -> None:
    name, arguments, options = calls.get()
    if name == _KILLED:
        return
    run = MlflowRun(*arguments, **options)
    with connection:
        for name, arguments, options in iter(calls.get, (_KILLED, (), {})):
            try:
                getattr(run, name)(*arguments, **options)
            except Exception as error:  # noqa: BLE001  # a file of the stage may be unreadable
                run.lose(error)
            if name == _END:
                with contextlib.suppress(OSError):  # the stage may have been killed meanwhile
                    connection.send((run.run_id, run.lost))
                return
