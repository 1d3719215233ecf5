"""The trainer's end of the conversation: a gRPC server that the environment calls.

The environment waits inside each call until the trainer answers it. So an exchange is: reply to the
pending call, then wait for the next call. Reading never blocks; only sending an answer waits for
the peer. The memory that a peer can make this process use is bounded, with lower limits until the
peer is known to be the environment.
"""

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
from pipeline.wire.codec.records import Received
from pipeline.wire.transport import calls, frames, http2
from pipeline.wire.transport.frames import END_HEADERS, END_STREAM, HEADERS, FrameError, frame
from pipeline.wire.transport.grpc_server import GrpcServer
from pipeline.wire.transport.http2 import Connection, Stream
from pipeline.wire.transport.peers import PeerCheck
from pipeline.wire.transport.spin_wait import SpinWait

_log = logging.getLogger(__name__)

TRANSPORT_VARIABLE = "PIPELINE_TRANSPORT"
# Seconds between two reads of the keeper thread, and between two checks of the candidates.
_KEEPER_INTERVAL_S = 0.5
_SEND_LIMIT_S = 60.0
# Seconds within which a new connection must send its preface.
_PREFACE_S = 10.0
# Largest number of connections that have not greeted, and the seconds after which such a connection
# is closed if there are so many.
_MAX_CANDIDATES, _CANDIDATE_LIMIT_S = 8, 1.0
_MAX_WARNINGS = 10
# Largest number of connections that wait in the system until they are accepted.
BACKLOG = 16
MAX_CALLS = 4
"""Largest number of open calls of one connection; an environment makes one call at a time."""
UNTRUSTED_CALL_BYTES, _UNTRUSTED_READ_BYTES = 1 << 22, 1 << 14
"""Largest call and largest read, in bytes, until the peer is known to be the environment. The first
number is the default of the general gRPC runtime."""
# Most bytes of frames that a peer does not read, and most calls that are refused at a time: without
# these limits, a peer could make the memory of this process grow.
_MAX_UNREAD = 1 << 16
_MAX_REFUSED = 1000
_OPENING = http2.first_frames(frames.MAX_STREAMS, MAX_CALLS)
_NOT_ONE_MESSAGE = (
    "not one uncompressed message; for other messages, set PIPELINE_TRANSPORT=grpc for the trainer"
)


