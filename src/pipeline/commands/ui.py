"""`pipeline ui`: MLflow's pages with as few processes as they need, on loopback."""

from __future__ import annotations

import logging
import signal
import subprocess
from typing import TYPE_CHECKING

from pipeline.commands import engines
from pipeline.errors import PipelineError
from pipeline.tracking import mlflow_store, mlflow_view

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


def serve(root: Path, port: int) -> None:
    """Say where the prepared pages are, and serve them until interrupted.

    A server that MLFLOW_TRACKING_URI names has them already.

    Raises:
        PipelineError: There are no runs yet, or the server ended by itself.
    """
    store = mlflow_store.Store.existing(root)
    remote = store.uri.startswith("http")
    _say_where(store, store.uri.rstrip("/") if remote else f"http://127.0.0.1:{port}")
    if remote:
        return
    _log.info("Ctrl+C ends the server.")
    command = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", store.uri]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    variables = {**engines.environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, cwd=root, env=variables)  # noqa: S603  # fixed command
    try:
        code = server.wait()
    except KeyboardInterrupt:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=20)
        return
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    if code != 0:
        raise PipelineError(
            f"the MLflow server ended with exit code {code}; choose another --port if it is taken"
        )


def _say_where(store: mlflow_store.Store, address: str) -> None:
    for what, view in (("All runs by experiment", "table"), ("Learning curves", "curves")):
        _log.info("%-23s %s%s", what, address, mlflow_view.address(store.experiment_id, view))
    _log.info("%-23s %s/#/models", "Models", address)
