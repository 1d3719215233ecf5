"""Workers that a person starts: Unity Editors and Unity's players, which connect to the trainer."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from pipeline.envs.launch import EDITOR_PORT_TAKEN, PRESS_PLAY, listen_for
from pipeline.envs.side_channels import SideChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import (
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityException,
    UnityTimeOutException,
    one_line,
)
from pipeline.settings.trainer.schema import EnvironmentSettings
from pipeline.wire.transport.calls import time_out
from pipeline.wire.transport.server import AnyServer

_log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
# Seconds in which all players that have not connected are checked once.
_CHECK_S = 0.2
_HOW_TO_START = (
    "Start each player with --mlagents-port and its port, or press Play in a Unity Editor with "
    "that port; all have to connect within %g s."
)
_PORT_TAKEN = "End the process that listens there, or choose other ports with --base-port."


def attach_workers(
    n_players: int,
    *,
    seed: int,
    timeout_wait: float,
    base_port: int | None = None,
    side_channels: Callable[[], Sequence[SideChannel]] | None = None,
    restarts: EnvironmentSettings | None = None,
    num_areas: int = 1,
) -> WorkerSet:
    """Wait for `n_players` players; player k uses port `base_port` + k and seed `seed` + k.

    If a player fails, its worker waits until a player connects again, because the trainer cannot
    restart a process that a person has started.

    Args:
        n_players: number of players.
        seed: seed of player 0; at its n-th reconnection, `seed` + n * `n_players`.
        timeout_wait: seconds within which all players must connect, and later each player must
            answer.
        base_port: TCP port of player 0; None for the port that the Unity Editor calls.
        side_channels: returns new side channels for one player.
        restarts: settings with the limits of reconnections; None: a lost player's error is raised.
        num_areas: number of training areas in each player, if the player replicates its area.

    Raises:
        UnityWorkerInUseException: A port is taken.
        UnityTimeOutException: A player did not connect.
        UnityEnvironmentException: A player has an incompatible version.
    """
    with ExitStack() as stack:
        servers: list[AnyServer] = []
        # All ports are opened first, so that a taken port is noticed before players are started.
        for player in range(n_players):
            # The Editor always calls on the same port, so one Editor needs no `base_port`.
            first = UnityEnvironment.DEFAULT_EDITOR_PORT if base_port is None else base_port
            remedy = EDITOR_PORT_TAKEN if base_port is None and player == 0 else _PORT_TAKEN
            servers.append(listen_for(player, first + player, remedy))
            # Each server is pushed on the stack at once, so that it is closed if a later port is
            # taken.
            stack.push(servers[-1])
        names = [
            f"player {k} of {n_players} on port {server.port}"
            for k, server in enumerate(servers, 1)
        ]

        def connect_again(worker: int, number: int) -> UnityEnvironment:
            name = names[worker]
            _log.info("Waiting up to %g s for %s to connect again.", timeout_wait, name)
            try:
                next(_callers(servers, {worker}, timeout_wait, workers.should_stop))
            except UnityTimeOutException as error:
                raise UnityException(
                    f"{name} did not connect again within {timeout_wait:g} s; start it and "
                    "continue with --resume, or give more time with --timeout-wait"
                ) from error
            return connect(worker, number)

        def connect(worker: int, number: int) -> UnityEnvironment:
            return UnityEnvironment(
                None,
                server=servers[worker],
                # No other worker and no other reconnection gets this seed.
                seed=seed + worker + n_players * number,
                side_channels=side_channels() if side_channels else (),
                timeout_wait=timeout_wait,
                num_areas=num_areas,
            )

        if n_players == 1 and base_port is None:
            _log.info(PRESS_PLAY, servers[0].port)
        else:
            for name in names:
                _log.info("Waiting for %s.", name)
            _log.info(_HOW_TO_START, timeout_wait)
        envs: dict[int, UnityEnvironment] = {}
        # Players connect in any order, so the handshake with a player begins when the player calls.
        missing = set(range(n_players))
        for worker in _callers(servers, missing, timeout_wait):
            try:
                envs[worker] = stack.enter_context(connect(worker, 0))
            except (UnityCommunicationException, UnityCommunicatorStoppedException) as error:
                _log.warning("Waiting for %s again: %s", names[worker], one_line(error))
            else:
                # A worker with a refused player stays missing, so that the user can start another
                # player.
                missing.remove(worker)
                _log.info("Connected: %s.", names[worker])
        workers = WorkerSet(
            [envs[worker] for worker in range(n_players)],
            relaunch=connect_again if restarts else None,
            restarts=restarts,
            servers=servers,
        )
        # From now on the worker set owns and closes the servers.
        stack.pop_all()
    return workers


def _callers(
    servers: Sequence[AnyServer],
    missing: set[int],
    timeout_s: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yield the number of each worker to which a player connects, until no worker is `missing`.

    The code that iterates has to remove a worker from `missing` after its player's handshake.
    """
    deadline = time.monotonic() + timeout_s
    next_line = time.monotonic() + _LOG_INTERVAL_S
    while missing:
        for worker in sorted(missing):
            # All players share the time of one check, so that a signal is noticed in 0.2 s.
            if servers[worker].is_called(_CHECK_S / len(missing)):
                yield worker
        if should_stop():
            raise UnityException("the run was told to stop while it waited for a player")
        now = time.monotonic()
        if missing and now >= deadline:
            if len(servers) == 1:
                raise time_out(timeout_s)
            raise UnityTimeOutException(
                f"{len(missing)} of {len(servers)} players did not connect within {timeout_s:g} s: "
                f"{_player_list(servers, missing)}; start each with --mlagents-port and its port, "
                "give more time with --timeout-wait, or name an executable with --env, which is "
                "started here"
            )
        if missing and now >= next_line:
            text = "Still waiting for player %s; %.0f s are left."
            _log.info(text, _player_list(servers, missing), deadline - now)
            next_line = now + _LOG_INTERVAL_S


def _player_list(servers: Sequence[AnyServer], workers: set[int]) -> str:
    return ", ".join(f"{worker + 1} (port {servers[worker].port})" for worker in sorted(workers))
