"""Reports about shared machines, and about environments and files from strangers."""

import contextlib
import io
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import time
import uuid
import zipfile
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
from fake_player import START
from http2_peer import RawClient, call, message
from stops_after import StopsAfter
from toys import Chase

import pipeline
from pipeline.core.specs import MAX_AGENTS, ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.launch import EnvironmentProcess
from pipeline.envs.side_channels import (
    FloatPropertiesChannel,
    SideChannelManager,
    StatsSideChannel,
)
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import (
    CheckpointError,
    Interrupted,
    UnityEnvironmentException,
    UnitySideChannelException,
    UnitySpecificationException,
)
from pipeline.settings import load_run_settings
from pipeline.trainer.checkpoints.file import digest, load_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy, resumes_exactly
from pipeline.wire.channels import side_channels
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.layout_cache import Decoder
from pipeline.wire.transport import peers
from pipeline.wire.transport.calls import FOREIGN
from pipeline.wire.transport.peers import PeerCheck

NOBODY = 65534
CLIENT = "import socket, sys; s = socket.create_connection(sys.argv[1:]); sys.stdin.read()"
linux = pytest.mark.skipif(sys.platform != "linux", reason="sock_diag, setsid")


@pytest.fixture(params=["the kernel tells", "psutil tells"])
def source(request, monkeypatch):
    """Both ways to identify the connecting process: the kernel's sock_diag, and psutil."""
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
    """The id of another process that was started here."""
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
def test_environment_started_by_a_wrapper_script_is_accepted(
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
def test_process_that_is_not_the_environment_and_connects_first_is_refused_and_named(
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
        # the first observations contain the seed, so they come from the environment started here
        assert env.get_steps("Echo?team=0")[0].obs[0][0, 1] == 7.0
    name = psutil.Process().name()
    who = f"process {os.getpid()} ('{name}') of user {psutil.Process().username()}"
    assert f"A call on port {env.port} is refused: the client is {who}" in caplog.text
    stranger.close()


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_player_started_by_the_same_user_may_connect(transport):
    from pipeline.wire.transport.server import open_server

    with open_server(transport=transport) as server, closing(RawClient(server.port)) as client:
        client.send(call(1, message()))
        while not server.is_called(1.0):
            pass
        assert server.receive(20, lambda: None).header.status == 200
        server.reply(message())


def of_another_user(monkeypatch) -> socket.socket:
    """Return a socket of a user who is neither root nor the user of this process."""
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
def test_connection_from_a_process_of_another_user_is_refused(monkeypatch, is_started_here):
    check = PeerCheck(is_started_here=is_started_here)
    with socket.create_server(("127.0.0.1", 0)) as server, of_another_user(monkeypatch) as client:
        client.connect(server.getsockname())
        with server.accept()[0] as accepted:
            refusal = check.refusal_at(accepted)
    assert refusal is not None
    assert refusal.startswith("the client is ")
    assert ("over ssh as that user" in refusal) != is_started_here
    assert ("give --attach" in refusal) == is_started_here


@linux
def test_process_of_a_client_with_an_ipv4_mapped_address_is_identified():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET6) as client:
        client.connect((f"::ffff:{server.getsockname()[0]}", server.getsockname()[1]))
        with server.accept()[0] as accepted:
            uid, inode = peers._socket_of(accepted.getpeername(), accepted.getsockname())
            assert (uid, inode) == (os.geteuid(), os.fstat(client.fileno()).st_ino)
            client.close()
            assert PeerCheck().refusal_at(accepted) == "the client has disconnected already"


def test_first_connecting_process_is_accepted_if_the_system_cannot_identify_processes(
    monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(peers, "_socket_of", lambda *_: None)

    def denied(kind):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert PeerCheck(is_started_here=True).refusal(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert "does not tell which process connects: the first client is accepted" in caplog.text


def test_side_channel_message_with_too_many_frames_is_refused():
    limit = side_channels.MAX_FRAMES
    assert len(side_channels.unpack(bytes(20) * limit)) == limit == 100_000
    with pytest.raises(
        UnityEnvironmentException, match="has more than 100000 frames, the last one"
    ):
        side_channels.unpack(bytes(20) * (limit + 1))


def test_messages_of_many_unknown_side_channels_cause_at_most_ten_warnings(caplog):
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


@pytest.mark.parametrize(
    ("channel", "kind"), [(StatsSideChannel, "statistics"), (FloatPropertiesChannel, "properties")]
)
def test_more_than_10000_statistics_or_properties_are_refused(channel, kind):
    told = channel()
    for number in range(10_000):
        told.on_message_received(statistic(f"level {number}"))
        if kind == "statistics" and number % 500 == 499:
            assert len(told.get_and_reset_stats()) == 500
    told.on_message_received(statistic("level 0"))
    with pytest.raises(UnitySideChannelException, match=rf"than 10000 {kind} .* 'level 10000': "):
        told.on_message_received(statistic("level 10000"))


def test_more_than_10000_statistics_of_an_in_process_simulator_are_refused():
    with InProcessEnvironment(Reports()) as env:
        env.reset()
        for _ in range(20):
            assert len(env.take_stats()) == 500
            env.step()
        with pytest.raises(UnitySideChannelException, match="more than 10000 statistics"):
            env.take_stats()


def agents(count: int) -> bytes:
    message = m.UnityRLOutputProto.ListAgentInfoProto()
    agent = message.value.add()
    agent.observations.add(shape=[1]).float_data.data.append(0.5)
    return message.SerializeToString() * count


def test_message_with_too_many_agents_is_refused_and_its_behavior_is_named():
    spec = BehaviorSpec([ObservationSpec((1,), (1,), 0, "")], ActionSpec(1, ()))
    with pytest.raises(
        UnitySpecificationException, match="has 131073 agents of the behavior Crowd"
    ):
        Decoder(spec, "Crowd").decode(agents(MAX_AGENTS + 1))


@pytest.mark.parametrize("names", [["same"] * 1025, [f"level {n}" for n in range(1025)]])
def test_more_than_1024_announced_behaviors_are_refused(names):
    from test_unity_users import Player, connected

    message = m.UnityMessageProto(header={"status": 200})
    for name in names:
        message.unity_output.rl_initialization_output.brain_parameters.add(brain_name=name)
    with pytest.raises(UnitySpecificationException, match=f"than 1024 behaviors.*{names[-1]!r}"):
        connected(Player(message))


def test_agents_of_many_unannounced_behaviors_cause_at_most_ten_warnings(caplog):
    from test_unity_users import Player, connected

    message = m.UnityMessageProto(header={"status": 200})
    for number in range(100):
        message.unity_output.rl_output.agentInfos[f"level {number}"].value.add(id=number)
    with connected(Player(message)):
        assert len([r for r in caplog.records if "not announced" in r.message]) == 10


SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 64, "num_epoch": 1},
    "network_settings": {"hidden_units": 4, "num_layers": 1},
    "max_steps": 400,
    "time_horizon": 8,
}
RUN = load_run_settings(None, overrides={"behaviors": {"Toy": SETTINGS}})
MOST_BYTES, MOST_S = 200 << 20, 5.0


def itself():
    items = []
    items.append(items)
    return items


def shared(n):
    """A list that has 2^n numbers, in n lists of the file."""
    items = [1, 1]
    for _ in range(n):
        items = [items, items]
    return items


def nested(n):
    items = ()
    for _ in range(n):
        items = (items,)
    return items


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def views():
    numbers = torch.zeros(200_000)
    return [numbers[i:] for i in range(1000)]


HOSTILE = {
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(10**6, device="meta"),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "holds_itself": itself,
    "shared": lambda: shared(60),
    "deep": lambda: nested(400),
    "expanded": lambda: torch.zeros(1).expand(10**9),
    "expanded_far": lambda: torch.zeros(1).expand(10**12),
    "empty_and_endless": lambda: torch.zeros(0, 1 << 62),
    "empty_and_endless_in_all": lambda: torch.zeros(1 << 32, 0, 1 << 32, dtype=torch.uint8),
    "views": views,
    "dtype": lambda: torch.float32,
    "size": lambda: torch.Size([2]),
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(3),
    "complex_number": lambda: 1j,
    "huge_number": lambda: 1 << 4000,
}


def refused(path, read):
    """Read a file, which must be refused in one line within limits of time and memory."""
    limit, began = MOST_BYTES + 10 * path.stat().st_size, time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"^[^\n]{1,600}$") as caught:
        read()
    assert time.monotonic() - began < MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < limit >> 10
    return str(caught.value)


