"""gRPC's unary calls over plain sockets: the part of HTTP/2 that one method with one caller needs.

A step is one call, so its latency bounds the speed of small environments. The general gRPC runtime
hands every call through several threads; here the thread that wants a message reads the socket
itself.

Header blocks are never decoded, so a call's path is not looked at: there is one method, and every
call that carries one uncompressed message is taken for it. No state of header compression is needed
therefore (HEADERS and CONTINUATION may hold anything), and what we send uses literals only. What
is no such call gets the status UNIMPLEMENTED; a peer that breaks the rules gets GOAWAY.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK) and the gRPC-over-HTTP/2 specification.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import struct
import time
from collections import deque

from pipeline.errors import UnityCommunicationException
from pipeline.protocol import frames
from pipeline.protocol.frames import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, frame

_log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_RECEIVE_BYTES = 1 << 18
_RENEW_BYTES = 1 << 24
_SEND_LIMIT_S = 60.0


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing; `name` is an index below 127 (one byte) or a text."""
    return name + bytes([len(value)]) + value


_CONTENT_TYPE = _literal(b"\x0f\x10", b"application/grpc")
_RESPONSE = b"\x88" + _CONTENT_TYPE
_STATUS = b"\x00\x0bgrpc-status"
_SUCCESS = _literal(_STATUS, b"0")
_REFUSAL = (
    _RESPONSE
    + _literal(_STATUS, b"12")
    + _literal(
        b"\x00\x0cgrpc-message",
        b"not one uncompressed message; the trainer takes others with PIPELINE_TRANSPORT=grpc",
    )
)
_HELLO = frame(
    frames.SETTINGS,
    0,
    0,
    struct.pack(
        ">HIHI",
        frames.INITIAL_WINDOW,
        frames.LARGEST_WINDOW,
        frames.MAX_FRAME,
        frames.LARGEST_FRAME,
    ),
) + frame(
    frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW)
)