class IncomingConnection(Connection):
    """A connection on which a client calls the only method that the server has."""

    _call_limit = UNTRUSTED_CALL_BYTES
    _read_bytes = _UNTRUSTED_READ_BYTES

    def __init__(self, sock: socket.socket, path: str) -> None:
        super().__init__(sock)
        self.since = time.monotonic()  # time at which the connection was accepted
        self.is_greeted = False
        self._path = path.encode()
        self._reader = frames.HeaderReader()
        self._refused: set[int] = set()
        self._unsent = bytearray()
        self._unread = 0
        sock.setblocking(False)
        self._send(_OPENING)

    def trust(self) -> None:
        """Accept calls of any size from now on: the peer is the environment."""
        self._call_limit, self._read_bytes = http2.MAX_CALL_BYTES, http2.MAX_READ_BYTES

    def respond(self, stream: int, message: bytes, limit_s: float) -> None:
        """Answer the call on `stream`, unless the peer has cancelled it; errors as of `reply`."""
        deadline = time.monotonic() + limit_s
        head = frame(HEADERS, END_HEADERS, stream, frames.RESPONSE)
        # gRPC sends its status in trailers, so these, and not the message, end the stream.
        tail = frame(HEADERS, END_HEADERS | END_STREAM, stream, frames.SUCCESS)
        self._transmit(stream, head, message, 0, tail, deadline)
        self._streams.pop(stream, None)
        while self._unsent:
            if not self._wait_writable(deadline):
                raise UnityCommunicationException("the environment does not read our answer")

    def refuse(self, stream: int, status: int, why: str) -> None:
        """Answer the call on `stream` with a status code of gRPC and the reason."""
        if self._streams.pop(stream, None) is not None:
            block = frames.refusal_block(status, why)
            self._notify(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))

    def _on_new_stream(self, flags: int, stream: int, block: bytes) -> Stream | None:
        if stream % 2 == 0:
            raise FrameError(frames.PROTOCOL_ERROR, f"a call on stream {stream}, an even number")
        if stream <= self._last_stream:
            self._on_closed_stream(HEADERS, flags, stream)
            self._reader.read_trailers(block)
            return None
        self._last_stream = stream
        # Every header block must update the dynamic table, even that of a refused call.
        is_known = self._reader.is_call(block, self._path)
        if len(self._streams) < MAX_CALLS:
            call = self._streams[stream] = Stream(is_known)
            return call
        # gRPC's clients try a refused stream again, unlike a call that fails.
        self._notify(frame(frames.RST_STREAM, 0, stream, struct.pack(">I", frames.REFUSED_STREAM)))
        if not flags & END_STREAM:
            self._refused.add(stream)
            if len(self._refused) > _MAX_REFUSED:
                raise FrameError(frames.ENHANCE_YOUR_CALM, "more calls than are allowed")
        return None

    def _on_further_headers(self, flags: int, call: Stream, block: bytes) -> None:
        del call
        self._reader.read_trailers(block)
        if not flags & END_STREAM:
            raise FrameError(frames.PROTOCOL_ERROR, "trailers that end no stream")

    def _on_closed_stream(self, kind: int, flags: int, stream: int) -> None:
        """Ignore frames that the peer sent before our refusal of the call arrived."""
        if stream not in self._refused:
            super()._on_closed_stream(kind, flags, stream)
        if flags & END_STREAM:
            self._refused.remove(stream)

    def _on_stream_end(self, stream: int, call: Stream) -> None:
        message = call.message()
        call.has_ended, call.parts = True, []
        if not call.is_known:
            method = self._path.decode()
            self.refuse(stream, frames.UNIMPLEMENTED, f"the only method here is {method}")
        elif message is None:
            self.refuse(stream, frames.UNIMPLEMENTED, _NOT_ONE_MESSAGE)
        else:
            self.messages.append((stream, message))

    def _on_reset(self, stream: int) -> None:
        self._refused.discard(stream)
        if self._streams.pop(stream, None) is not None:
            self.messages = deque(message for message in self.messages if message[0] != stream)

    def _send(self, data: Received | bytearray) -> None:
        """Send the bytes that the system accepts now; store the others for the next `_send`."""
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
        # The socket may take only a part of the bytes; the rest is sent later.
        if unsent:
            del unsent[:sent]
        elif sent < len(data):
            unsent += data[sent:]

    def _notify(self, data: bytes) -> None:
        """Send a frame that answers the peer's frames; close if the peer does not read them."""
        self._send(data)
        self._unread = self._unread + len(data) if self._unsent else 0
        if self._unread > _MAX_UNREAD:
            self.failure = "frames without reading the answers to them"
            self.is_open = False

    def _wait_writable(self, deadline: float) -> bool:
        # The wait also ends when bytes arrive, because an answer may wait for the peer's
        # WINDOW_UPDATE frames.
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
    """Accept at most `limit` connections from the backlog."""
    # An error means that no connection is waiting, or that a waiting client has gone.
    with contextlib.suppress(OSError):
        for _ in range(limit):
            yield listener.accept()[0]


def listen(port: int) -> list[socket.socket]:
    """Listen on both loopback addresses; with port 0 the system chooses the port."""
    listeners = [socket.create_server(("127.0.0.1", port), backlog=BACKLOG)]
    address = ("::1", listeners[0].getsockname()[1])
    # Without IPv6, clients of "localhost" fall back to 127.0.0.1.
    with contextlib.suppress(OSError):
        listeners += [socket.create_server(address, family=socket.AF_INET6, backlog=BACKLOG)]
    for listener in listeners:
        listener.setblocking(False)  # `accept` would block if the client has gone in the meantime
    return listeners


