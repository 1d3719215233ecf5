"""HTTP/2 connections that carry gRPC's unary calls: their base class, and the calling end.

A step is one call, so its latency bounds the speed of small environments. The general gRPC runtime
passes every call through several threads; here the thread that waits for a message reads the
socket.

A peer that breaks the rules gets GOAWAY, even where RFC 9113 would end only a stream.

Sources: RFC 9113 (HTTP/2) and the gRPC-over-HTTP/2 specification.
"""

import contextlib
import math
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import UnityCommunicationException
from pipeline.wire.codec.records import Received
from pipeline.wire.transport import frames
from pipeline.wire.transport.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    LARGEST_WINDOW,
    FrameError,
    frame,
)
from pipeline.wire.transport.spin_wait import SpinWait

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_CALL_BYTES = LARGEST_WINDOW
"""Largest call in bytes: neither a protobuf message nor a stream's window can be larger."""
MAX_READ_BYTES = 1 << 18
# A part of a message that is larger than this is received directly into the memory of the message,
# and sent directly from there.
_LARGE_BYTES = 1 << 16
_PADDED_OR_WITH_PRIORITY = frames.PADDED | frames.WITH_PRIORITY
# gRPC's prefix of a message: 0 for "not compressed", and the length.
_PREFIX = struct.Struct(">BI")
# The window is renewed long before its 2 GB are used up, so that no peer waits for the renewal.
_RENEW_BYTES = 1 << 24
_WINDOW_UPDATE = frame(
    frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - frames.DEFAULT_WINDOW)
)


def first_frames(setting: int, value: int) -> bytes:
    """Return the frames that open a connection: SETTINGS with `setting`, then WINDOW_UPDATE."""
    pairs = [setting, value, frames.INITIAL_WINDOW, LARGEST_WINDOW]
    pairs += [frames.MAX_FRAME, frames.LARGEST_FRAME, frames.MAX_HEADERS, frames.MAX_BLOCK_BYTES]
    return frame(frames.SETTINGS, 0, 0, struct.pack(">HIHIHIHI", *pairs)) + _WINDOW_UPDATE


def goaway(last_stream: int, code: int, why: str = "") -> bytes:
    """Return a GOAWAY frame, which announces the end of a connection (RFC 9113, section 6.8)."""
    return frame(frames.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + why.encode())


@dataclass(slots=True)
class Stream:
    """A call in progress: the received bytes of a peer's call, or of an answer to our call."""

    is_known: bool = True
    """Whether the call is for the served method; the data of all other calls are dropped."""
    parts: list[Received] = field(default_factory=list)
    """Received parts of the body; empty if `body` is used."""
    body: memoryview | None = None
    """Memory for the body of a large message."""
    n_filled: int = 0
    """Number of received bytes in `body`."""
    size: int = 0
    """Number of bytes in the received DATA frames, padding included."""
    has_ended: bool = False
    """Whether the peer has sent the whole call or answer."""
    credit: int = 0
    """Number of bytes by which the peer's window of this stream exceeds the initial window."""

    def place(self, n_bytes: int, begin: memoryview, limit: int) -> memoryview | None:
        """Return the memory in `body` for the next `n_bytes`, which start with `begin`.

        None if the bytes do not belong to one message of at most `limit` bytes.
        """
        if self.body is None and not self.parts and len(begin) >= 5:
            size = 5 + int.from_bytes(begin[1:5], "big")
            # The memory is NumPy's, because a bytearray would be filled with zeros first.
            self.body = memoryview(np.empty(size, np.uint8).data) if size <= limit else None
        if self.body is None or self.n_filled + n_bytes > len(self.body):
            return None
        return self.body[self.n_filled : self.n_filled + n_bytes]

    def append(self, payload: Received) -> None:
        """Append received bytes; those of a memoryview, which `place` returned, are in `body`."""
        if self.body is None:
            self.parts.append(payload)
            return
        start, self.n_filled = self.n_filled, self.n_filled + len(payload)
        if isinstance(payload, bytes) and self.n_filled <= len(self.body):
            self.body[start : self.n_filled] = payload

    def message(self) -> Received | None:
        """Return the message in the body; None unless the body is one uncompressed message."""
        if self.body is not None:
            is_whole = self.n_filled == len(self.body) and self.body[0] == 0
            return self.body[5:] if is_whole else None
        body = b"".join(self.parts)
        return body[5:] if body[:5] == _PREFIX.pack(0, max(len(body) - 5, 0)) else None


