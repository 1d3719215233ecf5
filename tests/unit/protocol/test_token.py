"""Players from other machines prove the token first; without it nothing is believed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from http2_peer import message

from pipeline.errors import SettingsError, UnityCommunicationException
from pipeline.protocol import incoming
from pipeline.protocol import server as server_module
from pipeline.protocol import token as token_module
from pipeline.protocol.calls import METHOD
from pipeline.protocol.channel import OutgoingConnection
from pipeline.protocol.frames import request_block
from pipeline.protocol.http2 import PREFACE
from pipeline.protocol.server import Server, open_server
from pipeline.protocol.token import (
    VARIABLE,
    Challenge,
    HungUpError,
    introduce,
    read_token,
)

TOKEN, OTHER = b"the players' own token", b"some other token, as long"
HELLO = b"pipeline-token 1 " + b"0" * 32 + b"\n"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A server that asks everyone for the token, since loopback was chosen on purpose."""
    monkeypatch.setattr(server_module, "_KEEP_S", 0.05)
    with Server(host="127.0.0.1", token=TOKEN) as served:
        yield served


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    with contextlib.ExitStack() as stack:

        def connected(port: int, address: str = "127.0.0.1") -> socket.socket:
            source = (address, 0)
            return stack.enter_context(
                socket.create_connection((address, port), timeout=20, source_address=source)
            )

        yield connected


def greet(sock: socket.socket) -> None:
    """Call as an environment that has just started."""
    OutgoingConnection(sock).request(1, request_block(METHOD, "localhost"), message())


def test_who_knows_the_token_is_the_environment(server, connect):
    sock = connect(server.port)
    introduce(sock, TOKEN, "here")
    greet(sock)
    assert server.receive(20, lambda: None).header.status == 200
    assert server.peer == "127.0.0.1"


def test_a_wrong_token_is_refused_at_both_ends_and_what_follows_is_not_read(
    server, connect, caplog
):
    sock = connect(server.port)
    with pytest.raises(UnityCommunicationException) as caught:
        introduce(sock, OTHER, "10.0.0.5:5004")
    assert str(caught.value) == "10.0.0.5:5004: the trainer refuses this player: a wrong token"
    with contextlib.suppress(OSError):
        greet(sock)
    assert not server.is_called(0.2)
    warning = f"A connection from 127.0.0.1 to port {server.port} is cut off: the peer sent"
    assert f"{warning} a wrong token" in caplog.text


@pytest.mark.parametrize(("sent", "failure"), [(PREFACE, "no token"), (b"x" * 300, "a wrong")])
def test_who_does_not_answer_is_cut_off_before_it_learns_more(
    sent, failure, server, connect, caplog
):
    sock = connect(server.port)
    sock.sendall(sent)
    lines = sock.makefile("rb").read().splitlines()
    assert [line.partition(b" ")[0] for line in lines] == [b"pipeline-token", b"refused"]
    assert f"sent {failure}" in caplog.text


def introduced(reply: Callable[[bytes], bytes], hello: bytes) -> bytes:
    """Introduce ourselves to a trainer that the test plays; return our answer to its `hello`."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ours.settimeout(20)
        theirs.settimeout(20)
        theirs.sendall(hello)
        future = pool.submit(introduce, ours, TOKEN, "there")
        answer = theirs.makefile("rb").readline()
        theirs.sendall(reply(answer.strip()))
        future.result()
    return answer.strip()


def test_the_token_does_not_cross_the_network_and_no_answer_fits_twice():
    first, second = Challenge(TOKEN), Challenge(TOKEN)
    answer = introduced(lambda data: first.welcome(data) or b"", first.line)
    assert TOKEN not in first.line + answer + (first.welcome(answer) or b"")
    assert second.welcome(answer) is None
    assert Challenge(OTHER).welcome(answer) is None


@pytest.mark.parametrize(
    ("hello", "reply", "message"),
    [
        (HELLO, b"welcome " + b"0" * 64 + b"\n", "does not know the token"),
        (HELLO, b"HTTP/1.1 400\r\n", "does not know the token"),
        (HELLO, b"x" * 300, "is no trainer"),
        (b"pop3 server ready\n", b"", "is no trainer"),
    ],
)
def test_what_only_pretends_to_be_the_trainer_is_found_out(hello, reply, message):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        theirs.sendall(hello + reply)
        with pytest.raises(UnityCommunicationException, match=message):
            introduce(ours, TOKEN, "there")


def test_a_trainer_that_asks_no_token_is_believed_on_this_machine_only(connect, monkeypatch):
    monkeypatch.setattr(server_module, "_KEEP_S", 0.05)
    with Server() as local:
        introduce(connect(local.port), TOKEN, "here")
        monkeypatch.setattr(token_module, "is_loopback", lambda _: False)
        with pytest.raises(UnityCommunicationException, match="does not ask for the token"):
            introduce(connect(local.port), TOKEN, "there")


def test_players_of_this_machine_say_no_token_beside_those_of_others(connect, monkeypatch):
    monkeypatch.setattr(server_module, "_KEEP_S", 0.05)
    for module in (server_module, incoming):  # as if it were an address of a network
        monkeypatch.setattr(module, "is_loopback", lambda address: address != "127.0.0.2")
    with Server(host="127.0.0.2", token=TOKEN) as network_server:
        assert connect(network_server.port, "127.0.0.2").recv(14) == b"pipeline-token"
        local = connect(network_server.port)
        greet(local)
        assert network_server.receive(20, lambda: None).header.status == 200
        local.close()


def test_an_admitted_player_may_be_silent_where_a_stranger_is_dropped(server, connect, monkeypatch):
    admitted, stranger = connect(server.port), connect(server.port)
    introduce(admitted, TOKEN, "here")
    monkeypatch.setattr(server_module, "_PREFACE_S", 0.0)
    stranger.makefile("rb").read()  # to its end
    greet(admitted)
    assert server.receive(20, lambda: None).header.status == 200


def test_a_port_that_has_its_player_hangs_up(server, connect):
    first = connect(server.port)
    introduce(first, TOKEN, "here")
    greet(first)
    server.receive(20, lambda: None)
    with pytest.raises(HungUpError, match="take the port of another"):
        introduce(connect(server.port), TOKEN, "here")


def test_the_general_runtime_cannot_ask_for_a_token():
    with pytest.raises(SettingsError, match="'grpc' cannot ask for a token"):
        open_server(transport="grpc", host="127.0.0.1", token=TOKEN)


def test_a_token_is_read_from_a_file_or_the_variable(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SettingsError, match="give --token-file FILE or PIPELINE_TOKEN"):
        read_token(None)
    monkeypatch.setenv(VARIABLE, OTHER.decode())
    assert read_token(None) == OTHER
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    assert not caplog.records
    file.chmod(0o644)
    read_token(file)
    assert "others on this machine may read it" in caplog.text
    file.write_bytes(b"short\n")
    with pytest.raises(SettingsError, match=r"token has 5 bytes, and needs at least 16"):
        read_token(file)
