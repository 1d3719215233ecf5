"""The token by which a player from another machine proves itself before anything else.

The token itself does not cross the network: each end shows that it knows it, with a digest of two
random numbers (HMAC-SHA256, RFC 2104). What follows is the usual HTTP/2, neither encrypted nor
signed.

    trainer   pipeline-token 1 RANDOM
    player    RANDOM DIGEST
    trainer   welcome DIGEST            or: refused REASON, and the end

Each line ends with a newline, and numbers are written in hexadecimal digits.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError, UnityCommunicationException

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

VARIABLE = "PIPELINE_TOKEN"
MAX_LINE_BYTES = 256
_MIN_BYTES = 16
_HELLO, _WELCOME, _REFUSED = b"pipeline-token 1 ", b"welcome ", b"refused "
_MAKE_ONE = "`openssl rand -hex 32 > FILE` makes one"


class HungUpError(UnityCommunicationException):
    """The trainer closed the connection without a message."""


def read_token(file: Path | None) -> bytes:
    """Return the token in a file, or without one in the environment variable PIPELINE_TOKEN.

    Raises:
        SettingsError: There is none, or it is too short.
    """
    source = VARIABLE if file is None else f"--token-file {file}"
    if file is None:
        token = os.environ.get(VARIABLE, "").encode().strip()
        if not token:
            raise SettingsError(f"a token is missing: give --token-file FILE or {VARIABLE}")
    else:
        token = file.read_bytes().strip()
        if os.name == "posix" and file.stat().st_mode & 0o077:
            _log.warning("%s: others on this machine may read it; chmod 600 %s", source, file)
    if len(token) < _MIN_BYTES:
        raise SettingsError(
            f"{source}: the token has {len(token)} bytes, and needs at least {_MIN_BYTES}; "
            f"{_MAKE_ONE}"
        )
    return token


def is_loopback(address: str) -> bool:
    """Return whether an IP address is one that only this machine reaches itself by."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Challenge:
    """The trainer's demand for the token on one connection.

    Attributes:
        line: the line to send first.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._random = secrets.token_hex(16).encode()
        self.line = _HELLO + self._random + b"\n"

    def welcome(self, answer: bytes) -> bytes | None:
        """Return the line that answers the player's, or None if its digest is wrong."""
        theirs, _, digest = answer.partition(b" ")
        # In constant time: how long it takes must not tell how much of a guess is right.
        if not hmac.compare_digest(digest, _digest(self._token, b"player", self._random, theirs)):
            return None
        return _WELCOME + _digest(self._token, b"trainer", self._random, theirs) + b"\n"


def refusal(why: str) -> bytes:
    """Return the line for a player whose answer is refused."""
    return _REFUSED + why.encode() + b"\n"


def introduce(sock: socket.socket, token: bytes | None, trainer: str) -> None:
    """Say the token on a new connection to a trainer, which asks for it unless it is local.

    The socket has a time-out; what comes after the last line stays in it.

    Raises:
        HungUpError: The trainer closed the connection at once.
        UnityCommunicationException: It refuses the token, or does not know it, or is no trainer.
        OSError: The connection broke.
    """
    # Peeked at and not read: the first bytes of HTTP/2 must stay for the connection.
    if sock.recv(1, socket.MSG_PEEK) != _HELLO[:1]:
        _check_unasked(sock, trainer)
        return
    hello = _line(sock, trainer)
    if not hello.startswith(_HELLO):
        raise UnityCommunicationException(f"{trainer}: what listens there is no trainer")
    if token is None:
        raise UnityCommunicationException(
            f"{trainer}: the trainer asks for its token; give --token-file FILE or {VARIABLE}"
        )
    theirs, ours = hello.removeprefix(_HELLO), secrets.token_hex(16).encode()
    sock.sendall(ours + b" " + _digest(token, b"player", theirs, ours) + b"\n")
    answer = _line(sock, trainer)
    if answer.startswith(_REFUSED):
        why = answer.removeprefix(_REFUSED).decode(errors="replace")
        raise UnityCommunicationException(f"{trainer}: the trainer refuses this player: {why}")
    proof = answer.removeprefix(_WELCOME)
    if not hmac.compare_digest(proof, _digest(token, b"trainer", theirs, ours)):
        raise UnityCommunicationException(
            f"{trainer}: what listens there does not know the token; it is not your trainer"
        )


def _check_unasked(sock: socket.socket, trainer: str) -> None:
    if not sock.recv(1, socket.MSG_PEEK):
        raise HungUpError(
            f"{trainer}: the trainer hangs up: the player of this port is there already; take the "
            "port of another"
        )
    if not is_loopback(sock.getpeername()[0]):
        raise UnityCommunicationException(
            f"{trainer}: what listens there does not ask for the token; it is not a trainer with "
            "--listen"
        )


def _line(sock: socket.socket, trainer: str) -> bytes:
    """Return the next line, and read nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            raise HungUpError(f"{trainer}: the trainer hung up")
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise UnityCommunicationException(f"{trainer}: what listens there is no trainer")
    return line[:-1]


def _digest(token: bytes, speaker: bytes, trainers: bytes, players: bytes) -> bytes:
    # With `speaker` in it, so that neither end can send the other's digest back as its own.
    return hmac.digest(token, b" ".join((speaker, trainers, players)), "sha256").hex().encode()
