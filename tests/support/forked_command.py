"""The client of `forked`: another process runs a program with the caller's streams.

Commands on PATH begin with this module, so it imports little.
"""

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
    """Start `python *arguments`; return the socket for its exit code, and its process number."""
    program = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program.settimeout(timeout)
    program.connect(address)
    task = {"arguments": list(arguments), "cwd": folder, "env": dict(variables)}
    socket.send_fds(program, [json.dumps(task).encode()], list(streams))
    return program, int(program.recv(100))


def status(program: socket.socket) -> int:
    """Wait until the program ends; return its exit code, or minus the number of its signal."""
    return int(program.recv(100))


def main(address: str, arguments: list[str]) -> int:
    """Run the program with this process's streams and signals; return its exit code."""
    program, pid = request(address, arguments, os.getcwd(), os.environ, [0, 1, 2])  # noqa: PTH109

    def hand_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = status(program)
    return code if code >= 0 else 128 - code
