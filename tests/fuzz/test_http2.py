"""HTTP/2 connections of this project, compared frame by frame with a strict implementation, h2.

Legal frames must give the same messages in both. With illegal frames, both must refuse the same
frame first, except for our limits and for the frames that docs/reference/protocol.md tolerates.
"""

import contextlib
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from fuzzing.frame import fuzz
from http2_peer import FIELDS, RawClient, call, cut, message, prefixed, served, settings
from hypothesis import strategies as st

from pipeline.wire.transport import frames
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import (
    END_STREAM,
    MAX_BLOCK_BYTES,
    PADDED,
    RESPONSE,
    RST_STREAM,
    SUCCESS,
    WINDOW_UPDATE,
    request_block,
)
from pipeline.wire.transport.http2 import PREFACE, OutgoingConnection
from pipeline.wire.transport.server import IncomingConnection, Server

from .http2_frames import NOISE, PIECES, conversations, data_frames, header_frames, spoiled

_SETTINGS = h2.settings.SettingCodes
_TOLERATED = re.compile(
    r"may not depend on itself|does not have an :authority|Setting 8 has|CONNECT"
    r"|Host and :authority|content-length|Content-Length|InvalidBodyLength|:protocol"
    r"|ConnectionState.CLOSED"
)
"""h2's errors for frames that we tolerate, and after GOAWAY (docs/reference/protocol.md)."""
_OURS = re.compile(
    r"larger than|bytes in one call|bytes of headers|frame of \d+ bytes|calls than|SETTINGS is due"
    r"|RST_STREAM frame on stream \d+, which was never opened|PUSH_PROMISE"
)
"""Our errors for frames beyond our limits, and for three faults that h2 does not always check."""


class Wire:
    """A replacement of a socket: stores sent bytes, and receives the chunks in `waiting`."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.waiting: deque[bytes] = deque()
        self.refill: Callable[[], object] = lambda: None

    def setsockopt(self, *_: object) -> None:
        """Ignore options of sockets."""

    setblocking = settimeout = shutdown = close = setsockopt

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)

    sendall = send

    def take(self) -> bytes:
        out = bytes(self.sent)
        self.sent.clear()
        return out

    def recv(self, size: int) -> bytes:
        if not self.waiting:
            self.refill()
        if not self.waiting:
            raise BlockingIOError
        chunk = self.waiting.popleft()
        if len(chunk) > size:
            self.waiting.appendleft(chunk[size:])
        return chunk[:size]

    def recv_into(self, place: memoryview) -> int:
        chunk = self.recv(len(place))
        place[: len(chunk)] = chunk
        return len(chunk)


def strict(*, client: bool, window: int = 2**31 - 1) -> h2.connection.H2Connection:
    """Return a connection of h2 with the limits that our connections announce."""
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=client))
    values = {_SETTINGS.INITIAL_WINDOW_SIZE: window, _SETTINGS.MAX_FRAME_SIZE: frames.LARGEST_FRAME}
    values[_SETTINGS.MAX_HEADER_LIST_SIZE] = MAX_BLOCK_BYTES
    peer.local_settings = h2.settings.Settings(client=client, initial_values=values)
    peer.max_inbound_frame_size = frames.LARGEST_FRAME
    peer.decoder.max_header_list_size = MAX_BLOCK_BYTES
    peer.initiate_connection()
    if window > 65535:
        peer.increment_flow_control_window(2**31 - 1 - 65535)
    return peer


class Beside:
    """Our server's connection and h2's; both get the same frames.

    Attributes:
        refused: whether our connection, and whether h2, has refused a frame.
        why: error of our connection, and of h2.
        messages: messages from our connection, and from h2, as (stream, bytes).
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.ours = IncomingConnection(self.wire, METHOD)  # type: ignore[arg-type]
        self.theirs = strict(client=False)
        self.refused = [False, False]
        self.why = ["", ""]
        self.messages: tuple[list[Any], list[Any]] = ([], [])
        self._calls: dict[int, tuple[bool, bytearray]] = {}
        self.give(PREFACE, [len(PREFACE)])

    def give(self, data: bytes, sizes: list[int]) -> None:
        """Give data to our connection in pieces of `sizes`, and to h2 in one piece."""
        self._give_ours(data, sizes)
        self._give_theirs(data)

    def _give_ours(self, data: bytes, sizes: list[int]) -> None:
        position = 0
        while position < len(data) and self.ours.is_open:
            size = sizes[position % len(sizes)]
            self.wire.waiting.append(data[position : position + size])
            position += size
            while self.wire.waiting and self.ours.read():
                pass
        for stream, body in list(self.ours.messages):
            self.messages[0].append((stream, body))
            self.ours.refuse(stream, 9, "no greeting")
        self.ours.messages.clear()
        refusals = [frame for frame in cut(self.wire.take()) if frame.kind == RST_STREAM]
        self.refused[0] = not self.ours.is_open or bool(refusals)
        self.why[0] = self.ours.failure or ("more calls than are allowed" if refusals else "")

    def _give_theirs(self, data: bytes) -> None:
        try:
            events = self.theirs.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self.refused[1], self.why[1] = True, f"{type(error).__name__}: {error}"
            return
        for event in events:
            self._follow(event)
        codes = [frame for frame in cut(self.theirs.data_to_send()) if frame.kind == RST_STREAM]
        self.refused[1] = bool(codes)
        self.why[1] = f"RST_STREAM {[frame.payload for frame in codes]} after {events}"

    def _follow(self, event: Any) -> None:
        if isinstance(event, h2.events.RequestReceived):
            fields = dict(event.headers)
            is_known = (
                fields.get(b":path") == METHOD.encode()
                and fields[b":method"] == b"POST"
                and fields.get(b"content-type", b"").startswith(b"application/grpc")
            )
            self._calls[event.stream_id] = (is_known, bytearray())
        elif isinstance(event, h2.events.DataReceived):
            self._calls[event.stream_id][1].extend(event.data)
        elif isinstance(event, h2.events.StreamEnded):
            is_call, body = self._calls.pop(event.stream_id)
            is_complete = len(body) >= 5 and body[0] == 0
            if is_call and is_complete and int.from_bytes(body[1:5], "big") == len(body) - 5:
                self.messages[1].append((event.stream_id, bytes(body[5:])))
            answer = [(":status", "200"), ("grpc-status", "9")]
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.theirs.send_headers(event.stream_id, answer, end_stream=True)


