"""`pipeline ui`: serve MLflow's pages on the loopback device, with few processes."""

import argparse
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

from pipeline.cli.parser import Parser, option
from pipeline.dag import engines, process
from pipeline.errors import PipelineError, SettingsError
from pipeline.tracking import mlflow_store

# Seconds that the server may take until its first answer, and to end after a signal.
_START_S, _END_S = 300.0, 10.0
_LAST_PORT = 65535
_QUIET = {"MLFLOW_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
_NOISE = b"[MLflow] Security middleware enabled"
"""Start of a line that MLflow prints at any log level."""
_log = logging.getLogger(__name__)


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline ui`."""
    option(parser, "--port N", "port of the server", default=5000)


def run(arguments: argparse.Namespace) -> None:
    """Log the addresses of MLflow's pages; serve them unless MLFLOW_TRACKING_URI's server does."""
    root, port = Path.cwd(), arguments.port
    if learned := len([*root.glob("results/*/configuration.yaml")]):
        text = "Curves of runs of `pipeline learn` (%d here): `tensorboard --logdir results`"
        _log.info(text, learned)
    uri = mlflow_store.default_uri(root)
    remote = uri.startswith("http")
    address = uri.rstrip("/") if remote else f"http://127.0.0.1:{port}"
    if not remote:
        _refuse_unusable(port)
        _log.info("Starting MLflow on %s; this may take a minute ...", address)
    store = mlflow_store.Store.existing(root)
    if remote:
        _log_addresses(store, address)
        return
    # MLflow gets one worker and no job runner: by default it starts 15 processes with 3.1 GB of
    # memory.
    command = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", store.uri]
    command += ["--registry-store-uri", store.uri]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--uvicorn-opts", "--log-level warning --no-access-log"]
    variables = {**engines.environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if not _log.isEnabledFor(logging.DEBUG):
        variables = _QUIET | variables
    with process.signals(), _group(command, root, variables) as server:
        try:
            if _ready(server, f"{address}/health"):
                _log_addresses(store, address)
                _log.info("Ctrl+C ends the server.")
            code = server.wait()
        except KeyboardInterrupt:
            return
    if code != 0:
        raise PipelineError(f"the MLflow server ended with exit code {code}")


def addresses(experiment_id: str) -> dict[str, str]:
    """Return the addresses of MLflow's pages by title, relative to the server's address."""
    runs = {
        "workflowType": "machine_learning",
        "searchFilter": f"tags.`{mlflow_store.CURRENT}` = 'yes'",
        "orderByKey": f"metrics.`{mlflow_store.SCORE}`",
        "orderByAsc": "false",
    }
    table = f"/#/experiments/{experiment_id}/runs?{urlencode(runs)}"
    models = "/#/models?workflowType=machine_learning"
    return {"All runs": table, "Curves": f"{table}&compareRunsMode=CHART", "Models": models}


def _refuse_unusable(port: int) -> None:
    """Refuse a port that is not free: its server could answer with another project's pages."""
    if not 0 < port <= _LAST_PORT:
        raise SettingsError(f"--port must be from 1 to {_LAST_PORT}, got {port}")
    if reason := why_not_free(port):
        free = next((p for p in range(port + 1, _LAST_PORT + 1) if not why_not_free(p)), 0)
        hint = f"; `pipeline ui --port {free}` uses a free port" if free else ""
        raise SettingsError(f"--port {port} cannot be used: {reason}{hint}")


def why_not_free(port: int) -> str | None:
    """Return why no server can use a port of the loopback device; None if the port is free."""
    try:
        with socket.socket() as tried:
            # With this option the system ignores connections of a server that has just ended
            # (TIME_WAIT). On Windows the option would allow two servers at one port.
            if os.name == "posix":
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return "another program serves there" if taken else str(error.strerror)
    return None


def _ready(server: subprocess.Popen[bytes], health: str) -> bool:
    """Wait until the server answers; return False if the server ends or takes too long."""
    import requests

    end = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(requests.RequestException):
            if requests.get(health, timeout=5).ok:
                # If the server of this process has ended, the answer came from another server at
                # the port.
                return server.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=0.25)
    return False


def _log_addresses(store: mlflow_store.Store, address: str) -> None:
    for title, page in addresses(store.experiment_id).items():
        _log.info("%-9s %s%s", title, address, page)


def forward_log(lines: Iterable[bytes]) -> None:
    """Write a server's log lines to standard error, `_NOISE` only with `--debug`."""
    is_debug = _log.isEnabledFor(logging.DEBUG)
    for line in lines:
        if is_debug or not line.startswith(_NOISE):
            sys.stderr.write(line.decode(errors="replace"))


@contextlib.contextmanager
def _group(
    command: Sequence[str], root: Path, variables: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during a `with` block, and end all the server's processes afterwards."""
    # The server gets a new process group: its workers would survive a signal to the server alone.
    server = subprocess.Popen(  # noqa: S603  # the command is fixed
        command, cwd=root, env=variables, start_new_session=True, stderr=subprocess.PIPE
    )
    threading.Thread(target=forward_log, args=(server.stderr,), daemon=True).start()
    try:
        yield server
    finally:
        # Processes that SIGTERM has not ended are killed.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=_END_S)
