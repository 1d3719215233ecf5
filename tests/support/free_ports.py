"""Consecutive free TCP ports."""

import socket
from contextlib import ExitStack


def free_ports(n_ports: int) -> int:
    """Return the first of `n_ports` consecutive free ports."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + n_ports):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return int(first)