class Connection:
    """One HTTP/2 connection, driven by the thread that calls its methods.

    Attributes:
        messages: complete gRPC messages that arrived, as (stream, bytes), oldest first.
        n_messages: how many arrived in all.
    """

    def __init__(self, sock: socket.socket, *, is_server: bool) -> None:
        self.messages: deque[tuple[int, bytes]] = deque()
        self.n_messages = 0
        self.socket = sock
        self._is_server = is_server
        self._buffer = bytearray()
        self._greeted = not is_server
        self._open = True
        self._parts: dict[int, list[bytes]] = {}
        self._unanswered: set[int] = set()
        self._last_stream = 0
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._stream_credit: dict[int, int] = {}
        self._frame_limit = frames.DEFAULT_FRAME
        self._consumed = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_SEND_LIMIT_S)
        sock.sendall(_HELLO if is_server else PREFACE + _HELLO)

    def read(self) -> bool:
        """Take what the socket holds, waiting for its time-out; False when the peer has left.

        Raises:
            TimeoutError: On our calls: the server was silent.
        """
        try:
            chunk = self.socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            if isinstance(error, TimeoutError) and not self._is_server:
                raise
            chunk = b""
        if not chunk:
            self._open = False
            return False
        self._buffer += chunk
        if not self._greeted and not self._greet():
            return self._open
        try:
            self._take_frames()
        except frames.FrameError as error:
            _log.warning("An HTTP/2 connection is cut off: the peer sent %s", error)
            last = struct.pack(">II", self._last_stream, error.code)
            self._send(frame(frames.GOAWAY, 0, 0, last))
            self._open = False
        return self._open

    def _take_frames(self) -> None:
        position, end = 0, len(self._buffer)
        while end - position >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self._buffer, position)
            stop = position + 9 + (high << 16 | low)
            if stop > end:
                break
            with memoryview(self._buffer) as view:
                payload = bytes(view[position + 9 : stop])
            stream &= frames.LARGEST_WINDOW  # the first bit is reserved
            frames.check(kind, flags, stream, len(payload))
            self._handle(kind, flags, stream, payload)
            position = stop
        del self._buffer[:position]

    def _greet(self) -> bool:
        """Check the client's first bytes; a client that speaks something else is cut off."""
        if self._buffer[: len(PREFACE)] != PREFACE[: len(self._buffer)]:
            self._open = False
            return False
        if len(self._buffer) < len(PREFACE):
            return False
        del self._buffer[: len(PREFACE)]
        self._greeted = True
        return True

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind == HEADERS:
            self._headers(flags, stream)
        elif kind == frames.RST_STREAM:
            self._cancelled(stream)
        elif kind == frames.WINDOW_UPDATE:
            self._credit(stream, payload)
        elif kind == frames.SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == frames.PING and not flags & ACK:
            self._send(frame(frames.PING, ACK, 0, payload))
        elif kind == frames.GOAWAY and not self._is_server and not self._parts:
            self._open = False

    def _headers(self, flags: int, stream: int) -> None:
        """The beginning of a stream, or its trailers."""
        parts = self._parts.get(stream)
        if parts is None:
            if not self._is_server or stream <= self._last_stream:
                return
            if stream % 2 == 0:
                raise frames.FrameError(frames.PROTOCOL_ERROR, f"a call on stream {stream}")
            self._last_stream = stream
            parts = self._parts[stream] = []
        if flags & END_STREAM:
            self._complete(stream, parts)

    def _cancelled(self, stream: int) -> None:
        """The peer gave a stream up: it takes no answer any more, or gives none."""
        if self._parts.pop(stream, None) is not None and not self._is_server:
            self._open = False
        if stream in self._unanswered:
            self._unanswered.remove(stream)
            self.messages = deque(one for one in self.messages if one[0] != stream)
        self._stream_credit.pop(stream, None)

    def _credit(self, stream: int, payload: bytes) -> None:
        if stream == 0:
            self._window += frames.increment(payload, self._window)
        elif stream in self._parts or stream in self._unanswered:
            # What a window holds besides is only known while we send, so its sum is not checked.
            credit = self._stream_credit.get(stream, 0)
            self._stream_credit[stream] = credit + frames.increment(payload, 0)

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        self._consumed += len(payload)
        if self._consumed >= _RENEW_BYTES:
            renewal = struct.pack(">I", self._consumed)
            self._send(frame(frames.WINDOW_UPDATE, 0, 0, renewal))
            self._consumed = 0
        parts = self._parts.get(stream)
        if parts is None:
            return
        payload = frames.without_padding(flags, payload)
        parts.append(payload)
        if flags & END_STREAM:
            self._complete(stream, parts)

    def _complete(self, stream: int, parts: list[bytes]) -> None:
        """The peer has said all on this stream: one message, or on our calls also a failure."""
        del self._parts[stream]
        body = b"".join(parts)
        if len(body) >= 5 and body[0] == 0 and len(body) - 5 == int.from_bytes(body[1:5], "big"):
            self.messages.append((stream, body[5:]))
            self.n_messages += 1
            if self._is_server:
                self._unanswered.add(stream)
                return
        elif self._is_server:
            self._send(frame(HEADERS, END_HEADERS | END_STREAM, stream, _REFUSAL))
        else:
            self._open = False
        self._stream_credit.pop(stream, None)

    def _settings(self, payload: bytes) -> None:
        for name, value in frames.settings(payload):
            if name == frames.INITIAL_WINDOW:
                self._stream_window = value
            elif name == frames.MAX_FRAME:
                self._frame_limit = value
        self._send(frame(frames.SETTINGS, ACK, 0))

    def _send(self, data: bytes | bytearray) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self._open = False

    def respond(self, stream: int, message: bytes) -> None:
        """Answer the call that came on `stream`; one that was cancelled takes no answer.

        Raises:
            UnityCommunicationException: The peer takes no data any more.
        """
        if stream not in self._unanswered:
            return
        head = frame(HEADERS, END_HEADERS, stream, _RESPONSE)
        tail = frame(HEADERS, END_HEADERS | END_STREAM, stream, _SUCCESS)
        self._transmit(stream, head, message, 0, tail)
        self._unanswered.discard(stream)

    def request(self, stream: int, headers: bytes, message: bytes) -> None:
        """Make a call; streams of a client are odd and grow."""
        self._parts[stream] = []
        head = frame(HEADERS, END_HEADERS, stream, headers)
        self._transmit(stream, head, message, END_STREAM, b"")

    def _transmit(self, stream: int, head: bytes, message: bytes, last: int, tail: bytes) -> None:
        """Send a message between `head` and `tail`, as fast as the peer's windows allow.

        Raises:
            UnityCommunicationException: The peer takes no data any more.
        """
        body = memoryview(b"\0" + struct.pack(">I", len(message)) + message)
        out = bytearray(head)
        sent = position = 0
        deadline = time.monotonic() + (_SEND_LIMIT_S if self._is_server else math.inf)
        while position < len(body):
            credit = self._stream_window + self._stream_credit.get(stream, 0) - sent
            size = min(len(body) - position, self._window, credit, self._frame_limit)
            if size > 0:
                ends = position + size == len(body)
                out += frames.head(DATA, last if ends else 0, stream, size)
                out += body[position : position + size]
                position += size
                sent += size
                self._window -= size
                continue
            self._send(out)
            out.clear()
            if not self._open or time.monotonic() > deadline or not self.read():
                raise UnityCommunicationException(
                    f"the environment took only {position} of a message's {len(body)} bytes"
                )
            if self._is_server and stream not in self._unanswered:
                return
        self._stream_credit.pop(stream, None)
        out += tail
        self._send(out)

    def farewell(self, wait_s: float) -> None:
        """Announce the end, let the peer finish reading for up to `wait_s`, and close."""
        with contextlib.suppress(OSError):
            if self._open:
                last = struct.pack(">II", frames.LARGEST_WINDOW, frames.NO_ERROR)
                self._send(frame(frames.GOAWAY, 0, 0, last))
                self.socket.shutdown(socket.SHUT_WR)
                deadline = time.monotonic() + wait_s
                while (left := deadline - time.monotonic()) > 0:
                    self.socket.settimeout(left)
                    if not self.socket.recv(_RECEIVE_BYTES):
                        break
        self.socket.close()


class Channel:
    """The calling end, for environments: one unary method of one server."""

    def __init__(self, port: int, method: str, *, timeout_s: float = 30.0) -> None:
        """Connect to `localhost`.

        Raises:
            OSError: No one listens there.
        """
        sock = socket.create_connection(("localhost", port), timeout=timeout_s)
        if sock.getsockname() == sock.getpeername():
            # The system chose the very port that we looked for: we called ourselves.
            sock.close()
            raise ConnectionRefusedError(f"no one listens on localhost:{port}")
        try:
            self._connection = Connection(sock, is_server=False)
        except OSError:
            sock.close()
            raise
        sock.settimeout(None)
        self._stream = -1
        self._headers = (
            b"\x83\x86"
            + _literal(b"\x04", method.encode())
            + _literal(b"\x01", f"localhost:{port}".encode())
            + _CONTENT_TYPE
            + _literal(b"\x00\x02te", b"trailers")
        )

    def call(self, message: bytes, timeout_s: float | None = None) -> bytes:
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
        while not connection.messages:
            if not connection.read() and not connection.messages:
                raise ConnectionError("the trainer closed the connection")
        return connection.messages.popleft()[1]

    def close(self) -> None:
        """End the connection."""
        self._connection.farewell(0.0)
