"""The trainer's end of the conversation: a gRPC server that the environment calls.

Each reply of ours answers the environment's previous call, and the environment waits inside that
call until we do. So an exchange is: reply to the pending call, then wait for the next one. Reading
never blocks; only an answer that is sent waits for the peer. The memory that a peer can make this
process use is bounded, and more tightly until it is known to be the environment.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

from pipeline.errors import SettingsError, UnityCommunicationException
from pipeline.protocol import calls, frames
from pipeline.protocol.frames import (
    END_HEADERS,
    END_STREAM,
    FAILED_PRECONDITION,
    HEADERS,
    FrameError,
    Received,
    frame,
)
from pipeline.protocol.grpc_server import GrpcServer
from pipeline.protocol.http2 import MAX_CALL_BYTES, MAX_READ_BYTES, Connection, Stream, hello
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
BACKLOG = 16
MAX_CALLS = 4
"""Open calls of one connection; an environment makes one at a time."""
UNTRUSTED_CALL_BYTES, _UNTRUSTED_READ_BYTES = 1 << 22, 1 << 14
"""Bytes of a call, and of one read, of a peer that need not be the environment; the first is the
default of the general gRPC runtime."""
_MAX_UNREAD = 1 << 16
_MAX_REFUSED = 1000
_HELLO = hello(frames.MAX_STREAMS, MAX_CALLS)
_NOT_ONE_MESSAGE = (
    "not one uncompressed message; the trainer takes others with PIPELINE_TRANSPORT=grpc"
)


class IncomingConnection(Connection):
    """A connection on which a client calls the one method that is served.

    Attributes:
        since: when it was accepted, by the monotonic clock.
    """

    _call_limit = UNTRUSTED_CALL_BYTES
    _read_bytes = _UNTRUSTED_READ_BYTES

    def __init__(self, sock: socket.socket, path: str) -> None:
        super().__init__(sock)
        self.since = time.monotonic()
        self.is_greeted = False
        self._path = path.encode()
        self._reader = frames.HeaderReader()
        self._refused: set[int] = set()
        self._unsent = bytearray()
        self._unread = 0
        sock.setblocking(False)
        self._send(_HELLO)

    def trust(self) -> None:
        """Take calls of any size: the peer is the environment."""
        self._call_limit, self._read_bytes = MAX_CALL_BYTES, MAX_READ_BYTES

    def respond(self, stream: int, message: bytes, limit_s: float) -> None:
        """Answer the call that came on `stream`; one that was cancelled takes no answer.

        Raises:
            UnityCommunicationException: The peer did not take it all within `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        head = frame(HEADERS, END_HEADERS, stream, frames.RESPONSE)
        # gRPC's status comes in trailers, so that the message does not end the stream.
        tail = frame(HEADERS, END_HEADERS | END_STREAM, stream, frames.SUCCESS)
        self._transmit(stream, head, message, 0, tail, deadline)
        self._streams.pop(stream, None)
        while self._unsent:
            if not self._wait_writable(deadline):
                raise UnityCommunicationException("the environment does not read its answer")

    def refuse(self, stream: int, status: int, why: str) -> None:
        """Answer the call that came on `stream` with a failure."""
        if self._streams.pop(stream, None) is not None:
            block = frames.refusal_block(status, why)
            self._notify(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))

    def _begin(self, flags: int, stream: int, block: bytes) -> Stream | None:
        if stream % 2 == 0:
            raise FrameError(frames.PROTOCOL_ERROR, f"a call on stream {stream}")
        if stream <= self._last_stream:
            self._on_closed_stream(HEADERS, flags, stream)
            self._reader.read_trailers(block)
            return None
        self._last_stream = stream
        # Also for a call that is refused below: the table of the headers must follow every block.
        is_known = self._reader.is_call(block, self._path)
        if len(self._streams) < MAX_CALLS:
            call = self._streams[stream] = Stream(is_known)
            return call
        self._notify(frame(frames.RST_STREAM, 0, stream, struct.pack(">I", frames.REFUSED_STREAM)))
        if not flags & END_STREAM:
            self._refused.add(stream)
            if len(self._refused) > _MAX_REFUSED:
                raise FrameError(frames.ENHANCE_YOUR_CALM, "more calls than are allowed")
        return None

    def _follow(self, flags: int, call: Stream, block: bytes) -> None:
        del call
        self._reader.read_trailers(block)
        if not flags & END_STREAM:
            raise FrameError(frames.PROTOCOL_ERROR, "trailers that end no stream")

    def _on_closed_stream(self, kind: int, flags: int, stream: int) -> None:
        """Ignore what was sent before the peer heard that its call is refused."""
        if stream not in self._refused:
            super()._on_closed_stream(kind, flags, stream)
        if flags & END_STREAM:
            self._refused.remove(stream)

    def _complete(self, stream: int, call: Stream) -> None:
        """Deliver a call, or refuse it."""
        message = call.message()
        call.has_ended, call.parts = True, []
        if not call.is_known:
            method = self._path.decode()
            self.refuse(stream, frames.UNIMPLEMENTED, f"the only method here is {method}")
        elif message is None:
            self.refuse(stream, frames.UNIMPLEMENTED, _NOT_ONE_MESSAGE)
        else:
            self.messages.append((stream, message))

    def _cancelled(self, stream: int) -> None:
        """Forget a call: it takes no answer any more."""
        self._refused.discard(stream)
        if self._streams.pop(stream, None) is not None:
            self.messages = deque(message for message in self.messages if message[0] != stream)

    def _send(self, data: Received | bytearray) -> None:
        """Send at once what the system takes; the rest goes with what is sent next."""
        unsent = self._unsent
        if unsent:
            unsent += data
        try:
            sent = self.socket.send(unsent or data)
        except BlockingIOError:
            sent = 0
        except OSError:
            unsent.clear()
            self.is_open = False
            return
        if unsent:
            del unsent[:sent]
        elif sent < len(data):
            unsent += data[sent:]

    def _notify(self, data: bytes) -> None:
        """Send a response to the peer's frames; cut off a peer that causes more than it reads."""
        self._send(data)
        self._unread = self._unread + len(data) if self._unsent else 0
        if self._unread > _MAX_UNREAD:
            self.failure = "more than it reads answers to"
            self.is_open = False

    def _wait_writable(self, deadline: float) -> bool:
        # Also reads: the peer sends the credit that an answer waits for.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, events)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        if ready[0][1] & selectors.EVENT_WRITE:
            self._send(b"")
        if ready[0][1] & selectors.EVENT_READ:
            self.read()
        return self.is_open


def accepted_from(listener: socket.socket, limit: int) -> Iterator[socket.socket]:
    """Accept connections that wait, `limit` at most."""
    # An error means that none is waiting, or that a waiting one is gone again.
    with contextlib.suppress(OSError):
        for _ in range(limit):
            yield listener.accept()[0]


def listen(port: int) -> list[socket.socket]:
    """Listen on both loopback addresses; port 0 lets the system choose."""
    listeners = [_listener("127.0.0.1", port)]
    # Without IPv6, clients of "localhost" fall back to 127.0.0.1.
    with contextlib.suppress(OSError):
        listeners.append(_listener("::1", listeners[0].getsockname()[1]))
    return listeners


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)  # a client may be gone before it is accepted
    return listener


class Server(calls.CallServer):
    """Listens on loopback for one environment; the thread that waits reads the socket itself.

    The first connection that greets, and that `peers` allows, owns the conversation. As long as it
    lives, all others are closed unread, twice a second; when it breaks, the environment may go on
    over another one.

    While no thread waits, as in a long update of the networks or while other environments start, a
    keeper thread reads twice a second: clients give up if no one greets them, acknowledges their
    SETTINGS or answers their PING.
    """

    def __init__(self, port: int = 0, *, peers: PeerCheck | None = None) -> None:
        """Start listening.

        Args:
            port: TCP port; 0 lets the system choose.
            peers: decides which process of this machine may be the environment; None for all of
                this user and of root.

        Raises:
            OSError: The port is taken.
            OverflowError: There is no such port.
        """
        self._listeners = listen(port)
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
    def has_greeted(self) -> bool:
        """Whether an environment has greeted, and its connection is there."""
        return self._owner is not None

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
                raise calls.no_pending_call_error()
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
                self._shut_down_peer(wait_s)
            self._pending, self._has_begun, self._lost_at = None, False, None

    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, and free the port; waits `wait_s` for it to hang up."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._keeper.join()  # before the lock is taken, which it may want
        with self._lock:
            self._shut_down_peer(wait_s)
            for listener in self._listeners:
                listener.close()
            for connection in self._candidates:
                connection.close(0.0)
            self._selector.close()

    def _shut_down_peer(self, wait_s: float) -> None:
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
                self.reply(calls.STOPPED, max(left, 0.0))
        if self._owner is not None:
            self._forget_owner().close(wait_s)

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
        has_begun = self._has_begun
        for connection in self._candidates:
            while connection.messages:
                stream, request = connection.messages[0]
                if connection.is_open and calls.can_start_or_resume(request, has_begun=has_begun):
                    if has_begun and calls.is_handshake(request):
                        self._lost_at = -math.inf  # it was started again, and waits for `release`
                        return None
                    if (foreign := self._peers.refusal_at(connection.socket)) is None:
                        self._make_owner(connection)
                        return connection
                    # Hung up on, or it could make us look for its process again and again.
                    connection.refuse(stream, FAILED_PRECONDITION, calls.FOREIGN)
                    connection.messages.clear()
                    connection.is_open = False
                    self._warn("A call on port %d is refused: %s.", self.port, foreign)
                    break
                connection.messages.popleft()
                connection.refuse(stream, FAILED_PRECONDITION, calls.NO_GREETING)
                self._warn("A call is refused: %s", calls.NO_GREETING)
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
                connection = IncomingConnection(accepted, calls.METHOD)
            except OSError:
                accepted.close()
                continue
            self._candidates.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        # At the limit, a connection in the backlog would end every wait at once.
        self._listen(len(self._candidates) < _MAX_OTHERS)

    def _drop(self, connection: IncomingConnection) -> None:
        if connection.failure:
            text = "A connection to port %d is cut off: the peer sent %s"
            self._warn(text, self.port, connection.failure)
        self._selector.unregister(connection.socket)
        self._candidates.remove(connection)
        self._listen(True)
        connection.close(0.0)

    def _refuse_others(self, now: float) -> None:
        """Close connections that stay without a greeting; with an owner, close all others."""
        self._next_look = now + _KEEP_S
        if self._owner is None:
            full = len(self._candidates) == _MAX_OTHERS
            for connection in list(self._candidates):
                limit_s = _STAY_S if full else math.inf if connection.is_greeted else _PREFACE_S
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
    port: int = 0, *, transport: str | None = None, peers: PeerCheck | None = None
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
    return _SERVERS[name](port, peers=peers)
