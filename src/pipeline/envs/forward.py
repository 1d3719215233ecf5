"""Bring a player of this machine to a trainer on another one.

A Unity player calls `localhost` only, and cannot say a token. So this module listens where the
player calls, says the token to the trainer, and then passes bytes both ways, without looking at
them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.envs import launch
from pipeline.envs.restarts import RestartBudget
from pipeline.errors import UnityCommunicationException, UnityEnvironmentException, one_line
from pipeline.protocol.incoming import accepted_from, listen
from pipeline.protocol.peers import PeerCheck
from pipeline.protocol.token import HungUpError, introduce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
_CONNECT_S, _RETRY_S, _LOOK_S = 10.0, 0.2, 0.2
_TAKEN_S = 5.0
"""Seconds for which a trainer may hang up, until it has noticed that its last player is gone."""
_HANG_UP_S, _END_S = 1.0, 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds and number of probes, after which a machine that is gone counts as hung up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """Where a trainer listens for one player, and the token that it asks for."""

    host: str
    port: int
    token: bytes | None = None

    def __str__(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, wait_s: float) -> socket.socket | None:
        """Connect to the trainer; None if no one listens within `wait_s`.

        Raises:
            UnityCommunicationException: The trainer refuses the token, has its player already, or
                cannot be found.
        """
        start = time.monotonic()
        while True:
            try:
                return self._connected()
            except (socket.gaierror, UnicodeError) as error:
                raise UnityCommunicationException(
                    f"--to {self}: no machine of this name is known here"
                ) from error
            # A trainer hangs up while it believes that its last player is still there.
            except HungUpError:
                if time.monotonic() - start > _TAKEN_S:
                    raise
            except OSError:
                if time.monotonic() - start > wait_s:
                    return None
            time.sleep(_RETRY_S)

    def _connected(self) -> socket.socket:
        with ExitStack() as stack:
            sock = socket.create_connection((self.host, self.port), timeout=_CONNECT_S)
            stack.enter_context(sock)
            introduce(sock, self.token, str(self))
            # No limit from here on: a trainer may be silent for as long as an update takes.
            sock.settimeout(None)
            # Each step is a small message whose answer is waited for, so none may be held back.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that loses its power says no farewell.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            stack.pop_all()
        return sock


def forward(
    trainer: Trainer,
    *,
    port: int = 0,
    executable: Path | None = None,
    no_graphics: bool = False,
    additional_args: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> None:
    """Forward bytes between the trainer and one player after another, until the trainer ends.

    The player calls on `port`, where 0 lets the system choose; without an `executable` its user
    starts it. The trainer has to listen within `timeout_s`.

    A player that was started here and ends is started again, at most once a minute.

    Raises:
        UnityCommunicationException: There is no trainer, or it refuses this player.
        UnityEnvironmentException: The player ended too often, or cannot be started.
        OSError: The port is taken.
    """
    budget = RestartBudget()
    with ExitStack() as stack:
        # Before the trainer is called, so that a port which is taken is noticed first.
        listeners = [stack.enter_context(closing(listener)) for listener in listen(port, None)]
        player_port = listeners[0].getsockname()[1]
        _log.info("Connecting to the trainer at %s.", trainer)
        connection = trainer.connect(timeout_s)
        if connection is None:
            raise UnityCommunicationException(
                f"--to {trainer}: no trainer listens there (waited {timeout_s:g} s); start it with "
                "--attach and --listen, and check address, port and firewall"
            )
        command, peers = None, PeerCheck(is_started_here=executable is not None)
        if executable is not None:
            command = launch.command_line(
                executable,
                port=player_port,
                no_graphics=no_graphics,
                additional_args=additional_args,
            )
        end_reason = None
        while connection is not None:
            with connection:
                if end_reason is not None:
                    _count(budget, end_reason)
                end_reason = _serve(connection, listeners, command, peers)
            # Without waiting: where no one listens any more, the trainer has ended.
            connection = trainer.connect(0.0)
    _log.info("The trainer at %s has ended.", trainer)


def _count(budget: RestartBudget, reason: str) -> None:
    """Count the end of a player that we started; raise if it ended too often."""
    if refusal := budget.refusal(0):
        raise UnityEnvironmentException(f"The player ended again ({refusal} allowed): {reason}")
    _log.warning("Starting the player again after '%s'.", reason)
    budget.spend(0)


def _serve(
    trainer: socket.socket,
    listeners: Sequence[socket.socket],
    command: Sequence[str] | None,
    peers: PeerCheck,
) -> str | None:
    """Pass on what one player and the trainer say; return why a player that we started ended."""
    if command is None:
        _log.info(
            "Connected to the trainer. Waiting for the player: start it with --mlagents-port %d, "
            "or press Play in a Unity Editor with that port.",
            listeners[0].getsockname()[1],
        )
        _pass_on(trainer, listeners, lambda: None, peers)
        return None
    _log.info("Connected to the trainer. Starting the player.")
    process = launch.EnvironmentProcess(command, peers=peers)
    try:
        _pass_on(trainer, listeners, process.check, peers)
        # The player hangs up before it ends; its exit code says whether to bring it back.
        process.wait(_END_S)
        process.check()
    except UnityEnvironmentException as error:
        return one_line(error)
    finally:
        process.close(0.0)
    return f"it had not ended after {_END_S:g} s, and was killed"


def _pass_on(
    trainer: socket.socket,
    listeners: Sequence[socket.socket],
    check: Callable[[], None],
    peers: PeerCheck,
) -> None:
    """Wait for a player, and pass bytes both ways until it or the trainer hangs up.

    Until a player calls, `check` is called now and then; it raises when no player will.
    """
    player, early = _first_call(trainer, listeners, check, peers)
    if player is None:
        return
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    def copy(source: socket.socket, target: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                target.sendall(chunk)
        with contextlib.suppress(OSError):
            # Half closed: what the other side is still sending arrives.
            target.shutdown(socket.SHUT_WR)
        ends.put(name)

    with player:
        _log.info("The player has connected.")
        # What the trainer said before the player was there belongs at the start of its stream.
        player.sendall(early)
        ways = ((player, trainer, "player"), (trainer, player, "trainer"))
        threads = [threading.Thread(target=copy, args=way, daemon=True) for way in ways]
        for thread in threads:
            thread.start()
        try:
            _log.info("The %s has hung up.", ends.get())
            with contextlib.suppress(queue.Empty):
                # A moment for the other direction to end by itself, before both are cut.
                ends.get(timeout=_HANG_UP_S)
        finally:
            for sock in (player, trainer):
                with contextlib.suppress(OSError):
                    # Wakes the threads out of `recv`; closing alone would not.
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def _first_call(
    trainer: socket.socket,
    listeners: Sequence[socket.socket],
    check: Callable[[], None],
    peers: PeerCheck,
) -> tuple[socket.socket | None, bytes]:
    """Return the player's connection, and what the trainer has said by then.

    The connection is None if the trainer hung up.
    """
    early = b""
    with selectors.DefaultSelector() as selector:
        # The trainer is watched as well, so that its end is noticed while no player calls.
        for sock in (trainer, *listeners):
            selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_LOOK_S):
                if key.fileobj is not trainer:
                    for player in accepted_from(key.fileobj, 1):  # type: ignore[arg-type]  # a listener
                        if foreign := peers.refusal_at(player):
                            _log.warning("A call is refused: %s.", foreign)
                            player.close()
                            continue
                        player.setblocking(True)
                        player.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return player, early
                elif chunk := trainer.recv(_CHUNK_BYTES):
                    early += chunk
                else:
                    return None, early
            check()
