"""An environment's end against servers that break the rules, refuse or leave."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from http2_peer import message, prefixed, settings, update

from pipeline.protocol import frames as f
from pipeline.protocol.calls import METHOD
from pipeline.protocol.channel import Channel
from pipeline.protocol.frames import RESPONSE, SUCCESS, frame, refusal_block

LAST = f.END_HEADERS | f.END_STREAM
HEAD = frame(f.HEADERS, f.END_HEADERS, 1, RESPONSE)
TAIL = frame(f.HEADERS, LAST, 1, SUCCESS)
ANSWER = HEAD + frame(f.DATA, 0, 1, prefixed(message(9))) + TAIL
BROKEN = {
    "a push": frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4)),
    "headers without call": frame(f.HEADERS, f.END_HEADERS, 3, RESPONSE),
    "headers on a stream of its own": frame(f.HEADERS, f.END_HEADERS, 2, RESPONSE),
    "data without call": frame(f.DATA, 0, 3, b"x"),
    "two answers": HEAD + TAIL + ANSWER,
    "trailers without end": HEAD
    + frame(f.DATA, 0, 1, b"x")
    + frame(f.HEADERS, f.END_HEADERS, 1, SUCCESS),
    "headers that go on elsewhere": frame(f.HEADERS, 0, 1) + frame(f.CONTINUATION, 0, 3),
    "a window of nothing": update(0, 0),
    "a window beyond the limit": update(1, 2**31 - 1),
    "a short PING": frame(f.PING, 0, 0, b"x"),
}
FAILED = {
    "a refusal": frame(f.HEADERS, LAST, 1, refusal_block(9, "another environment")),
    "no message": HEAD + TAIL,
    "half a message": HEAD + frame(f.DATA, 0, 1, prefixed(message(9))[:-1]) + TAIL,
    "a cancelled answer": HEAD + frame(f.RST_STREAM, 0, 1, bytes(4)),
    "goodbye": frame(f.GOAWAY, 0, 0, bytes(8)),
}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(20)
        yield sock


def call(listener: socket.socket, sent: bytes, *, first: bytes = settings()) -> bytes:
    """The answer to a call of a server that sends `sent`, and then no more."""
    with ThreadPoolExecutor(1) as pool:
        channel = Channel(listener.getsockname()[1], METHOD)
        accepted = listener.accept()[0]
        answer = pool.submit(channel.call, message(), 20)
        accepted.sendall(first + sent)
        accepted.shutdown(socket.SHUT_WR)
        try:
            return answer.result(20)
        finally:
            accepted.close()
            channel.close()


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
def test_broken_answer_is_an_error_that_says_what_was_sent(listener, sent):
    with pytest.raises(ConnectionError, match=r"the trainer sent .*(a|HEADERS|trailers) "):
        call(listener, sent)


@pytest.mark.parametrize("first", [b"", frame(f.SETTINGS, f.ACK, 0)], ids=["none", "acknowledged"])
def test_server_that_does_not_begin_with_its_settings_is_an_error(listener, first):
    with pytest.raises(ConnectionError, match="where SETTINGS is due"):
        call(listener, ANSWER, first=first)


@pytest.mark.parametrize("sent", FAILED.values(), ids=FAILED.keys())
def test_call_without_an_answer_is_an_error(listener, sent):
    with pytest.raises(ConnectionError, match="the trainer closed the connection"):
        call(listener, sent)


def test_answer_is_taken_though_the_server_leaves_after_it(listener):
    leaving = frame(f.GOAWAY, 0, 0, bytes(8))
    late = frame(f.RST_STREAM, 0, 1, bytes(4)) + update(1, 10)
    assert call(listener, ANSWER + late + leaving) == message(9)
