"""The calling end of a connection with servers that break HTTP/2, refuse calls or disconnect."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from http2_peer import message, prefixed, settings, update

from pipeline.wire.transport import frames as f
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.frames import RESPONSE, SUCCESS, frame, refusal_block
from pipeline.wire.transport.http2 import Channel

LAST = f.END_HEADERS | f.END_STREAM
GREETING = settings()
HEAD = GREETING + frame(f.HEADERS, f.END_HEADERS, 1, RESPONSE)
TAIL = frame(f.HEADERS, LAST, 1, SUCCESS)
REST = frame(f.DATA, 0, 1, prefixed(message(9))) + TAIL
LEAVING = frame(f.GOAWAY, 0, 0, bytes(8))
# Bytes that a server answers the first call with, by the caller's error: "the trainer <key>".
ERRORS = {
    "sent a PUSH_PROMISE": GREETING + frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4)),
    "sent HEADERS on stream 3": GREETING + frame(f.HEADERS, f.END_HEADERS, 3, RESPONSE),
    "sent HEADERS on stream 2": GREETING + frame(f.HEADERS, f.END_HEADERS, 2, RESPONSE),
    "sent a DATA frame on stream 3": GREETING + frame(f.DATA, 0, 3, b"x"),
    "sent HEADERS on stream 1": HEAD + TAIL + frame(f.HEADERS, f.END_HEADERS, 1, RESPONSE) + REST,
    "sent trailers that end no stream": HEAD
    + frame(f.DATA, 0, 1, b"x")
    + frame(f.HEADERS, f.END_HEADERS, 1, SUCCESS),
    "sent a CONTINUATION frame where": GREETING
    + frame(f.HEADERS, 0, 1)
    + frame(f.CONTINUATION, 0, 3),
    "sent a WINDOW_UPDATE with an increment of 0": GREETING + update(0, 0),
    "sent a WINDOW_UPDATE beyond": GREETING + update(1, 2**31 - 1),
    "sent a PING frame of 1 bytes": GREETING + frame(f.PING, 0, 0, b"x"),
    "sent a HEADERS frame where SETTINGS is due": HEAD.removeprefix(GREETING) + REST,
    "sent a SETTINGS frame where SETTINGS is due": frame(f.SETTINGS, f.ACK, 0) + HEAD + REST,
    "closed the connection: a refusal": GREETING
    + frame(f.HEADERS, LAST, 1, refusal_block(9, "another environment")),
    "closed the connection: no message": HEAD + TAIL,
    "closed the connection: half a message": HEAD
    + frame(f.DATA, 0, 1, prefixed(message(9))[:-1])
    + TAIL,
    "closed the connection: a cancelled answer": HEAD + frame(f.RST_STREAM, 0, 1, bytes(4)),
    "closed the connection: goodbye": GREETING + LEAVING,
}


def call(sent: bytes) -> bytes:
    """Return the answer to a call of a server that sends `sent` and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        channel = Channel(listener.getsockname()[1], METHOD)
        accepted = listener.accept()[0]
        answer = pool.submit(channel.call, message(), 20)
        accepted.sendall(sent)
        accepted.shutdown(socket.SHUT_WR)
        try:
            return answer.result(20)
        finally:
            accepted.close()
            channel.close()


@pytest.mark.parametrize(("told", "sent"), ERRORS.items(), ids=ERRORS)
def test_call_without_an_answer_raises_an_error_that_says_what_the_server_did(told, sent):
    with pytest.raises(ConnectionError, match=f"the trainer {told.partition(':')[0]}"):
        call(sent)


def test_answer_is_received_although_the_server_disconnects_after_the_answer():
    late = frame(f.RST_STREAM, 0, 1, bytes(4)) + update(1, 10)
    assert call(HEAD + REST + late + LEAVING) == message(9)
