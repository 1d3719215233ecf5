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
    port: int = 0, *, worker_id: int = 0, host: str | None = None, transport: str | None = None
) -> Server | GrpcServer:
    """Listen for one environment.

    Args:
        port: TCP port; 0 lets the system choose.
        worker_id: the worker this is for, for the error.
        host: address to listen on; None means loopback.
        transport: "sockets" or "grpc"; None means what the environment variable
            PIPELINE_TRANSPORT says, "sockets" if nothing.

    Raises:
        SettingsError: There is no such transport.
        UnityWorkerInUseException: The port is taken.
    """
    where = "transport" if transport is not None else VARIABLE
    name = transport if transport is not None else os.environ.get(VARIABLE) or TRANSPORTS[0]
    if name not in _SERVERS:
        raise SettingsError(f"{where}: '{name}' is no transport; choose from {list(TRANSPORTS)}")
    return _SERVERS[name](port, worker_id=worker_id, host=host)
