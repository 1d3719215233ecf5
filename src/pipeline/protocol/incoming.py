"""The called end of an HTTP/2 connection, and the bounds on what its peer can cause.

Reading never blocks; only an answer that is sent waits for the peer. The memory that a peer can
make this process use is bounded, and more tightly until it is known to be the environment.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

from pipeline.errors import UnityCommunicationException
from pipeline.protocol import frames
from pipeline.protocol.frames import END_HEADERS, END_STREAM, HEADERS, FrameError, Received, frame
from pipeline.protocol.http2 import MAX_CALL_BYTES, MAX_READ_BYTES, Connection, Stream, hello

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

    def __init__(self, sock: socket.socket, path: str, *, peer: str = "") -> None:
        super().__init__(sock)
        self.peer = peer
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
            if not self._make_way(deadline):
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
            self._pass_over(HEADERS, flags, stream)
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

    def _pass_over(self, kind: int, flags: int, stream: int) -> None:
        """Ignore what was sent before the peer heard that its call is refused."""
        if stream not in self._refused:
            super()._pass_over(kind, flags, stream)
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

    def _make_way(self, deadline: float) -> bool:
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


def listen(port: int, host: str | None) -> list[socket.socket]:
    """Listen on an address of this machine; None means both loopback addresses.

    Port 0 lets the system choose.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_listener(host or "127.0.0.1", port))]
        port = listeners[0].getsockname()[1]
        if host is None:
            # Without IPv6, clients of "localhost" fall back to 127.0.0.1.
            with contextlib.suppress(OSError):
                listeners.append(_listener("::1", port))
        stack.pop_all()
    return listeners


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)  # a client may be gone before it is accepted
    return listener
