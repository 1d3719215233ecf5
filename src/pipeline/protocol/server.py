"""The trainer's end of the conversation: a gRPC server that the environment calls.

Each reply of ours answers the environment's previous call, and the environment waits inside that
call until we do. So an exchange is: reply to the pending call, then wait for the next one.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityTimeOutException,
    UnityWorkerInUseException,
)
from pipeline.protocol.generated.messages import UnityMessageProto
from pipeline.protocol.http2 import Connection
from pipeline.protocol.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

METHOD = "/communicator_objects.UnityToExternalProto/Exchange"
OK, STOP = 200, 400
POLL_S = 0.2
LOST_S = 2.0
"""How long after its connection broke an environment may come back."""
_KEEP_S = 0.5
STOPPED = UnityMessageProto(header={"status": STOP}).SerializeToString()

_TIME_OUT = """\
The Unity environment took too long to respond ({seconds:g} s). Make sure that:
\t the environment does not need user interaction to launch
\t the agents' Behavior Parameters > Behavior Type is set to "Default"
\t the environment and the Python interface have compatible versions
\t on a machine without a display, the environment is a server build or runs with --no-graphics"""


def parse_call(request: bytes) -> UnityMessageProto:
    """The message in an environment's call.

    Raises:
        UnityCommunicatorStoppedException: It says that the environment stops.
        UnityCommunicationException: It is not a message of the protocol.
    """
    try:
        message = UnityMessageProto.FromString(request)
    except DecodeError as error:
        raise UnityCommunicationException(
            f"the environment sent {len(request)} bytes that are not a message of the protocol"
        ) from error
    if message.header.status != OK:
        raise UnityCommunicatorStoppedException("Communicator has exited.")
    return message


def time_out(seconds: float) -> UnityTimeOutException:
    """What to raise when no call came for `seconds`."""
    return UnityTimeOutException(_TIME_OUT.format(seconds=seconds))


def nothing_to_answer() -> UnityCommunicationException:
    """What to raise when a reply has no call."""
    return UnityCommunicationException(
        "the environment is still at work: wait for its message before sending another"
    )


def lost() -> UnityCommunicatorStoppedException:
    """What to raise when an environment broke its connection and did not come back."""
    return UnityCommunicatorStoppedException(
        "Communicator has exited: the environment closed its connection without a message."
    )


class Server:
    """Listens on loopback for one environment; the thread that waits reads the socket itself.

    While no one waits, as in a long update of the networks or while other environments start, a
    keeper looks twice a second: clients give up where no one greets them, acknowledges their
    SETTINGS or answers their PING.

    Attributes:
        port: the TCP port it listens on.
    """

    def __init__(self, port: int = 0, *, worker_id: int = 0, host: str | None = None) -> None:
        """Start listening.

        Args:
            port: TCP port; 0 lets the system choose.
            worker_id: the worker this is for, for the error.
            host: address to listen on; None means loopback, 127.0.0.1 and ::1.

        Raises:
            UnityWorkerInUseException: The port is taken.
        """
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._pending: tuple[Connection, int] | None = None
        self._lost_at: float | None = None
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._patience = Patience()
        try:
            self._listeners = _listen(port, host)
        except (OSError, OverflowError) as error:  # overflow: beyond port 65535
            self._selector.close()
            raise UnityWorkerInUseException(worker_id, port) from error
        self.port: int = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, None)
        self._keeper = threading.Thread(target=self._keep, name="protocol-keeper", daemon=True)
        self._keeper.start()

    def receive(self, timeout_s: float, check: Callable[[], None]) -> UnityMessageProto:
        """The environment's next call.

        Args:
            timeout_s: longest wait.
            check: called now and then while waiting; raises when there is no one to wait for.

        Raises:
            UnityTimeOutException: No call came.
            UnityCommunicatorStoppedException: The environment stops, or its connection broke.
            UnityCommunicationException: What it sent is not a message of the protocol.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            with self._lock:
                if self._closed.is_set():
                    raise UnityCommunicationException("the server is closed")
                request = self._next_call()
                idle = request is None and not self._wait(max(0.0, min(left, POLL_S)))
            if request is not None:
                return parse_call(request)
            if idle:
                check()
                self._check_lost()
                if left <= 0:
                    raise time_out(timeout_s)

    def reply(self, message: bytes) -> None:
        """Answer the pending call with a serialized UnityMessageProto.

        Raises:
            UnityCommunicationException: No call is pending, or its answer is not taken.
        """
        with self._lock:
            if self._pending is None:
                raise nothing_to_answer()
            connection, stream = self._pending
            self._pending = None
            connection.respond(stream, message)

    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, and free the port; waits `wait_s` for it to hang up."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._keeper.join()
        with self._lock:
            self._say_goodbye(wait_s)

    def _say_goodbye(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while self._pending is None and any(c.n_messages for c in self._connections):
            left = deadline - time.monotonic()
            if self._next_call() is not None or left <= 0 or not self._wait(left):
                break
        if self._pending is not None:
            with contextlib.suppress(UnityCommunicationException):  # it may be gone
                self.reply(STOPPED)
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.farewell(wait_s)
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_call(self) -> bytes | None:
        for connection in self._connections:
            if connection.messages:
                stream, request = connection.messages.popleft()
                self._pending = (connection, stream)
                self._lost_at = None
                return request
        return None

    def _keep(self) -> None:
        """Handle what arrives while no one waits for it."""
        while not self._closed.wait(_KEEP_S):
            if self._lock.acquire(blocking=False):
                try:
                    self._wait(0.0)
                finally:
                    self._lock.release()

    def _wait(self, seconds: float) -> bool:
        """Handle what arrives within `seconds`; whether anything did."""
        if seconds > 0:
            self._patience.look(self._something_there)
        events = self._selector.select(seconds)
        for key, _ in events:
            connection = key.data
            if connection is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]  # listeners have no data
            elif not connection.read() and not connection.messages:
                self._drop(connection)
        return bool(events)

    def _something_there(self) -> bool:
        return bool(self._selector.select(0))

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted = listener.accept()[0]
        except OSError:
            return
        try:
            connection = Connection(accepted, is_server=True)
        except OSError:
            accepted.close()
            return
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        self._connections.remove(connection)
        connection.socket.close()
        if connection.n_messages:
            self._lost_at = time.monotonic()

    def _check_lost(self) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > LOST_S:
            raise lost()


def _listen(port: int, host: str | None) -> list[socket.socket]:
    """Listen on `host`, or on both loopback addresses where the machine has both."""
    listeners = [_listener(host or "127.0.0.1", port)]
    if host is None:
        # Without IPv6, clients of "localhost" fall back to 127.0.0.1.
        with contextlib.suppress(OSError):
            listeners.append(_listener("::1", listeners[0].getsockname()[1]))
    return listeners


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(16)
        listener.setblocking(False)  # a client may be gone before it is accepted
    except OSError:
        listener.close()
        raise
    return listener