@pytest.mark.parametrize("is_digested", [True, False])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds that it calls unfinished
def test_checkpoint_with_unsupported_tensor_types_or_values_is_refused(kind, is_digested, tmp_path):
    path = tmp_path / "checkpoint.pt"
    state = {"format": 1, "behavior": "Toy", "learner": {"step": 1, "algorithm": HOSTILE[kind]()}}
    if is_digested:
        state |= {"format": 2, "digest": "0" * 64}
    torch.save(state, path)
    message = refused(path, lambda: load_checkpoint(path))
    assert message.startswith(f"{path}: this is not a checkpoint of this program")


def calls(function, argument):
    """A pickle that calls a function that torch's reader allows."""

    class Call:
        def __reduce__(self):
            return function, argument

    return pickle.dumps({"format": 1, "x": Call()}, protocol=2)


@pytest.mark.parametrize(
    "content",
    [
        calls(bytearray, (10**10,)),
        calls(torch.Tensor, (10**10,)),
        b"\x80\x02" + b"K\x01" * 600_000 + b".",
        b"\x80\x02}q\x00X\xff\xff\xff\x7fa.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
    ],
    ids=["bytearray", "tensor", "numbers", "length", "memo"],
)
def test_checkpoint_with_a_pickle_that_allocates_memory_is_refused(content, tmp_path):
    path, source = tmp_path / "checkpoint.pt", io.BytesIO()
    torch.save({"format": 1, "x": torch.ones(2)}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, content if is_pickle else old.read(entry))
    refused(path, lambda: load_checkpoint(path))


