"""Choose how the trainer's end of the conversation is carried."""

from __future__ import annotations

import os

from pipeline.errors import SettingsError
from pipeline.protocol.grpc_server import GrpcServer
from pipeline.protocol.server import Server

VARIABLE = "PIPELINE_TRANSPORT"
_SERVERS: dict[str, type[Server | GrpcServer]] = {"sockets": Server, "grpc": GrpcServer}
TRANSPORTS = tuple(_SERVERS)


def open_server(
    port: int = 0,
    *,
    worker_id: int = 0,
    host: str | None = None,
    transport: str | None = None,
    token: bytes | None = None,
) -> Server | GrpcServer:
    """Listen for one environment; other arguments and errors as of `Server`.

    A `transport` of None means what the environment variable PIPELINE_TRANSPORT says, "sockets" if
    it says nothing.

    Raises:
        SettingsError: There is no such transport, or it cannot ask for a token.
    """
    where = "transport" if transport is not None else VARIABLE
    name = transport if transport is not None else os.environ.get(VARIABLE) or TRANSPORTS[0]
    if name not in _SERVERS:
        raise SettingsError(f"{where}: '{name}' is no transport; choose from {list(TRANSPORTS)}")
    if token is None:
        return _SERVERS[name](port, worker_id=worker_id, host=host)
    if name != "sockets":
        raise SettingsError(
            f"{where}: '{name}' cannot ask for a token, as --listen does; use 'sockets', or bring "
            "players from elsewhere through an ssh tunnel"
        )
    return Server(port, worker_id=worker_id, host=host, token=token)
