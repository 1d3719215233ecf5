"""What people reported whose machine, environments or files are not theirs alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from fake_player import START
from http2_peer import RawClient, call, message

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.launch import EnvironmentProcess
from pipeline.envs.side_channels import (
    FloatPropertiesChannel,
    SideChannelManager,
    StatsSideChannel,
)
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import (
    UnityEnvironmentException,
    UnitySideChannelException,
    UnitySpecificationException,
)
from pipeline.protocol import peers, side_channels
from pipeline.protocol.calls import FOREIGN
from pipeline.protocol.generated import messages as m
from pipeline.protocol.layout_cache import Decoder
from pipeline.protocol.peers import PeerCheck
from pipeline.protocol.specs import MAX_AGENTS, ActionSpec, BehaviorSpec, ObservationSpec

NOBODY = 65534
CLIENT = "import socket, sys; s = socket.create_connection(sys.argv[1:]); sys.stdin.read()"
linux = pytest.mark.skipif(sys.platform != "linux", reason="sock_diag, setsid")


@pytest.fixture(params=["the kernel tells", "psutil tells"])
def source(request, monkeypatch):
    """Both ways to learn which process calls."""
    if request.param == "psutil tells":
        monkeypatch.setattr(peers, "_socket_of", lambda *_: None)


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as server:
        server.settimeout(60)
        yield server


@pytest.fixture
def another():
    """The number of another process that was started here."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        yield process.pid
        process.kill()


def script(folder: Path, text: str) -> list[str]:
    path = folder / "wrapper.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path)]


@linux
@pytest.mark.parametrize(
    "text",
    [
        'exec "$PIPELINE_PYTHON" -S -c "$CODE" "$@" < "$FIFO"',
        '"$PIPELINE_PYTHON" -S -c "$CODE" "$@" < "$FIFO"; true',
        'setsid "$PIPELINE_PYTHON" -S -c "$CODE" "$@" < "$FIFO"; true',
        '( (setsid "$PIPELINE_PYTHON" -S -c "$CODE" "$@" < "$FIFO") & ); read end < "$FIFO"',
    ],
    ids=["itself", "a child", "a child with a session", "an orphan with a session"],
)
def test_environment_behind_a_wrapper_is_known(
    tmp_path, monkeypatch, listener, source, another, text
):
    monkeypatch.setenv("CODE", CLIENT)
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))
    os.mkfifo(tmp_path / "fifo")
    check = PeerCheck(is_started_here=True)
    host, port = listener.getsockname()[:2]
    process = EnvironmentProcess([*script(tmp_path, text), host, str(port)], peers=check)
    other = PeerCheck(is_started_here=True)
    other.pid = another
    # Open for both, so that nobody in the wrapper waits for the other end of the pipe.
    pipe = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        with listener.accept()[0] as accepted:
            assert check.refusal_at(accepted) is None
            assert "was not started by it" in str(other.refusal_at(accepted))
    finally:
        os.close(pipe)
        process.close(0.0)


@linux
@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_process_that_greets_before_the_environment_is_refused_and_named(
    tmp_path, caplog, transport
):
    os.mkfifo(tmp_path / "fifo")
    (program,) = script(tmp_path, f'read go < {tmp_path}/fifo; {START} "$@"')
    env = UnityEnvironment(program, connect=False, transport=transport, seed=7)
    stranger = RawClient(env.port)
    stranger.send(call(1, message()))
    while "is refused" not in caplog.text:
        assert not env._server.is_called(0.1)
    assert stranger.failure(1) == (9, FOREIGN)
    (tmp_path / "fifo").write_text("go\n")
    with env:
        env.connect()
        env.reset()
        # its first observations hold the seed, so they are of the environment that was started
        assert env.get_steps("Echo?team=0")[0].obs[0][0, 1] == 7.0
    name = psutil.Process().name()
    who = f"process {os.getpid()} ('{name}') of user {psutil.Process().username()}"
    assert f"A call on port {env.port} is refused: it comes from {who}" in caplog.text
    stranger.close()


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_process_of_the_same_user_may_call_where_a_person_starts_it(transport):
    from pipeline.protocol.server import open_server

    with open_server(transport=transport) as server, closing(RawClient(server.port)) as client:
        client.send(call(1, message()))
        while not server.is_called(1.0):
            pass
        assert server.receive(20, lambda: None).header.status == 200
        server.reply(message())


def of_another_user(monkeypatch) -> socket.socket:
    """A socket whose user is neither root nor the one that asks."""
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY - 1)
        return socket.socket()
    os.seteuid(NOBODY)
    try:
        return socket.socket()
    finally:
        os.seteuid(0)


@linux
@pytest.mark.parametrize("is_started_here", [False, True])
def test_process_of_another_user_is_refused(monkeypatch, is_started_here):
    check = PeerCheck(is_started_here=is_started_here)
    with socket.create_server(("127.0.0.1", 0)) as server, of_another_user(monkeypatch) as client:
        client.connect(server.getsockname())
        with server.accept()[0] as accepted:
            refusal = check.refusal_at(accepted)
    assert refusal is not None
    assert refusal.startswith("it comes from ")
    assert ("--listen 127.0.0.1" in refusal) != is_started_here
    assert ("give --attach" in refusal) == is_started_here