@fuzz(st.tuples(conversations(), PIECES), examples=100)
def test_legal_frames_give_the_same_messages_as_h2(example: Any, folder: Path) -> None:
    sent, sizes = example
    connections = Beside()
    for frame in sent:
        connections.give(frame, sizes)
        assert connections.refused == [False, False], (frame, connections.why)
    assert connections.messages[0] == connections.messages[1]


@st.composite
def _broken(draw: Any) -> list[bytes]:
    return draw(spoiled(draw(conversations())))


def _is_legal(frame: bytes) -> bool:
    """Return whether h2 wrongly refuses a frame: padding only, or a window's reserved bit."""
    if frame[3] == WINDOW_UPDATE:
        return len(frame) == 13 and frame[9] > 127
    return bool(frame[4] & PADDED) and len(frame) > 9 and frame[9] == len(frame) - 10


@fuzz(st.tuples(_broken(), PIECES), examples=150)
def test_illegal_frames_are_refused_where_h2_refuses_them(example: Any, folder: Path) -> bool:
    sent, sizes = example
    connections = Beside()
    for frame in sent:
        connections.give(frame, sizes)
        if any(connections.refused):
            break
    ours, theirs = connections.refused
    if ours and not theirs:
        assert _OURS.search(connections.why[0]), connections.why
    if theirs and not ours:
        assert _is_legal(frame) or _TOLERATED.search(connections.why[1]), (frame, connections.why)
    if not any(connections.refused):
        assert connections.messages[0] == connections.messages[1]
    return not ours


_TALKS = st.fixed_dictionaries(
    {
        "calls": st.lists(
            st.tuples(
                st.sampled_from((0, 1, 1000, 20_000, 70_000)),
                st.sampled_from((0, 1, 16_379, 70_000, 200_000)),
                st.sampled_from((None, None, 0, 1000, 1 << 17)),
            ),
            min_size=1,
            max_size=5,
        ),
        "window": st.sampled_from((200, 65_535, 1 << 20, 2**31 - 1)),
        "sizes": PIECES,
    }
)
"""Sizes of calls, of answers and of h2's windows, and of the pieces of h2's bytes."""