class Connection(ABC):
    """One HTTP/2 connection, driven by the thread that calls its methods.

    Attributes:
        socket: the connected socket; belongs to this object.
        messages: complete gRPC messages that arrived, as (stream, message), oldest first.
        is_open: whether more messages may arrive.
        is_greeted: whether the client's preface has arrived; True at the calling end.
        failure: text that says how the peer broke the rules; empty if it broke none.
    """

    _call_limit = MAX_CALL_BYTES
    _read_bytes = MAX_READ_BYTES

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.messages: deque[tuple[int, Received]] = deque()
        self.is_open = True
        # Only clients send a preface; a server's connection sets this to False until the preface
        # arrives.
        self.is_greeted = True
        self.failure = ""
        self._buffer = bytearray()
        # Flags, stream and payload of a large DATA frame that has not arrived completely.
        self._large: tuple[int, int, memoryview] | None = None
        self._unfilled = memoryview(b"")  # the part of the large payload that has not arrived
        # The first frame of each end must be SETTINGS (RFC 9113, section 3.4).
        self._expected: int | None = frames.SETTINGS
        self._block = (0, 0, bytearray())
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._frame_limit = frames.DEFAULT_FRAME
        self._consumed = 0
        # Calls are small and the peer waits for them: Nagle's algorithm (RFC 896) would delay them.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> bool:
        """Handle bytes that have arrived, and return whether the connection is open.

        May raise TimeoutError.
        """
        try:
            # Nearly all reads are small, and a function for them would take time.
            if self._large is None:
                chunk = self.socket.recv(self._read_bytes)
                self._buffer += chunk
                n_read = len(chunk)
            else:
                n_read = self.socket.recv_into(self._unfilled)
                self._unfilled = self._unfilled[n_read:]
        except BlockingIOError:
            return self.is_open
        except TimeoutError:
            raise
        except OSError:
            n_read = 0
        if not n_read:
            self.is_open = False
            return False
        if not self.is_greeted and not self._check_preface():
            return self.is_open
        try:
            self._take_frames()
        except FrameError as error:
            self.failure = str(error)
            # For some of these errors the RFC ends only the stream. Here the connection ends,
            # because a simulator never sends such frames.
            self._send(goaway(self._last_stream, error.code, self.failure))
            self.is_open = False
        return self.is_open

    def _take_frames(self) -> None:
        if self._large is not None:
            # Other frames cannot arrive before this payload is complete.
            if self._unfilled:
                return
            large, self._large = self._large, None
            self._data(*large)
        position, end = 0, len(self._buffer)
        # `view` is a memoryview, because a slice of the bytearray would be a second copy.
        with memoryview(self._buffer) as view:
            while end - position >= 9:
                length_and_kind, flags, stream = HEAD.unpack_from(view, position)
                length, kind = length_and_kind >> 8, length_and_kind & 0xFF
                stop = position + 9 + length
                stream &= LARGEST_WINDOW  # the first bit is reserved
                if kind != DATA or stream == 0:  # DATA frames of a stream need no check
                    frames.check(kind, flags, stream, length)
                if self._expected is not None:
                    self._check_expected(kind, flags, stream)
                if stop > end:
                    # The length is checked before the rest of the frame is collected in memory.
                    if length > self._call_limit:
                        reason = f"a frame of {length} bytes, too large"
                        raise FrameError(frames.ENHANCE_YOUR_CALM, reason)
                    is_large = kind == DATA and stop - end > _LARGE_BYTES
                    if is_large and self._start_large(flags, stream, length, view[position + 9 :]):
                        position = end
                    break
                payload = bytes(view[position + 9 : stop])
                if kind == DATA:
                    self._data(flags, stream, payload)
                else:
                    self._handle(kind, flags, stream, payload)
                position = stop
        del self._buffer[:position]

    def _start_large(self, flags: int, stream: int, length: int, begin: memoryview) -> bool:
        """Return whether the rest of a large DATA frame is received into its stream's memory."""
        call = self._streams.get(stream)
        if call is None or not call.is_known or call.has_ended or flags & frames.PADDED:
            return False
        payload = call.place(length, begin, self._call_limit)
        if payload is None:
            return False
        payload[: len(begin)] = begin
        self._large, self._unfilled = (flags, stream, payload), payload[len(begin) :]
        return True

    def _check_expected(self, kind: int, flags: int, stream: int) -> None:
        """Raise FrameError for frames before SETTINGS or between parts of a header block."""
        is_first = self._expected == frames.SETTINGS
        is_other = bool(flags & ACK) if is_first else stream != self._block[0]
        if kind != self._expected or is_other:
            reason = f"a {frames.name(kind)} frame where {frames.name(self._expected or 0)} is due"
            raise FrameError(frames.PROTOCOL_ERROR, reason)

    def _check_preface(self) -> bool:
        """Return whether the client's preface has arrived; other bytes end the connection."""
        if self._buffer[: len(PREFACE)] != PREFACE[: len(self._buffer)]:
            self.failure = "something else than HTTP/2"
            self.is_open = False
            return False
        if len(self._buffer) < len(PREFACE):
            return False
        del self._buffer[: len(PREFACE)]
        self.is_greeted = True
        return True

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            self._headers(flags, stream, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, stream, payload)
        elif kind == frames.RST_STREAM:
            self._check_opened(kind, stream)
            self._on_reset(stream)
        elif kind == frames.WINDOW_UPDATE:
            self._credit(stream, payload)
        elif kind == frames.SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == frames.PING and not flags & ACK:
            self._notify(frame(frames.PING, ACK, 0, payload))
        elif kind == frames.GOAWAY:
            self._on_goaway()

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & _PADDED_OR_WITH_PRIORITY:
            payload = frames.without_padding(HEADERS, flags, payload)
        if flags & END_HEADERS:
            self._take_block(flags, stream, payload)
        else:
            # Nothing may come between the frames of a header block (RFC 9113, section 4.3).
            self._expected = frames.CONTINUATION
            self._block = (stream, flags, bytearray(payload))

    def _continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._expected is None:
            raise FrameError(frames.PROTOCOL_ERROR, "a CONTINUATION frame without HEADERS")
        block = self._block[2]
        block += payload
        if len(block) > frames.MAX_BLOCK_BYTES:
            raise FrameError(frames.ENHANCE_YOUR_CALM, f"{len(block)} bytes of headers, too many")
        if flags & END_HEADERS:
            self._expected = None
            self._take_block(self._block[1], stream, bytes(block))

    def _take_block(self, flags: int, stream: int, block: bytes) -> None:
        """Handle a complete header block: it opens a stream, or is a stream's trailers."""
        call = self._streams.get(stream)
        if call is None:
            call = self._on_new_stream(flags, stream, block)
        elif call.has_ended:
            raise FrameError(frames.STREAM_CLOSED, f"HEADERS after the end of stream {stream}")
        else:
            self._on_further_headers(flags, call, block)
        if call is not None and flags & END_STREAM:
            self._on_stream_end(stream, call)

    def _data(self, flags: int, stream: int, payload: Received) -> None:
        size = len(payload)
        # Bytes are counted with padding, as flow control does (RFC 9113, section 6.9.1).
        self._consumed += size
        if self._consumed >= _RENEW_BYTES:
            renewal = struct.pack(">I", self._consumed)
            self._notify(frame(frames.WINDOW_UPDATE, 0, 0, renewal))
            self._consumed = 0
        if flags & frames.PADDED:
            payload = frames.without_padding(DATA, flags, bytes(payload))
        call = self._streams.get(stream)
        if call is None or call.has_ended:
            self._on_closed_stream(DATA, flags, stream)
            return
        call.size += size
        # The size is checked here, because our windows are as large as possible, so that flow
        # control does not limit a call.
        if call.size > self._call_limit:
            reason = f"more than {self._call_limit} bytes in one call"
            raise FrameError(frames.ENHANCE_YOUR_CALM, reason)
        if payload and call.is_known:
            call.append(payload)
        if flags & END_STREAM:
            self._on_stream_end(stream, call)

    def _credit(self, stream: int, payload: bytes) -> None:
        if stream == 0:
            self._window += frames.increment(payload, self._window)
            return
        self._check_opened(frames.WINDOW_UPDATE, stream)
        call = self._streams.get(stream)
        # If `call` is None, the stream has ended: the frame was sent before our answer arrived.
        if call is None:
            frames.increment(payload, 0)
        else:
            call.credit += frames.increment(payload, self._stream_window + call.credit)

    def _settings(self, payload: bytes) -> None:
        self._expected = None
        for key, value in frames.settings(payload):
            if key == frames.INITIAL_WINDOW:
                # The setting also changes the windows of open streams (RFC 9113, section 6.9.2).
                largest = max((call.credit for call in self._streams.values()), default=0)
                if value + largest > LARGEST_WINDOW:
                    reason = f"an initial window of {value} bytes, too large for an open stream"
                    raise FrameError(frames.FLOW_CONTROL_ERROR, reason)
                self._stream_window = value
            elif key == frames.MAX_FRAME:
                self._frame_limit = value
        self._notify(frame(frames.SETTINGS, ACK, 0))

    def _check_opened(self, kind: int, stream: int) -> None:
        # Even numbers are for streams of servers (RFC 9113, section 5.1.1); our server opens none.
        if stream > self._last_stream or stream % 2 == 0:
            reason = f"a {frames.name(kind)} frame on stream {stream}, which was never opened"
            raise FrameError(frames.PROTOCOL_ERROR, reason)

    def _on_closed_stream(self, kind: int, flags: int, stream: int) -> None:
        """Refuse a frame that belongs to no open stream; subclasses may ignore some streams."""
        del flags
        self._check_opened(kind, stream)
        reason = f"a {frames.name(kind)} frame after the end of stream {stream}"
        raise FrameError(frames.STREAM_CLOSED, reason)

    @abstractmethod
    def _on_new_stream(self, flags: int, stream: int, block: bytes) -> Stream | None:
        """Return the stream that a HEADERS frame of the peer opens; None if no stream is opened."""

    @abstractmethod
    def _on_further_headers(self, flags: int, call: Stream, block: bytes) -> None:
        """Handle a header block on an open stream."""

    @abstractmethod
    def _on_stream_end(self, stream: int, call: Stream) -> None:
        """Handle the received message of a stream that the peer has ended."""

    @abstractmethod
    def _on_reset(self, stream: int) -> None:
        """Forget a stream that the peer has reset."""

    def _on_goaway(self) -> None:  # noqa: B027  # a server has nothing to do
        """Handle GOAWAY: the peer makes no more calls, or accepts no more calls."""

    @abstractmethod
    def _send(self, data: Received | bytearray) -> None:
        """Send bytes; if the socket fails, `is_open` becomes False."""

    def _notify(self, data: bytes) -> None:
        """Send a frame that answers the peer's frames."""
        self._send(data)

    @abstractmethod
    def _wait_writable(self, deadline: float) -> bool:
        """Wait until the peer has read or sent bytes; return False if it does neither in time."""

    def _transmit(
        self, stream: int, head: bytes, message: bytes, last: int, tail: bytes, deadline: float
    ) -> None:
        """Send `head`, message and `tail`; UnityCommunicationException if they are not read."""
        prefix, body = _PREFIX.pack(0, len(message)), memoryview(message)
        n_body = 5 + len(message)
        out = bytearray(head)
        position = 0
        while (call := self._streams.get(stream)) is not None:
            credit = min(self._window, self._stream_window + call.credit, self._frame_limit)
            # A window is negative after a SETTINGS frame that made it smaller (section 6.9.2).
            size = min(n_body - position, credit)
            if size > 0:
                begin, position = position, position + size
                out += frames.head(DATA, last if position == n_body else 0, stream, size)
                if size == n_body <= _LARGE_BYTES:  # the whole message fits nearly always
                    out += prefix
                    out += message
                else:
                    out += prefix[begin:position]
                    content = body[max(begin - 5, 0) : max(position - 5, 0)]
                    if len(content) <= _LARGE_BYTES:
                        out += content
                    else:
                        self._send(out)
                        self._send(content)
                        out.clear()
                call.credit -= size
                self._window -= size
            if position == n_body:
                out += tail
                self._send(out)
                return
            # If no window is left, the collected frames are sent before the wait for WINDOW_UPDATE.
            if size <= 0:
                self._send(out)
                out.clear()
                if not self._wait_writable(deadline):
                    raise UnityCommunicationException(
                        f"the environment took only {position} of a message's {n_body} bytes"
                    )

    def close(self, wait_s: float) -> None:
        """Send GOAWAY, wait up to `wait_s` until the peer has read everything, and close."""
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)
            if self.is_open:
                # With the largest stream number, no call in progress is cancelled (section 6.8).
                self._send(goaway(LARGEST_WINDOW, frames.NO_ERROR))
                self.socket.shutdown(socket.SHUT_WR)
                # A socket that is closed with unread bytes sends a reset, and the peer may lose the
                # last bytes that we sent (RFC 1122, section 4.2.2.13). So this end reads until the
                # peer closes the connection.
                deadline = time.monotonic() + wait_s
                while (left := deadline - time.monotonic()) > 0:
                    self.socket.settimeout(left)
                    if not self.socket.recv(MAX_READ_BYTES):
                        break
        self.socket.close()


