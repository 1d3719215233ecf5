"""The client of `forked`: it has another process run a program with the caller's streams.

Commands on PATH begin with this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence


def request(
    address: str,
    arguments: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    streams: Sequence[int],
    timeout: float | None = None,
) -> tuple[socket.socket, int]:
    """Have `python *arguments` started; return the socket that tells its end, and its pid."""
    program = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program.settimeout(timeout)
    program.connect(address)
    task = {"arguments": list(arguments), "cwd": folder, "env": dict(variables)}
    socket.send_fds(program, [json.dumps(task).encode()], list(streams))
    return program, int(program.recv(100))


def status(program: socket.socket) -> int:
    """Wait for the end: the exit code, or the signal's number, negative."""
    return int(program.recv(100))


def main(address: str, arguments: list[str]) -> int:
    """Stand in for the program: hand on streams and signals, and end as it does."""
    program, pid = request(address, arguments, os.getcwd(), os.environ, [0, 1, 2])  # noqa: PTH109

    def hand_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = status(program)
    return code if code >= 0 else 128 - code