class Talk:
    """A conversation of one of our connections with h2."""

    def __init__(self, ours: Callable[[Any], Any], example: dict[str, Any]) -> None:
        self.wire = Wire()
        self.ours = ours(self.wire)
        self.peer = strict(client=ours is not OutgoingConnection, window=example["window"])
        self.bodies: dict[int, bytearray] = {}
        self.ended: dict[int, list[Any]] = {}
        self._sizes = example["sizes"]
        self._open: set[int] = set()

    def carry(self) -> bool:
        """Pass each end's bytes to the other end; return whether there were any."""
        got = self.wire.take()
        for event in self.peer.receive_data(got):
            self._follow(event)
        sent, position = self.peer.data_to_send(), 0
        while position < len(sent):
            size = max(self._sizes[position % len(self._sizes)], len(sent) // 100)
            self.wire.waiting.append(sent[position : position + size])
            position += size
        return bool(got or sent)

    def make_way(self, _deadline: float = 0.0) -> bool:
        """Pass bytes; if there are none, enlarge h2's windows so that our end can send."""
        if not self.carry():
            if self.peer.inbound_flow_control_window < 5000:
                self.peer.increment_flow_control_window(5000)
            for stream in self._open:
                if self.peer.remote_flow_control_window(stream) < 5000:
                    self.peer.increment_flow_control_window(5000, stream_id=stream)
            assert self.carry(), "nothing moves any more"
        self.read()
        return bool(self.ours.is_open)

    def read(self) -> None:
        while self.wire.waiting:
            self.ours.read()

    def _follow(self, event: Any) -> None:
        stream = getattr(event, "stream_id", None)
        if isinstance(event, h2.events.RequestReceived | h2.events.ResponseReceived):
            self._open.add(stream)
            self.bodies[stream] = bytearray()
        elif isinstance(event, h2.events.DataReceived):
            self.bodies[stream] += event.data
            self.peer.acknowledge_received_data(event.flow_controlled_length, stream)
        elif isinstance(event, h2.events.TrailersReceived):
            self.ended[stream] = event.headers
        elif isinstance(event, h2.events.StreamEnded):
            self._open.discard(stream)
            self.ended.setdefault(stream, [])

    def say(self, stream: int, data: bytes, *, end: bool) -> None:
        """Send a message from h2; our windows are large enough."""
        data = prefixed(data)
        while data:
            size = min(len(data), self.peer.max_outbound_frame_size)
            size = min(size, self.peer.local_flow_control_window(stream))
            self.peer.send_data(stream, data[:size], end_stream=end and size == len(data))
            data = data[size:]

    def change_window(self, window: int | None) -> None:
        while self.carry():  # h2 takes any acknowledgement as one of its latest settings
            self.read()
        if window is not None:
            self.peer.update_settings({_SETTINGS.INITIAL_WINDOW_SIZE: window})


def _amount(example: dict[str, Any]) -> int:
    return sum(call + answer for call, answer, _ in example["calls"])


@fuzz(_TALKS, examples=40, size=_amount)
def test_our_server_sends_every_answer_to_an_h2_client_within_the_flow_control_windows(
    example: dict[str, Any], folder: Path
) -> None:
    talk = Talk(lambda wire: IncomingConnection(wire, METHOD), example)
    talk.ours._wait_writable = talk.make_way
    talk.make_way()
    for number, (size, answer, window) in enumerate(example["calls"]):
        stream = 2 * number + 1
        talk.peer.send_headers(stream, FIELDS)
        talk.say(stream, bytes(size), end=True)
        while not talk.ours.messages:
            talk.make_way()
        assert talk.ours.messages.popleft() == (stream, bytes(size))
        talk.change_window(window)
        talk.ours.respond(stream, bytes(answer), 5.0)
        talk.carry()
        assert bytes(talk.bodies[stream]) == prefixed(bytes(answer))
        assert (b"grpc-status", b"0") in talk.ended[stream]


@fuzz(_TALKS, examples=40, size=_amount)
def test_our_client_sends_every_call_to_an_h2_server_within_the_flow_control_windows(
    example: dict[str, Any], folder: Path
) -> None:
    talk = Talk(OutgoingConnection, example)
    talk.ours._wait_writable = talk.make_way
    talk.make_way()
    for number, (size, answer, window) in enumerate(example["calls"]):
        stream = 2 * number + 1
        talk.change_window(window)
        talk.ours.request(stream, request_block(METHOD, "localhost"), bytes(size))
        while stream not in talk.ended:
            talk.make_way()
        assert bytes(talk.bodies[stream]) == prefixed(bytes(size))
        talk.peer.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
        talk.say(stream, bytes(answer), end=False)
        talk.peer.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        while not talk.ours.messages:
            talk.make_way()
        assert talk.ours.messages.popleft() == (stream, bytes(answer))


@st.composite
def _broken_answers(draw: Any) -> list[bytes]:
    sent = [settings(), *draw(header_frames(1, RESPONSE, 0))]
    sent += draw(data_frames(1, prefixed(b"answer")))
    sent += draw(header_frames(1, SUCCESS, END_STREAM))
    for _ in range(draw(st.integers(0, 2))):
        sent.insert(draw(st.integers(0, len(sent))), draw(NOISE))
    return draw(spoiled(sent, least=0))


@fuzz(_broken_answers())
def test_illegal_answer_ends_the_connection_or_gives_a_message(
    example: list[bytes], folder: Path
) -> bool:
    wire = Wire()
    ours = OutgoingConnection(wire)  # type: ignore[arg-type]
    ours.request(1, request_block(METHOD, "localhost"), b"call")
    wire.waiting.extend([*example, b""])  # no bytes: the server has disconnected
    while not ours.messages and ours.read():
        pass
    assert ours.messages or not ours.is_open
    return bool(ours.messages)


@fuzz(st.tuples(_broken(), _broken()), examples=25)
def test_connection_of_an_environment_works_while_other_connections_send_illegal_frames(
    example: tuple[list[bytes], list[bytes]], folder: Path
) -> None:
    """One broken connection opens before the environment's, and others during its conversation."""
    with Server() as server:
        clients = [RawClient(server.port, first=PREFACE + b"".join(example[0]))]
        environment = RawClient(server.port)
        for number in range(3):
            environment.send(call(2 * number + 1, message(number)))
            served(server, environment, 2 * number + 1, number)
            clients.append(RawClient(server.port, first=PREFACE + b"".join(example[1])))
        for client in [*clients, environment]:
            client.close()
