"""Players that the trainer does not start: here threads that call like a player's process."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from free_ports import free_ports
from toys import Chase

from pipeline.envs.attach import attach_workers
from pipeline.envs.workers import WorkerSet
from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityException,
    UnityTimeOutException,
    UnityWorkerInUseException,
)
from pipeline.settings.trainer.schema import EnvironmentSettings
from pipeline.simulators.client import converse
from pipeline.wire.transport import calls
from pipeline.wire.transport.server import TRANSPORT_VARIABLE


class Leaves(Chase):
    """A game that breaks the connection in its third step, as a killed player does."""

    left = 3

    def step(self, actions):
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("killed")
        return super().step(actions)


@pytest.fixture
def ports() -> int:
    """The first of two free ports."""
    return free_ports(2)


@pytest.fixture
def play() -> Iterator[Callable[..., list[int]]]:
    """A function that runs players one after another in a thread; returns the seeds they get."""
    threads = []
    seeds: dict[int, list[int]] = {}

    def start(port: int, *kinds: type[Chase]) -> list[int]:
        port_seeds = seeds.setdefault(port, [])

        def make(kind: type[Chase], seed: int, _areas: int) -> Chase:
            port_seeds.append(seed)
            return kind(n_agents=2)

        def run() -> None:
            for kind in kinds or (Chase,):
                with contextlib.suppress(UnityCommunicationException):
                    converse(partial(make, kind), port=port)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return port_seeds

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def free(ports: int) -> Iterator[None]:
    """Check that no process listens on the two ports, by listening there during the block."""
    addresses = [("127.0.0.1", port) for port in (ports, ports + 1)]
    with socket.create_server(addresses[0]), socket.create_server(addresses[1]):
        yield


def played(workers: WorkerSet, n_steps: int = 6) -> list[list[int]]:
    """Reset and step the workers; return the workers that were restarted in each step."""
    with workers:
        workers.reset()
        restarted = []
        for _ in range(n_steps):
            workers.step()
            restarted.append(workers.take_restarted())
    return restarted


def attached(ports: int, **options):
    options = {"seed": 5, "timeout_wait": 20, "base_port": ports, **options}
    return attach_workers(2, **options)


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_players_may_connect_in_any_order_and_get_seeds_in_the_order_of_their_ports(
    transport, ports, play, monkeypatch, caplog
):
    monkeypatch.setenv(TRANSPORT_VARIABLE, transport)
    with caplog.at_level(logging.INFO, "pipeline"):
        second = play(ports + 1)
        first = play(ports)
        with attached(ports) as workers:
            workers.reset()
            workers.step()
            assert [len(env.get_steps("Toy?team=0")[0]) for env in workers.envs] == [2, 2]
            assert [env.port for env in workers.envs] == [ports, ports + 1]
    assert (first, second) == ([5], [6])
    lines = [record.getMessage() for record in caplog.records]
    assert f"Waiting for player 2 of 2 on port {ports + 1}." in lines
    assert f"Connected: player 1 of 2 on port {ports}." in lines


def test_player_that_reconnects_at_once_continues_with_a_new_episode(ports, play, caplog):
    play(ports)
    seeds = play(ports + 1, Leaves, Chase)
    with caplog.at_level(logging.INFO, "pipeline"):
        restarted = played(attached(ports, restarts=EnvironmentSettings()))
    assert restarted == [[], [], [1], [], [], []]
    assert seeds == [6, 8]
    waited = f"Waiting up to 20 s for player 2 of 2 on port {ports + 1} to connect again."
    assert waited in [record.getMessage() for record in caplog.records]


@pytest.fixture
def one_leaves(ports, play, monkeypatch) -> None:
    """Two players; the second player breaks its connection."""
    monkeypatch.setattr(calls, "LOST_S", 0.05)
    play(ports)
    play(ports + 1, Leaves)


@pytest.mark.usefixtures("one_leaves")
def test_player_that_does_not_reconnect_in_time_ends_the_run(ports):
    unlimited = EnvironmentSettings(max_lifetime_restarts=-1, restarts_rate_limit_n=-1)
    workers = attached(ports, timeout_wait=1, restarts=unlimited)
    with pytest.raises(UnityException) as caught:
        played(workers)
    assert str(caught.value).startswith(
        f"player 2 of 2 on port {ports + 1} did not connect again within 1 s; start it"
    )
    with free(ports):
        pass


@pytest.mark.usefixtures("one_leaves")
def test_run_that_is_stopping_does_not_wait_for_a_disconnected_player(ports, monkeypatch):
    monkeypatch.setattr("pipeline.envs.workers._GRACE_S", 0.0)
    workers = attached(ports, timeout_wait=1000, restarts=EnvironmentSettings())
    answers = iter([False])  # False when the player is lost; True while the worker waits for it
    workers.should_stop = lambda: next(answers, True)
    with pytest.raises(UnityException, match="told to stop"):
        played(workers)


@pytest.mark.usefixtures("one_leaves")
def test_disconnected_player_ends_the_run_if_no_restarts_are_allowed(ports):
    with pytest.raises(UnityCommunicatorStoppedException):
        played(attached(ports))


def test_error_about_a_player_that_does_not_connect_names_the_player_and_its_port(ports, play):
    play(ports)
    with pytest.raises(UnityTimeOutException) as caught:
        attached(ports, timeout_wait=0.3)
    assert str(caught.value).startswith(
        f"1 of 2 players did not connect within 0.3 s: 2 (port {ports + 1}); start each"
    )
    with free(ports):
        pass


def test_port_that_another_program_uses_is_refused_and_ports_opened_before_are_released(ports):
    with socket.create_server(("127.0.0.1", ports + 1)):
        with pytest.raises(UnityWorkerInUseException, match=r"choose other ports with --base-po"):
            attached(ports)
        with socket.create_server(("127.0.0.1", ports)):
            pass
