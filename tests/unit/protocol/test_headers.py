"""Which call a header block is, whatever its compression."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from http2_peer import FIELDS, TRAILERS
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.calls import METHOD
from pipeline.protocol.frames import FrameError, HeaderReader, request_block

PATH = METHOD.encode()


def test_own_headers_are_those_of_a_call():
    headers = request_block(METHOD, "localhost:5005")
    assert dict(Decoder().decode(headers))[":path"] == METHOD
    reader = HeaderReader()
    assert all(reader.is_call(headers, PATH) for _ in range(3))
    assert not reader.is_call(request_block("/health", "localhost:5005"), PATH)


@pytest.mark.parametrize("huffman", [False, True])
def test_table_of_a_connection_is_followed(huffman):
    encoder, reader = Encoder(), HeaderReader()
    blocks = [encoder.encode(FIELDS, huffman=huffman) for _ in range(4)]
    assert len(blocks[0]) > len(blocks[1]) == len(FIELDS)
    assert [reader.is_call(block, PATH) for block in blocks] == [True] * 4


@pytest.mark.parametrize(
    ("content", "is_call"),
    [
        ("application/grpc", True),
        ("application/grpc+proto", True),
        ("text/plain", False),
        (None, False),
    ],
)
def test_a_call_says_that_its_content_is_of_grpc(content, is_call):
    fields = [(name, value) for name, value in FIELDS if name != "content-type"]
    block = Encoder().encode(fields + ([("content-type", content)] if content else []))
    assert HeaderReader().is_call(block, PATH) == is_call


POST, CONTENT = b"\x83\x86", b"\x0f\x10\x10application/grpc"
ENTERED = POST + b"\x44" + bytes([len(PATH)]) + PATH + CONTENT
"""A call's headers that enter its path into the table, as number 62."""


def test_same_bytes_mean_another_call_after_the_table_has_changed():
    reader, recurring = HeaderReader(), POST + b"\xbe" + CONTENT
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(recurring, PATH)
    assert reader.is_call(recurring, PATH)
    assert not reader.is_call(POST + b"\x44\x06/other" + CONTENT, PATH)
    assert not reader.is_call(recurring, PATH)


def test_block_that_changes_the_table_changes_it_every_time():
    reader = HeaderReader()
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(POST + b"\xbf" + CONTENT, PATH)  # the first of two entries


def test_trailers_change_the_table_too():
    reader, recurring = HeaderReader(), POST + b"\xbe" + CONTENT
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(recurring, PATH)
    reader.read_trailers(TRAILERS)
    with pytest.raises(FrameError, match="without method, scheme or path"):
        reader.is_call(recurring, PATH)


def test_recurring_block_is_decoded_once(monkeypatch):
    reader, recurring = HeaderReader(), POST + b"\xbe" + CONTENT
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(recurring, PATH)
    monkeypatch.delattr(Decoder, "decode")
    assert reader.is_call(recurring, PATH)


NAMES = st.sampled_from(["grpc-timeout", "user-agent", "grpc-accept-encoding", "x-trace"])
EXTRA = st.lists(st.tuples(NAMES, st.text("abc019S", min_size=1, max_size=40)), max_size=4)
PATHS = st.sampled_from([METHOD, METHOD, METHOD, "/grpc.health.v1.Health/Check"])


@given(
    st.lists(
        st.tuples(PATHS, EXTRA, st.booleans(), st.sampled_from([None, 0, 60, 200, 4096])),
        max_size=12,
    )
)
def test_remembered_blocks_give_what_decoding_each_gives(calls):
    encoder, reader, decoder = Encoder(), HeaderReader(), Decoder()
    for path, extra, huffman, table in calls:
        if table is not None:
            encoder.header_table_size = table
        fields = [pair if pair[0] != ":path" else (":path", path) for pair in FIELDS] + extra
        headers = encoder.encode(fields, huffman=huffman)
        assert dict(decoder.decode(headers))[":path"] == path
        assert reader.is_call(headers, PATH) == (path == METHOD)