def test_checkpoint_with_a_compressed_archive_is_refused(tmp_path):
    """A small file that would unpack to 268 MB."""
    path = tmp_path / "checkpoint.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"format": 1}, protocol=2))
        archive.writestr("archive/data/0", bytes(1 << 28))
    refused(path, lambda: load_checkpoint(path))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The values of a resume file."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        stop = "pipeline.trainer.api.stop_on_signal"
        patched.setattr(stop, lambda: contextlib.nullcontext(StopsAfter(40)))
        with pytest.raises(Interrupted):
            train(folder)
    return load_checkpoint(folder / "Toy" / "checkpoint.pt")


def train(folder, **options):
    toy = InProcessEnvironment(Chase(n_agents=4))
    return pipeline.train(toy, RUN, seed=1, run_dir=folder, **options)


def changed(state, place, value):
    key, *rest = place
    return {**state, key: changed(state[key], rest, value) if rest else value}


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [None], {"x": "x"}, torch.ones(2)])
@pytest.mark.parametrize(
    "place",
    [
        *("run", "run.steps", "run.lessons", "run.next_checkpoint", "run.added", "best"),
        *("learner", "learner.step", "learner.algorithm", "learner.recorded"),
        *("learner.statistics", "experience.slots", "experience.closed"),
    ],
)
def test_checkpoint_with_values_of_wrong_types_gives_at_most_one_error_line(
    place, value, stopped, tmp_path
):
    """The file is refused in one line, or used without the wrong value."""
    state = changed(stopped, place.split("."), value)
    path = tmp_path / "Toy" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save({"format": 2, "digest": digest(state), **state}, path)
    for read in (
        lambda: load_policy(path),
        lambda: resumes_exactly(tmp_path, RUN),
        lambda: train(tmp_path, resume=True),
    ):
        try:
            read()
        except CheckpointError as error:
            assert re.fullmatch(r"[^\n]{1,600}", str(error))  # noqa: PT017  # or no error


def test_checkpoint_whose_settings_describe_a_larger_network_is_refused(stopped, tmp_path):
    path = tmp_path / "checkpoint.pt"
    settings = {"network_settings": {"hidden_units": 30_000, "num_layers": 1}}
    state = {**stopped, "settings": stopped["settings"] | settings}
    torch.save({"format": 2, "digest": digest(state), **state}, path)
    assert "size mismatch" in refused(path, lambda: load_policy(path))
