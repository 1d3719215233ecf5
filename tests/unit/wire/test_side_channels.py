import logging
import uuid

import pytest

from pipeline.errors import UnityEnvironmentException
from pipeline.wire.channels import side_channels as wire


def test_side_channel_frames_are_read_in_the_order_in_which_they_were_written():
    frames = [(uuid.UUID(int=k), bytes(range(k))) for k in (3, 0, 200)]
    assert wire.unpack(wire.pack(frames)) == frames
    assert wire.unpack(b"") == []


@pytest.mark.parametrize("length", [1, 19, 20, 24])
def test_cut_off_frames_and_negative_lengths_are_refused(length):
    data = wire.pack([(uuid.UUID(int=1), b"12345")])
    with pytest.raises(UnityEnvironmentException, match=f"does not fit in the {length} bytes"):
        wire.unpack(data[:length])
    with pytest.raises(UnityEnvironmentException, match="does not fit"):
        wire.unpack(uuid.UUID(int=1).bytes + b"\xff\xff\xff\xff")


def test_side_channel_values_of_every_type_are_read_as_they_were_written():
    out = wire.OutgoingMessage()
    out.write_bool(True)
    out.write_int32(-7)
    out.write_float32(0.5)
    out.write_float32_list([1.0, -2.0])
    out.write_string("gravity")
    message = wire.IncomingMessage(bytes(out.buffer))
    assert message.read_bool() is True
    assert message.read_int32() == -7
    assert message.read_float32() == 0.5
    assert message.read_float32_list() == [1.0, -2.0]
    assert message.read_string() == "gravity"
    assert message.get_raw_bytes() == bytes(out.buffer)


def test_reading_beyond_the_end_of_a_message_gives_the_default_value():
    message = wire.IncomingMessage(b"\x05\0")
    assert message.read_int32(4) == 4
    assert message.read_float32_list() == []
    assert message.read_float32_list([2.0]) == [2.0]
    assert message.read_string("none") == "none"
    assert wire.IncomingMessage(b"\x05\0\0\0ab").read_string("none") == "none"


def test_overwriting_a_message_logs_a_warning(caplog):
    out = wire.OutgoingMessage()
    out.write_int32(1)
    with caplog.at_level(logging.WARNING):
        out.set_raw_bytes(b"x")
    assert "overwritten" in caplog.text
    assert out.buffer == b"x"
