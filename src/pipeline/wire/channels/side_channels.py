"""Messages of side channels: frames with a channel's id and a payload of little-endian values."""

import logging
import struct
import uuid
from collections.abc import Iterable, Sequence

from pipeline.errors import UnityEnvironmentException

_log = logging.getLogger(__name__)
# Bytes before a payload: a channel's id (16) and the payload's length (4).
_HEAD = 20
MAX_FRAMES = 100_000
"""Largest number of frames in one message. It limits the time to read a message: each frame takes
more than a microsecond.
"""

# The ids of ML-Agents' channels are fixed in the Unity package.
ENGINE_CONFIGURATION = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
ENVIRONMENT_PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400")
STATS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
FLOAT_PROPERTIES = uuid.UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7")
TRAINING_ANALYTICS = uuid.UUID("b664a4a9-d86f-5a5f-95cb-e8353a7e8356")
STATE = uuid.UUID("da680973-4648-47ae-9aad-3af37dab1b1e")
"""Id of the state channel, which only this project has; see `pipeline.wire.channels.state`."""


def pack(frames: Iterable[tuple[uuid.UUID, bytes]]) -> bytes:
    """Return the message field `side_channel` with a frame for each (channel id, payload)."""
    out = bytearray()
    for channel_id, payload in frames:
        # .NET's Guid.ToByteArray writes the first three groups of an id as little-endian numbers.
        out += channel_id.bytes_le + struct.pack("<i", len(payload)) + payload
    return bytes(out)


def unpack(data: bytes) -> list[tuple[uuid.UUID, bytes]]:
    """Return the (channel id, payload) pairs in the message field `side_channel`, in order.

    Raises:
        UnityEnvironmentException: The bytes end within a frame, or there are too many frames.
    """
    frames: list[tuple[uuid.UUID, bytes]] = []
    position = 0
    while position < len(data):
        if len(frames) == MAX_FRAMES:
            raise UnityEnvironmentException(
                f"a side channel message of {len(data)} bytes has more than {MAX_FRAMES} frames, "
                f"the last one for the channel {frames[-1][0]}: send fewer messages in each step"
            )
        start = position + _HEAD
        # A head that is cut off gets the length -1, which is refused as well.
        length = struct.unpack_from("<i", data, start - 4)[0] if start <= len(data) else -1
        if length < 0 or start + length > len(data):
            raise UnityEnvironmentException(
                f"a side channel message is cut off: the frame at byte {position} does not fit in "
                f"the {len(data)} bytes sent"
            )
        channel_id = uuid.UUID(bytes_le=bytes(data[position : position + 16]))
        frames.append((channel_id, bytes(data[start : start + length])))
        position = start + length
    return frames


class OutgoingMessage:
    """A payload to send; each `write_` method appends a value."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def write_bool(self, value: bool) -> None:
        """Append a flag as one byte."""
        self.buffer += struct.pack("<?", value)

    def write_int32(self, value: int) -> None:
        """Append a whole number as four bytes; raise struct.error if it is out of range."""
        self.buffer += struct.pack("<i", value)

    def write_float32(self, value: float) -> None:
        """Append a number as four bytes."""
        self.buffer += struct.pack("<f", value)

    def write_float32_list(self, values: Sequence[float]) -> None:
        """Append the count of the numbers (int32), then the numbers."""
        self.buffer += struct.pack(f"<i{len(values)}f", len(values), *values)

    def write_string(self, value: str) -> None:
        """Append length in bytes (int32) and text; UnicodeEncodeError if it is not ASCII."""
        data = value.encode("ascii")
        self.write_int32(len(data))
        self.buffer += data

    def set_raw_bytes(self, buffer: bytes | bytearray) -> None:
        """Replace the whole payload."""
        if self.buffer:
            _log.warning("a side channel message already contains values, which are overwritten")
        self.buffer = bytearray(buffer)


def written(*values: str | int | float) -> OutgoingMessage:
    """Return a message of texts, int32 and float32 values; the receiver must know their types."""
    msg = OutgoingMessage()
    for value in values:
        if isinstance(value, str):
            msg.write_string(value)
        elif isinstance(value, float):
            msg.write_float32(value)
        else:
            msg.write_int32(value)
    return msg


class IncomingMessage:
    """A received payload, read from the front; a read beyond the end returns `default_value`."""

    def __init__(self, buffer: bytes, offset: int = 0) -> None:
        self.buffer = buffer
        self.offset = offset

    def read_bool(self, default_value: bool = False) -> bool:
        """Return the flag in the next byte."""
        data = self._take(1)
        return default_value if data is None else data != b"\0"

    def read_int32(self, default_value: int = 0) -> int:
        """Return the whole number in the next four bytes."""
        data = self._take(4)
        return default_value if data is None else int(struct.unpack("<i", data)[0])

    def read_float32(self, default_value: float = 0.0) -> float:
        """Return the number in the next four bytes."""
        data = self._take(4)
        return default_value if data is None else float(struct.unpack("<f", data)[0])

    def read_float32_list(self, default_value: list[float] | None = None) -> list[float]:
        """Read a count (int32), and return that many numbers."""
        data = self._counted(4)
        if data is None:
            return [] if default_value is None else default_value
        return [float(value) for value in struct.unpack(f"<{len(data) // 4}f", data)]

    def read_string(self, default_value: str = "") -> str:
        """Read a length in bytes (int32), and return the UTF-8 text of that length."""
        data = self._counted(1)
        return default_value if data is None else data.decode("utf-8", errors="replace")

    def get_raw_bytes(self) -> bytes:
        """Return the whole payload, including bytes that have been read."""
        return self.buffer

    def _take(self, count: int) -> bytes | None:
        if count < 0 or self.offset + count > len(self.buffer):
            return None
        self.offset += count
        return bytes(self.buffer[self.offset - count : self.offset])

    def _counted(self, size: int) -> bytes | None:
        """Read a count, and return as many values of `size` bytes; None, unread, if cut off."""
        start = self.offset
        head = self._take(4)
        data = None if head is None else self._take(size * int(struct.unpack("<i", head)[0]))
        if data is None:
            self.offset = start
        return data
