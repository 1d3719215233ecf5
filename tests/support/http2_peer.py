"""An HTTP/2 client that sends given bytes: legal and illegal frames of an environment."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpack import Encoder

from pipeline.wire.codec.generated.messages import UnityMessageProto
from pipeline.wire.transport import frames
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, frame
from pipeline.wire.transport.http2 import PREFACE

if TYPE_CHECKING:
    from servers import AnyServer

FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", METHOD),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


def block(*fields: tuple[str, str]) -> bytes:
    """Return a header block with Huffman codes that adds every field to the dynamic table."""
    return Encoder().encode(fields or FIELDS, huffman=True)


BLOCK = block()
TRAILERS = block(("checksum", "none"), ("x", "y" * 20))


def no_check() -> None:
    """Do nothing: there is no process to check."""


def message(size: int = 0, status: int = 200) -> bytes:
    """Return a greeting with `size` bytes, which is valid as the first and as any later message."""
    out = UnityMessageProto(header={"status": status})
    out.unity_output.rl_initialization_output.name = "AcademySingleton"
    out.unity_output.rl_output.side_channel = bytes(size)
    return out.SerializeToString()


def prefixed(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


def settings(**values: int) -> bytes:
    names = {"table": 1, "push": 2, "streams": 3, "window": 4, "frame": 5, "unknown": 0xF0F0}
    return frame(4, 0, 0, b"".join(struct.pack(">HI", names[k], v) for k, v in values.items()))


def update(stream: int, credit: int) -> bytes:
    return frame(frames.WINDOW_UPDATE, 0, stream, struct.pack(">I", credit))


def cancel(stream: int) -> bytes:
    return frame(frames.RST_STREAM, 0, stream, struct.pack(">I", 8))


def opening(stream: int, headers: bytes = BLOCK, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, headers)


def call(stream: int, data: bytes, headers: bytes = BLOCK) -> bytes:
    """Return the frames of a call with `data`: HEADERS and one DATA frame."""
    return opening(stream, headers) + frame(DATA, END_STREAM, stream, prefixed(data))


@dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def cut(data: bytes) -> Iterator[Frame]:
    """Yield the frames in `data`; the last frame may be incomplete."""
    while len(data) >= 9:
        high, low, kind, flags, stream = struct.unpack(">BHBBI", data[:9])
        end = 9 + (high << 16 | low)
        yield Frame(kind, flags, stream, data[9:end])
        data = data[end:]


class RawClient:
    """A client that sends given bytes, and reads frames."""

    def __init__(self, port: int, first: bytes | None = None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(PREFACE + settings() if first is None else first)
        self._file = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def frames(self) -> Iterator[Frame]:
        """Yield received frames until the connection ends."""
        try:
            while head := self._file.read(9):
                high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
                yield Frame(kind, flags, stream, self._file.read(high << 16 | low))
        except ConnectionResetError:  # the server had unread bytes
            return

    def until(self, kind: int, stream: int = 0, flags: int = 0) -> Frame:
        for reply in self.frames():
            if (reply.kind, reply.stream) == (kind, stream) and reply.flags & flags == flags:
                return reply
        raise AssertionError(f"no frame of kind {kind}")

    def answer(self, stream: int) -> bytes:
        """Return the message of a successful answer; check its frames and trailers."""
        body = b""
        for reply in self.frames():
            if reply.stream == stream and reply.kind == DATA:
                assert len(reply.payload) <= 16384
                body += reply.payload
            elif reply.stream == stream and reply.flags & END_STREAM:
                assert reply.kind == HEADERS
                assert reply.payload.endswith(b"grpc-status\x010")
                break
        assert body[:1] == b"\0"
        assert int.from_bytes(body[1:5], "big") == len(body) - 5
        return body[5:]

    def failure(self, stream: int) -> tuple[int, str]:
        """Return gRPC's status and text of an answer without a message."""
        payload = self.until(HEADERS, stream, END_STREAM).payload
        _, _, rest = payload.partition(b"grpc-status")
        status, _, text = rest[1:].partition(b"\0\x0cgrpc-message")
        return int(status), text[1:].decode()

    def end(self) -> int | None:
        """Return the code in the last GOAWAY frame before the connection ends; None without one."""
        codes = [reply.payload[4:8] for reply in self.frames() if reply.kind == GOAWAY]
        return int.from_bytes(codes[-1], "big") if codes else None

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def served(server: AnyServer, client: RawClient, stream: int, size: int = 0) -> None:
    """Receive and answer the call on `stream`; check that its message has `size` bytes."""
    assert server.receive(20, no_check).unity_output.rl_output.side_channel == bytes(size)
    server.reply(message(7))
    assert client.answer(stream) == message(7)