_OPENING = PREFACE + first_frames(frames.ENABLE_PUSH, 0)


class OutgoingConnection(Connection):
    """A connection on which this process makes calls; the headers of answers are ignored."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._send(_OPENING)

    def request(self, stream: int, block: bytes, message: bytes) -> None:
        """Make a call on `stream`, an odd number larger than the number of the last call."""
        self._streams[stream] = Stream()
        self._last_stream = stream
        head = frame(HEADERS, END_HEADERS, stream, block)
        self._transmit(stream, head, message, END_STREAM, b"", math.inf)

    def _on_new_stream(self, flags: int, stream: int, block: bytes) -> Stream | None:
        del flags, block
        raise FrameError(frames.PROTOCOL_ERROR, f"HEADERS on stream {stream}, which has no call")

    def _on_further_headers(self, flags: int, call: Stream, block: bytes) -> None:
        del block
        # An answer begins with HEADERS. HEADERS after the data must be the answer's trailers, which
        # end the stream.
        if call.size and not flags & END_STREAM:
            raise FrameError(frames.PROTOCOL_ERROR, "trailers that end no stream")

    def _on_stream_end(self, stream: int, call: Stream) -> None:
        """Store an answer in `messages`; an answer without a message ends the connection."""
        del self._streams[stream]
        message = call.message()
        if message is None:
            self.is_open = False
        else:
            self.messages.append((stream, message))

    def _on_reset(self, stream: int) -> None:
        if self._streams.pop(stream, None) is not None:
            self.is_open = False

    def _on_goaway(self) -> None:
        if not self._streams:
            self.is_open = False

    def _send(self, data: Received | bytearray) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_open = False

    def _wait_writable(self, deadline: float) -> bool:
        del deadline  # the socket's time-out applies
        return self.is_open and self.read()


class Channel:
    """Calls one unary method of one server on this machine."""

    def __init__(self, port: int, method: str, *, timeout_s: float = 30.0) -> None:
        """Connect to `localhost`; raise OSError if no server listens on `port`."""
        sock = socket.create_connection(("localhost", port), timeout=timeout_s)
        if sock.getsockname() == sock.getpeername():
            # The system gave this socket the port that it connects to: it connected to itself,
            # which TCP allows (RFC 9293, section 3.5, simultaneous open).
            sock.close()
            raise ConnectionRefusedError(f"no one listens on localhost:{port}")
        try:
            self._connection = OutgoingConnection(sock)
        except OSError:
            sock.close()
            raise
        # The time-out of `create_connection` would also limit every later read.
        sock.settimeout(None)
        self._spin_wait = SpinWait()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        # Client streams are odd: the first call has the number 1 (RFC 9113, section 5.1.1).
        self._stream = -1
        self._headers = frames.request_block(method, f"localhost:{port}")

    def call(self, message: bytes, timeout_s: float | None = None) -> Received:
        """Send one message and return the answer; `timeout_s` of None waits without a limit.

        Raises:
            ConnectionError: The server closed the connection or refused the call.
            TimeoutError: The server sent nothing for `timeout_s`.
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
            # The answer may have come together with the server's GOAWAY.
            if not connection.read() and not connection.messages:
                failure = connection.failure
                event = f"sent {failure}" if failure else "closed the connection"
                raise ConnectionError(f"the trainer {event}")
        return connection.messages.popleft()[1]

    def close(self) -> None:
        """Close the connection."""
        self._selector.close()
        self._connection.close(0.0)
