"""The first connection that greets owns the conversation; other clients are refused."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest
from http2_peer import message, no_check
from servers import AnyServer, GeneralClient, HastyGrpcServer, both_servers

from pipeline.errors import UnityTimeOutException
from pipeline.wire.codec.generated.messages import ReceivedMessageProto, UnityMessageProto
from pipeline.wire.transport import calls
from pipeline.wire.transport import server as server_module
from pipeline.wire.transport.calls import METHOD
from pipeline.wire.transport.server import Server

HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check other connections every 0.05 s, so that the tests are fast."""
    monkeypatch.setattr(server_module, "_KEEPER_INTERVAL_S", 0.05)


def step(reward: float = 0.0) -> bytes:
    """Return an environment's message with the steps of an agent, which is no greeting."""
    out = UnityMessageProto(header={"status": 200})
    info = out.unity_output.rl_output.agentInfos["Agent?team=0"].value.add()
    info.reward = reward
    return out.SerializeToString()


NO_GREETINGS = {
    "a step": step(),
    "status 400": message(status=400),
    "status 0": message(status=0),
    "no protobuf": b"\xff\xff\xff",
    "nothing": b"",
    "an empty output": UnityMessageProto(
        header={"status": 200}, unity_output={}
    ).SerializeToString(),
}


def exchange(server: AnyServer, client: GeneralClient, data: bytes) -> None:
    """Make one call of the environment, and check its answer."""
    answer = client.start(data)
    assert server.receive(20, no_check) == ReceivedMessageProto.FromString(data)
    server.reply(message(9))
    assert answer.result() == message(9)


def while_receiving(server: AnyServer, act: Callable[[], object]) -> object:
    """Return the result of `act`, called while the server waits; an environment greets later."""
    client = GeneralClient(server.port)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(server.receive, 20, no_check)
        result = act()
        answer = client.start(message(1))
        assert received.result() == ReceivedMessageProto.FromString(message(1))
    server.reply(message(2))
    assert answer.result() == message(2)
    exchange(server, client, step(1.0))
    client.close()
    return result


@both_servers
@pytest.mark.parametrize("sent", NO_GREETINGS.values(), ids=NO_GREETINGS.keys())
def test_first_call_without_a_greeting_is_refused_and_the_environment_can_greet_later(kind, sent):
    with kind() as server, closing(GeneralClient(server.port)) as stranger:
        refusal = while_receiving(server, lambda: stranger.refusal(sent))
    assert refusal == grpc.StatusCode.FAILED_PRECONDITION


def test_only_the_first_ten_refused_calls_are_logged_as_warnings(caplog):
    def refused_twelve_times() -> None:
        for _ in range(12):
            assert stranger.refusal(step()) == grpc.StatusCode.FAILED_PRECONDITION

    caplog.set_level(logging.DEBUG, "pipeline")
    with Server() as server, closing(GeneralClient(server.port)) as stranger:
        while_receiving(server, refused_twelve_times)
    levels = [x.levelname for x in caplog.records if "A call is refused" in x.message]
    assert levels == ["WARNING"] * 10 + ["DEBUG"] * 2


@both_servers
@pytest.mark.parametrize(
    "method",
    [HEALTH, METHOD.lower(), METHOD + "/", "/communicator_objects.UnityToExternalProto/Other"],
)
def test_call_of_an_unknown_method_is_answered_as_unimplemented_and_delivers_no_message(
    kind, method
):
    with kind() as server, closing(GeneralClient(server.port)) as stranger:
        refusal = while_receiving(server, lambda: stranger.refusal(message(), method))
    assert refusal == grpc.StatusCode.UNIMPLEMENTED


@both_servers
def test_environment_that_calls_an_unknown_method_delivers_no_message(kind):
    with kind() as server, ThreadPoolExecutor(1) as pool:
        client = GeneralClient(server.port)
        exchange(server, client, message())
        received = pool.submit(server.receive, 20, no_check)
        assert client.refusal(step(), HEALTH) == grpc.StatusCode.UNIMPLEMENTED
        answer = client.start(step(2.0))
        assert received.result() == ReceivedMessageProto.FromString(step(2.0))
        server.reply(message())
        answer.result()
        client.close()


@both_servers
@pytest.mark.parametrize("sent", [*NO_GREETINGS.values(), message()])
def test_another_client_is_refused_during_a_conversation_whatever_message_it_sends(kind, sent):
    with kind() as server:
        client = GeneralClient(server.port)
        exchange(server, client, message())
        stranger = GeneralClient(server.port)
        future = stranger.start(sent)
        for k in range(3):
            exchange(server, client, step(float(k)))
        answer = client.start(step(5.0))
        assert server.receive(20, no_check) == ReceivedMessageProto.FromString(step(5.0))
        code = future.exception().code()  # refused while the environment waits for its answer, too
        assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
        server.reply(message())
        answer.result()
        stranger.close()
        exchange(server, client, step(6.0))
        client.close()


@both_servers
def test_client_that_connected_first_and_disconnects_late_does_not_end_the_conversation(
    kind, monkeypatch
):
    monkeypatch.setattr(calls, "LOST_S", 0.05)
    with kind() as server, ThreadPoolExecutor(1) as pool:
        stranger, client = GeneralClient(server.port), GeneralClient(server.port)
        received = pool.submit(server.receive, 20, no_check)
        stranger.refusal(step())
        answer = client.start(message())
        received.result()
        server.reply(message())
        answer.result()
        stranger.close()
        with pytest.raises(UnityTimeOutException):
            server.receive(0.4, no_check)
        exchange(server, client, step())
        client.close()


@both_servers
def test_environment_may_continue_on_a_new_connection_after_its_first_connection_broke(kind):
    with kind() as server:
        for k in range(3):
            client = GeneralClient(server.port)
            exchange(server, client, message() if k == 0 else step(float(k)))
            client.close()
            if kind is HastyGrpcServer:  # the runtime's threads close the socket later
                while server._is_owner_connected():
                    server._next_owner_check = 0.0


def test_late_end_of_an_earlier_call_does_not_count_as_a_lost_connection():
    with HastyGrpcServer() as server:
        client = GeneralClient(server.port)
        exchange(server, client, message())
        first = client.start(step(1.0))
        server.receive(20, no_check)
        older = server._latest
        first.cancel()
        second = client.start(step(2.0))
        assert server.receive(20, no_check) == ReceivedMessageProto.FromString(step(2.0))
        server._on_call_end(older)
        assert server._lost_at is None
        server.reply(message())
        second.result()
        client.close()
