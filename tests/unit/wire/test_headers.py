"""Header blocks of calls are recognized with any HPACK compression."""

import pytest
from hpack import Decoder, Encoder
from http2_peer import FIELDS, TRAILERS
from hypothesis import given
from hypothesis import strategies as st

from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import FrameError, HeaderReader, request_block

PATH = METHOD.encode()
POST, CONTENT = b"\x83\x86", b"\x0f\x10\x10application/grpc"
ENTERED = POST + b"\x44" + bytes([len(PATH)]) + PATH + CONTENT
"""Headers of a call that add its path to the dynamic table, as entry 62."""
RECURRING = POST + b"\xbe" + CONTENT
"""Headers of a call whose path is entry 62 of the dynamic table."""
OTHER = POST + b"\x44\x06/other" + CONTENT


def of_content(content: str | None) -> bytes:
    fields = [(name, value) for name, value in FIELDS if name != "content-type"]
    return Encoder().encode(fields + ([("content-type", content)] if content else []))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        pytest.param([request_block(METHOD, "here")] * 3, [True] * 3, id="our own"),
        pytest.param([request_block("/health", "here")], [False], id="another method"),
        pytest.param([of_content("application/grpc")], [True], id="the content of gRPC"),
        pytest.param([of_content("application/grpc+proto")], [True], id="gRPC with a suffix"),
        pytest.param([of_content("text/plain")], [False], id="another content"),
        pytest.param([of_content(None)], [False], id="no content"),
        pytest.param(
            [ENTERED, RECURRING, RECURRING, OTHER, RECURRING],
            [True, True, True, False, False],
            id="the same bytes after the table has changed",
        ),
        pytest.param(
            # Entry 63 is the older of two equal entries.
            [ENTERED, ENTERED, POST + b"\xbf" + CONTENT],
            [True] * 3,
            id="a block that changes the table every time",
        ),
    ],
)
def test_header_blocks_of_calls_are_recognized(blocks, expected):
    reader = HeaderReader()
    assert [reader.is_call(block, PATH) for block in blocks] == expected


def test_fields_in_trailers_are_added_to_the_dynamic_table_of_hpack():
    reader = HeaderReader()
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(RECURRING, PATH)
    reader.read_trailers(TRAILERS)
    with pytest.raises(FrameError, match="without method, scheme or path"):
        reader.is_call(RECURRING, PATH)


def test_repeated_header_block_is_decoded_once(monkeypatch):
    reader = HeaderReader()
    assert reader.is_call(ENTERED, PATH)
    assert reader.is_call(RECURRING, PATH)
    monkeypatch.delattr(Decoder, "decode")
    assert reader.is_call(RECURRING, PATH)


NAMES = st.sampled_from(["grpc-timeout", "user-agent", "grpc-accept-encoding", "x-trace"])
EXTRA = st.lists(st.tuples(NAMES, st.text("abc019S", min_size=1, max_size=40)), max_size=4)
PATHS = st.sampled_from([METHOD, METHOD, METHOD, "/grpc.health.v1.Health/Check"])


@given(
    st.lists(
        st.tuples(PATHS, EXTRA, st.booleans(), st.sampled_from([None, 0, 60, 200, 4096])),
        max_size=12,
    )
)
def test_cached_header_blocks_give_the_same_results_as_newly_decoded_blocks(calls):
    encoder, reader, decoder = Encoder(), HeaderReader(), Decoder()
    for path, extra, huffman, table in calls:
        if table is not None:
            encoder.header_table_size = table
        fields = [pair if pair[0] != ":path" else (":path", path) for pair in FIELDS] + extra
        headers = encoder.encode(fields, huffman=huffman)
        assert dict(decoder.decode(headers))[":path"] == path
        assert reader.is_call(headers, PATH) == (path == METHOD)
