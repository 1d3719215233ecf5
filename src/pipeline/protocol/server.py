"""The trainer's end of the conversation: a gRPC server that the environment calls.

Each reply of ours answers the environment's previous call, and the environment waits inside that
call until we do. So an exchange is: reply to the pending call, then wait for the next one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time

from pipeline.errors import SettingsError, UnityCommunicationException
from pipeline.protocol.calls import (
    FOREIGN,
    METHOD,
    NO_GREETING,
    STOPPED,
    CalledEnd,
    begins_anew,
    may_own,
    nothing_to_answer,
)
from pipeline.protocol.frames import FAILED_PRECONDITION, Received
from pipeline.protocol.grpc_server import GrpcServer
from pipeline.protocol.incoming import BACKLOG, IncomingConnection, accepted_from, listen
from pipeline.protocol.peers import PeerCheck
from pipeline.protocol.spin_wait import SpinWait

_log = logging.getLogger(__name__)

TRANSPORT_VARIABLE = "PIPELINE_TRANSPORT"
_KEEP_S = 0.5
_SEND_LIMIT_S = 60.0
_PREFACE_S = 10.0
"""Seconds for which a connection may be silent before its first bytes."""
_MAX_OTHERS, _STAY_S = 8, 1.0
"""Connections beside the owner's, and seconds for which each may stay while others wait."""
_MAX_WARNINGS = 10


