"""The calling end of the conversation, for environments."""

from __future__ import annotations

import math
import selectors
import socket

from pipeline.errors import UnityCommunicationException
from pipeline.protocol import frames
from pipeline.protocol.frames import END_HEADERS, END_STREAM, HEADERS, FrameError, Received, frame
from pipeline.protocol.http2 import PREFACE, Connection, Stream, hello
from pipeline.protocol.spin_wait import SpinWait

_HELLO = PREFACE + hello(frames.ENABLE_PUSH, 0)


class OutgoingConnection(Connection):
    """A connection on which we make calls. The headers of answers are ignored."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._send(_HELLO)

    def request(self, stream: int, block: bytes, message: bytes) -> None:
        """Make a call; the streams of a client are odd and grow."""
        self._streams[stream] = Stream()
        self._last_stream = stream
        head = frame(HEADERS, END_HEADERS, stream, block)
        self._transmit(stream, head, message, END_STREAM, b"", math.inf)

    def _begin(self, flags: int, stream: int, block: bytes) -> Stream | None:
        del flags, block
        raise FrameError(frames.PROTOCOL_ERROR, f"HEADERS on stream {stream}, which has no call")

    def _follow(self, flags: int, call: Stream, block: bytes) -> None:
        del block
        # Before any data these are the answer's headers; after data only trailers may come.
        if call.size and not flags & END_STREAM:
            raise FrameError(frames.PROTOCOL_ERROR, "trailers that end no stream")

    def _complete(self, stream: int, call: Stream) -> None:
        """Deliver an answer; a failure ends the connection."""
        del self._streams[stream]
        message = call.message()
        if message is None:
            self.is_open = False
        else:
            self.messages.append((stream, message))

    def _cancelled(self, stream: int) -> None:
        if self._streams.pop(stream, None) is not None:
            self.is_open = False

    def _leaving(self) -> None:
        if not self._streams:
            self.is_open = False

    def _send(self, data: Received | bytearray) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_open = False

    def _make_way(self, deadline: float) -> bool:
        del deadline  # the socket's time-out holds
        return self.is_open and self.read()


class Channel:
    """One unary method of one server."""

    def __init__(self, port: int, method: str, *, timeout_s: float = 30.0) -> None:
        """Connect to `localhost`; OSError if no one listens there."""
        sock = socket.create_connection(("localhost", port), timeout=timeout_s)
        if sock.getsockname() == sock.getpeername():
            # The system chose the very port that we looked for: we called ourselves.
            sock.close()
            raise ConnectionRefusedError(f"no one listens on localhost:{port}")
        try:
            self._connection = OutgoingConnection(sock)
        except OSError:
            sock.close()
            raise
        sock.settimeout(None)
        self._spin_wait = SpinWait()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._stream = -1
        self._headers = frames.request_block(method, f"localhost:{port}")

    def call(self, message: bytes, timeout_s: float | None = None) -> Received:
        """Send one message and wait for the answer, without limit if `timeout_s` is None.

        Raises:
            ConnectionError: The server went away or refused.
            TimeoutError: It was silent for `timeout_s`.
        """
        connection = self._connection
        connection.socket.settimeout(timeout_s)
        self._stream += 2
        try:
            connection.request(self._stream, self._headers, message)
        except UnityCommunicationException as error:
            raise ConnectionError(str(error)) from error
        self._spin_wait.poll(self._selector)
        while not connection.messages:
            # The answer may have come together with the server's farewell.
            if not connection.read() and not connection.messages:
                event = (
                    f"sent {connection.failure}" if connection.failure else "closed the connection"
                )
                raise ConnectionError(f"the trainer {event}")
        return connection.messages.popleft()[1]

    def close(self) -> None:
        """End the connection."""
        self._selector.close()
        self._connection.farewell(0.0)