class Server(calls.CallServer):
    """Listens on loopback for one environment; the thread that waits reads the socket itself.

    The first connection that sends a greeting, and that `peers` allows, owns the conversation.
    While this connection is open, the server looks for other connections twice a second, and closes
    them unread; when it breaks, the environment may continue on another connection.

    While no thread waits, as in a long update of the networks or while other environments start, a
    keeper thread reads twice a second, because clients give up if nobody sends them SETTINGS,
    acknowledges their SETTINGS or answers their PING.
    """

    def __init__(self, port: int = 0, *, peers: PeerCheck | None = None) -> None:
        """Start listening; with port 0 the system chooses the port.

        `peers` of None allows all processes of this user and of root.

        Raises:
            OSError: The port is taken.
            OverflowError: The port is not in 0..65535.
        """
        self._listeners = listen(port)
        self.port = self._listeners[0].getsockname()[1]
        # If there is an owner, only its connection is registered; otherwise the listeners and all
        # connections in `_candidates` are registered.
        self._selector = selectors.DefaultSelector()
        self._is_listening = False
        self._candidates: list[IncomingConnection] = []
        self._owner: IncomingConnection | None = None
        self._pending: tuple[IncomingConnection, int] | None = None
        self._has_begun = False
        self._next_candidate_check = 0.0
        self._n_warnings = 0
        self._peers = peers or PeerCheck()
        self._closed = threading.Event()
        # The lock is reentrant: `close` and `release` hold it when they call `reply`.
        self._lock = threading.RLock()
        self._spin_wait = SpinWait()
        self._listen(True)
        self._keeper = threading.Thread(
            target=self._read_while_idle, name="protocol-keeper", daemon=True
        )
        self._keeper.start()

    @property
    def has_greeted(self) -> bool:
        """Whether an environment has greeted and its connection is open."""
        return self._owner is not None

    def _await_call(self, wait_s: float, now: float) -> tuple[Received | None, bool]:
        with self._lock:
            if self._closed.is_set():
                raise UnityCommunicationException("the server is closed")
            request, is_idle = self._next_call(), False
            if request is None:
                is_idle = not self._wait(wait_s)
                request = self._next_call()
            if now >= self._next_candidate_check:
                self._refuse_others(now)
        return request, is_idle

    def reply(self, message: bytes, limit_s: float = _SEND_LIMIT_S) -> None:
        """Answer the pending call with a serialized UnityMessageProto.

        Raises:
            UnityCommunicationException: No call is pending, or the environment does not read the
                answer within `limit_s`.
        """
        with self._lock:
            if self._pending is None:
                raise UnityCommunicationException(calls.NO_CALL)
            # The call is removed before the answer is sent, because an answer that fails half way
            # must not be sent a second time.
            connection, stream = self._pending
            self._pending = None
            connection.respond(stream, message, limit_s)

    def is_called(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for an environment's greeting, and return whether one has come."""
        with self._lock:
            if self._owner is None and self._find_owner() is None:
                self._wait(wait_s)
                self._refuse_others(time.monotonic())
                self._find_owner()
            return self._owner is not None

    def release(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop as `close` does, and accept the next one that greets.

        An environment that was started again is accepted, even if it greeted before this call.
        """
        with self._lock:
            if self._owner is not None:
                self._shut_down_peer(wait_s)
            self._pending, self._has_begun, self._lost_at = None, False, None

    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, wait up to `wait_s` until it disconnects, free the port."""
        if self._closed.is_set():
            return
        self._closed.set()
        # The keeper thread must not read the connections that are closed below.
        self._keeper.join()
        with self._lock:
            self._shut_down_peer(wait_s)
            for listener in self._listeners:
                listener.close()
            for connection in self._candidates:
                connection.close(0.0)
            self._selector.close()

    def _shut_down_peer(self, wait_s: float) -> None:
        """Answer the environment's call with the end of the conversation, and disconnect."""
        deadline, left = time.monotonic() + wait_s, wait_s
        # The end can only be sent as the answer to a call, which may come late: the environment may
        # still compute a step.
        while self._pending is None and self._next_call() is None:
            left = deadline - time.monotonic()
            if self._owner is None or left <= 0 or not self._wait(left):
                break
        if self._pending is not None:
            with contextlib.suppress(UnityCommunicationException):  # the environment may be gone
                self.reply(calls.STOPPED, max(left, 0.0))
        if (owner := self._owner) is not None:
            self._forget_owner(owner)
            owner.close(wait_s)

    def _next_call(self) -> Received | None:
        owner = self._owner or self._find_owner()
        if owner is None:
            return None
        if owner.messages:
            stream, request = owner.messages.popleft()
            self._pending = (owner, stream)
            return request
        if not owner.is_open:
            self._forget_owner(owner)
            owner.socket.close()
            self._lost_at = time.monotonic()
        return None

    def _find_owner(self) -> IncomingConnection | None:
        """Return the first connection that begins or continues a conversation; refuse the rest."""
        has_begun = self._has_begun
        for connection in self._candidates:
            while connection.messages:
                stream, request = connection.messages[0]
                if connection.is_open and calls.can_start_or_resume(request, has_begun=has_begun):
                    if has_begun and calls.is_handshake(request):
                        # The environment was started again, and waits for `release`.
                        self._lost_at = -math.inf
                        return None
                    if (foreign := self._peers.refusal_at(connection.socket)) is None:
                        self._make_owner(connection)
                        return connection
                    # The connection is closed at once, so that its next calls do not cost another
                    # search for the client's process.
                    connection.refuse(stream, frames.FAILED_PRECONDITION, calls.FOREIGN)
                    connection.messages.clear()
                    connection.is_open = False
                    self._warn("A call on port %d is refused: %s.", self.port, foreign)
                    break
                connection.messages.popleft()
                connection.refuse(stream, frames.FAILED_PRECONDITION, calls.NO_GREETING)
                self._warn("A call is refused: %s", calls.NO_GREETING)
        return None

    def _make_owner(self, connection: IncomingConnection) -> None:
        self._candidates.remove(connection)
        for other in list(self._candidates):
            self._drop(other)
        self._listen(False)
        connection.trust()
        self._owner, self._has_begun, self._lost_at = connection, True, None

    def _forget_owner(self, owner: IncomingConnection) -> None:
        self._owner = None
        self._selector.unregister(owner.socket)
        self._listen(True)

    def _listen(self, enabled: bool) -> None:
        """Begin or stop accepting connections, which wait in the backlog while none is accepted."""
        if enabled == self._is_listening:
            return
        self._is_listening = enabled
        for listener in self._listeners:
            if enabled:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)

    def _read_while_idle(self) -> None:
        """Read connections while no thread waits for a call; runs in the keeper thread."""
        while not self._closed.wait(_KEEPER_INTERVAL_S):
            # The thread that holds the lock reads the connections, so this thread does not wait.
            if self._lock.acquire(blocking=False):
                try:
                    self._wait(0.0)
                    self._refuse_others(time.monotonic())
                finally:
                    self._lock.release()

    def _wait(self, seconds: float) -> bool:
        """Handle bytes and connections that arrive within `seconds`; return whether any did."""
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
        free = _MAX_CANDIDATES - len(self._candidates)
        for accepted in accepted_from(listener, free):
            try:
                connection = IncomingConnection(accepted, calls.METHOD)
            except OSError:
                accepted.close()
                continue
            self._candidates.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        # At the limit the listeners are not registered: a connection that waits in the backlog
        # would end every wait at once.
        self._listen(len(self._candidates) < _MAX_CANDIDATES)

    def _drop(self, connection: IncomingConnection) -> None:
        if connection.failure:
            text = "A connection to port %d is closed because the peer sent %s"
            self._warn(text, self.port, connection.failure)
        self._selector.unregister(connection.socket)
        self._candidates.remove(connection)
        self._listen(True)
        connection.close(0.0)

    def _refuse_others(self, now: float) -> None:
        """Close connections that greet too late or, if there is an owner, all other connections."""
        self._next_candidate_check = now + _KEEPER_INTERVAL_S
        if self._owner is None:
            full = len(self._candidates) == _MAX_CANDIDATES
            for connection in list(self._candidates):
                patience_s = math.inf if connection.is_greeted else _PREFACE_S
                limit_s = _CANDIDATE_LIMIT_S if full else patience_s
                if now - connection.since > limit_s or not connection.is_open:
                    self._drop(connection)
            return
        self._wait(0.0)  # the environment may have closed its connection and opened another
        if self._owner.is_open:
            for listener in self._listeners:
                for accepted in accepted_from(listener, BACKLOG):
                    # No GOAWAY is sent, because clients would connect again at once.
                    accepted.close()
                    self._warn("A connection is refused: the environment has another connection.")

    def _warn(self, message: str, *values: str | int) -> None:
        """Log a line about another client: the first ten as warnings, later ones at level DEBUG."""
        self._n_warnings += 1
        level = logging.WARNING if self._n_warnings <= _MAX_WARNINGS else logging.DEBUG
        _log.log(level, message, *values)


AnyServer = Server | GrpcServer
_SERVERS: dict[str, type[AnyServer]] = {"sockets": Server, "grpc": GrpcServer}
TRANSPORTS = tuple(_SERVERS)


def open_server(
    port: int = 0, *, transport: str | None = None, peers: PeerCheck | None = None
) -> AnyServer:
    """Listen for one environment; other arguments and errors are those of `Server`.

    A `transport` of None means PIPELINE_TRANSPORT, or "sockets" if the variable is not set.

    Raises:
        SettingsError: The transport is unknown.
    """
    origin = "transport" if transport is not None else TRANSPORT_VARIABLE
    name = transport if transport is not None else os.environ.get(origin) or "sockets"
    if name not in _SERVERS:
        raise SettingsError(f"{origin}: '{name}' is no transport; choose from {list(TRANSPORTS)}")
    return _SERVERS[name](port, peers=peers)