class Server(CalledEnd):
    """Listens on loopback for one environment; the thread that waits reads the socket itself.

    The first connection that greets, and that `peers` allows, owns the conversation. As long as it
    lives, all others are closed unread, twice a second; when it breaks, the environment may go on
    over another one.

    While no thread waits, as in a long update of the networks or while other environments start, a
    keeper thread reads twice a second: clients give up if no one greets them, acknowledges their
    SETTINGS or answers their PING.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        host: str | None = None,
        peers: PeerCheck | None = None,
    ) -> None:
        """Start listening.

        Args:
            port: TCP port; 0 lets the system choose.
            host: address to listen on; None means loopback, 127.0.0.1 and ::1.
            peers: decides which process of this machine may be the environment; None for all of
                this user and of root.

        Raises:
            OSError: The port is taken, or `host` is no address of this machine.
            OverflowError: There is no such port.
        """
        self._listeners = listen(port, host)
        self.port = self._listeners[0].getsockname()[1]
        # Has only the owner's connection, or without an owner the listeners and all connections.
        self._selector = selectors.DefaultSelector()
        self._is_listening = False
        self._candidates: list[IncomingConnection] = []
        self._owner: IncomingConnection | None = None
        self._pending: tuple[IncomingConnection, int] | None = None
        self._has_begun = False
        self._next_look = 0.0
        self._n_warnings = 0
        self._peers = peers or PeerCheck()
        self._closed = threading.Event()
        # Reentrant: `close` and `release` hold it when they call `reply`.
        self._lock = threading.RLock()
        self._spin_wait = SpinWait()
        self._listen(True)
        self._keeper = threading.Thread(target=self._keep, name="protocol-keeper", daemon=True)
        self._keeper.start()

    @property
    def peer(self) -> str:
        """Address of the environment's machine; empty before it has greeted."""
        return "" if self._owner is None else self._owner.peer

    def _await_call(self, wait_s: float, now: float) -> tuple[Received | None, bool]:
        with self._lock:
            if self._closed.is_set():
                raise UnityCommunicationException("the server is closed")
            request, is_idle = self._next_call(), False
            if request is None:
                is_idle = not self._wait(wait_s)
                request = self._next_call()
            if now >= self._next_look:
                self._refuse_others(now)
        return request, is_idle

    def reply(self, message: bytes, limit_s: float = _SEND_LIMIT_S) -> None:
        """Answer the pending call with a serialized UnityMessageProto.

        Raises:
            UnityCommunicationException: No call is pending, or its answer is not taken.
        """
        with self._lock:
            if self._pending is None:
                raise nothing_to_answer()
            # Forgotten before it is sent: an answer that fails half way is not sent again.
            connection, stream = self._pending
            self._pending = None
            connection.respond(stream, message, limit_s)

    def is_called(self, wait_s: float) -> bool:
        """Return whether an environment has greeted, after waiting for that up to `wait_s`."""
        with self._lock:
            if self._owner is None and self._find_owner() is None:
                self._wait(wait_s)
                self._refuse_others(time.monotonic())
                self._find_owner()
            return self._owner is not None

    def release(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, and wait for another that greets; arguments as of `close`.

        An environment that was started again and has greeted already keeps its place.
        """
        with self._lock:
            if self._owner is not None:
                self._say_goodbye(wait_s)
            self._pending, self._has_begun, self._lost_at = None, False, None

    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, and free the port; waits `wait_s` for it to hang up."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._keeper.join()  # before the lock is taken, which it may want
        with self._lock:
            self._say_goodbye(wait_s)
            for listener in self._listeners:
                listener.close()
            for connection in self._candidates:
                connection.farewell(0.0)
            self._selector.close()

    def _say_goodbye(self, wait_s: float) -> None:
        """Answer the environment's call with the end, and hang up."""
        deadline = time.monotonic() + wait_s
        left = wait_s
        # The end is an answer, so it needs a call; the environment may still be at work.
        while self._pending is None and self._next_call() is None:
            left = deadline - time.monotonic()
            if self._owner is None or left <= 0 or not self._wait(left):
                break
        if self._pending is not None:
            with contextlib.suppress(UnityCommunicationException):  # it may be gone
                self.reply(STOPPED, max(left, 0.0))
        if self._owner is not None:
            self._forget_owner().farewell(wait_s)

    def _next_call(self) -> Received | None:
        owner = self._owner or self._find_owner()
        if owner is None:
            return None
        if owner.messages:
            stream, request = owner.messages.popleft()
            self._pending = (owner, stream)
            return request
        if not owner.is_open:
            self._forget_owner().socket.close()
            self._lost_at = time.monotonic()
        return None

    def _find_owner(self) -> IncomingConnection | None:
        """Return the connection whose call begins or continues the conversation; refuse others."""
        for connection in self._candidates:
            while connection.messages:
                stream, request = connection.messages[0]
                if connection.is_open and may_own(request, has_begun=self._has_begun):
                    if self._has_begun and begins_anew(request):
                        self._lost_at = -math.inf  # it was started again, and waits for `release`
                        return None
                    if (foreign := self._peers.refusal_at(connection.socket)) is None:
                        self._make_owner(connection)
                        return connection
                    # Hung up on, or it could make us look for its process again and again.
                    connection.refuse(stream, FAILED_PRECONDITION, FOREIGN)
                    connection.messages.clear()
                    connection.is_open = False
                    self._warn("A call on port %d is refused: %s.", self.port, foreign)
                    break
                connection.messages.popleft()
                connection.refuse(stream, FAILED_PRECONDITION, NO_GREETING)
                self._warn("A call is refused: %s", NO_GREETING)
        return None

    def _make_owner(self, connection: IncomingConnection) -> None:
        for other in [candidate for candidate in self._candidates if candidate is not connection]:
            self._drop(other)
        self._candidates.remove(connection)
        self._listen(False)
        connection.trust()
        self._owner, self._has_begun, self._lost_at = connection, True, None

    def _forget_owner(self) -> IncomingConnection:
        """Return the owner's connection, which owns nothing from now on."""
        owner, self._owner = self._owner, None
        if owner is None:
            raise ValueError("the conversation has no owner")
        self._selector.unregister(owner.socket)
        self._listen(True)
        return owner

    def _listen(self, enabled: bool) -> None:
        """Accept new connections, or leave them in the system's backlog."""
        if enabled != self._is_listening:
            self._is_listening = enabled
            for listener in self._listeners:
                if enabled:
                    self._selector.register(listener, selectors.EVENT_READ, None)
                else:
                    self._selector.unregister(listener)

    def _keep(self) -> None:
        """Handle what arrives while no thread waits for it."""
        while not self._closed.wait(_KEEP_S):
            # The thread that holds the lock handles what arrives, so there is nothing to wait for.
            if self._lock.acquire(blocking=False):
                try:
                    self._wait(0.0)
                    self._refuse_others(time.monotonic())
                finally:
                    self._lock.release()

    def _wait(self, seconds: float) -> bool:
        """Handle what arrives within `seconds`, and return whether anything did."""
        if seconds > 0:
            self._spin_wait.poll(self._selector)
        events = self._selector.select(seconds)
        for key, _ in events:
            connection: IncomingConnection | None = key.data
            if connection is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]  # listeners have no data
            elif connection is self._owner:
                if connection.is_open:
                    connection.read()
            elif connection in self._candidates and not (connection.is_open and connection.read()):
                self._drop(connection)
        return bool(events)

    def _accept(self, listener: socket.socket) -> None:
        """Accept waiting connections; at the limit the others stay in the system's backlog."""
        free = _MAX_OTHERS - len(self._candidates)
        for accepted in accepted_from(listener, free):
            try:
                peer = accepted.getpeername()[0]
                connection = IncomingConnection(accepted, METHOD, peer=peer)
            except OSError:
                accepted.close()
                continue
            self._candidates.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        # At the limit, a connection in the backlog would end every wait at once.
        self._listen(len(self._candidates) < _MAX_OTHERS)

    def _drop(self, connection: IncomingConnection) -> None:
        if connection.failure:
            self._warn(
                "A connection from %s to port %d is cut off: the peer sent %s",
                connection.peer,
                self.port,
                connection.failure,
            )
        self._selector.unregister(connection.socket)
        self._candidates.remove(connection)
        self._listen(True)
        connection.farewell(0.0)

    def _refuse_others(self, now: float) -> None:
        """Close connections that stay without a greeting; with an owner, close all others."""
        self._next_look = now + _KEEP_S
        if self._owner is None:
            full = len(self._candidates) == _MAX_OTHERS
            for connection in list(self._candidates):
                limit_s = _PREFACE_S if not connection.is_greeted else math.inf
                limit_s = _STAY_S if full else limit_s
                if now - connection.since > limit_s or not connection.is_open:
                    self._drop(connection)
            return
        self._wait(0.0)  # it may have left, and come back
        if self._owner.is_open:
            for listener in self._listeners:
                for accepted in accepted_from(listener, BACKLOG):
                    accepted.close()  # without GOAWAY, after which clients try again and again
                    self._warn("A connection is refused: the environment has another one.")

    def _warn(self, message: str, *values: str | int) -> None:
        """Log what another client does, as a warning only the first few times."""
        self._n_warnings += 1
        level = logging.WARNING if self._n_warnings <= _MAX_WARNINGS else logging.DEBUG
        _log.log(level, message, *values)


AnyServer = Server | GrpcServer
_SERVERS: dict[str, type[AnyServer]] = {"sockets": Server, "grpc": GrpcServer}
TRANSPORTS = tuple(_SERVERS)


def open_server(
    port: int = 0,
    *,
    host: str | None = None,
    transport: str | None = None,
    peers: PeerCheck | None = None,
) -> AnyServer:
    """Listen for one environment; other arguments and errors as of `Server`.

    A `transport` of None means what the environment variable PIPELINE_TRANSPORT says, "sockets" if
    it says nothing.

    Raises:
        SettingsError: There is no such transport.
    """
    origin = "transport" if transport is not None else TRANSPORT_VARIABLE
    name = transport if transport is not None else os.environ.get(origin) or "sockets"
    if name not in _SERVERS:
        raise SettingsError(f"{origin}: '{name}' is no transport; choose from {list(TRANSPORTS)}")
    return _SERVERS[name](port, host=host, peers=peers)