@linux
def test_client_by_an_address_of_both_families_is_known():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET6) as client:
        client.connect((f"::ffff:{server.getsockname()[0]}", server.getsockname()[1]))
        with server.accept()[0] as accepted:
            uid, inode = peers._socket_of(accepted.getpeername(), accepted.getsockname())
            assert (uid, inode) == (os.geteuid(), os.fstat(client.fileno()).st_ino)
            client.close()
            assert PeerCheck().refusal_at(accepted) == "the client has left already"


def test_first_that_greets_is_accepted_where_the_system_does_not_tell(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(peers, "_socket_of", lambda *_: None)

    def denied(kind):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert PeerCheck(is_started_here=True).refusal(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert "does not tell who calls: the first that greets is accepted" in caplog.text


def test_process_that_calls_in_place_of_a_player_to_bring_is_refused(caplog, another):
    from pipeline.envs.forward import _first_call

    check = PeerCheck(is_started_here=True)
    check.pid = another
    ours, trainer = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, trainer:
        server.setblocking(False)
        with socket.create_connection(server.getsockname()) as stranger:

            def ended() -> None:
                if "is refused: it comes from process" in caplog.text:
                    trainer.close()

            assert _first_call(ours, [server], ended, check) == (None, b"")
            assert stranger.recv(1) == b""


def test_side_channel_of_empty_frames_is_refused_at_once():
    limit = side_channels.MAX_FRAMES
    assert len(side_channels.unpack(bytes(20) * limit)) == limit == 100_000
    with pytest.raises(UnityEnvironmentException, match="has more than 100000 frames, the last of"):
        side_channels.unpack(bytes(20) * (limit + 1))


def test_many_unknown_channels_are_not_a_warning_each(caplog):
    manager = SideChannelManager()
    frames = [(uuid.UUID(int=number), b"") for number in range(1000)]
    manager.deliver(side_channels.pack(frames))
    assert len(caplog.records) == 10


def statistic(name: str) -> side_channels.IncomingMessage:
    out = side_channels.OutgoingMessage()
    out.write_string(name)
    out.write_float32(1.0)
    out.write_int32(0)
    return side_channels.IncomingMessage(bytes(out.buffer))


class Reports:
    """A simulator that reports 500 statistics of new names in each step."""

    behavior_specs: ClassVar = {}

    def __init__(self):
        self.n_steps = 0

    def reset(self):
        return {}

    def step(self, _):
        self.n_steps += 1
        return {}

    def stats(self):
        return [(f"level {self.n_steps * 500 + number}", 1.0, 0) for number in range(500)]

    def close(self):
        pass


def test_statistics_of_ever_new_names_are_refused_by_name():
    channel = StatsSideChannel()
    for message_number in range(20):
        for number in range(500):
            channel.on_message_received(statistic(f"level {500 * message_number + number}"))
        assert len(channel.get_and_reset_stats()) == 500
    channel.on_message_received(statistic("level 0"))
    with pytest.raises(
        UnitySideChannelException, match=r"than 10000 statistics .* 'level 10000': "
    ):
        channel.on_message_received(statistic("level 10000"))


def test_statistics_of_ever_new_names_in_this_process_are_refused_too():
    with InProcessEnvironment(Reports()) as env:
        env.reset()
        for _ in range(20):
            assert len(env.take_stats()) == 500
            env.step()
        with pytest.raises(UnitySideChannelException, match="more than 10000 statistics"):
            env.take_stats()


def test_properties_of_ever_new_names_are_refused_by_name():
    channel = FloatPropertiesChannel()
    for number in range(10_000):
        channel.on_message_received(statistic(f"level {number}"))
    with pytest.raises(
        UnitySideChannelException, match=r"than 10000 properties .* 'level 10000': "
    ):
        channel.on_message_received(statistic("level 10000"))


def agents(count: int) -> bytes:
    message = m.UnityRLOutputProto.ListAgentInfoProto()
    agent = message.value.add()
    agent.observations.add(shape=[1]).float_data.data.append(0.5)
    return message.SerializeToString() * count


def test_message_of_too_many_agents_is_refused_by_behavior():
    spec = BehaviorSpec([ObservationSpec((1,), (1,), 0, "")], ActionSpec(1, ()))
    with pytest.raises(
        UnitySpecificationException, match="has 131073 agents of the behavior Crowd"
    ):
        Decoder(spec, "Crowd").decode(agents(MAX_AGENTS + 1))


@pytest.mark.parametrize("names", [["same"] * 1025, [f"level {n}" for n in range(1025)]])
def test_announcements_without_end_are_refused_by_name(names):
    from test_unity_users import Player, connected

    message = m.UnityMessageProto(header={"status": 200})
    for name in names:
        message.unity_output.rl_initialization_output.brain_parameters.add(brain_name=name)
    with pytest.raises(UnitySpecificationException, match=f"than 1024 behaviors.*{names[-1]!r}"):
        connected(Player(message))


def test_agents_of_many_unannounced_behaviors_are_not_a_warning_each(caplog):
    from test_unity_users import Player, connected

    message = m.UnityMessageProto(header={"status": 200})
    for number in range(100):
        message.unity_output.rl_output.agentInfos[f"level {number}"].value.add(id=number)
    with connected(Player(message)):
        assert len([r for r in caplog.records if "not announced" in r.message]) == 10
