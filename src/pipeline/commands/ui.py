"""`pipeline ui`: MLflow's pages with as few processes as they need, on loopback."""

from __future__ import annotations

import logging
import os
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
    """Serve the pages until interrupted.

    Raises:
        PipelineError: There are no runs yet, or the server ended by itself.
    """
    uri = mlflow_store.default_uri(root)
    if uri.startswith("sqlite:///") and not os.path.exists(uri.removeprefix("sqlite:///")):  # noqa: PTH110  # a URI's path
        raise PipelineError(
            "there are no runs yet: run `dvc repro` or `snakemake --cores 1` in this folder first"
        )
    mlflow_store.set_environment()
    identifier = mlflow_store.Store.open(root).experiment_id
    address = f"http://127.0.0.1:{port}"
    _log.info("All runs by experiment:  %s%s", address, mlflow_view.address(identifier, "table"))
    _log.info("Learning curves:         %s%s", address, mlflow_view.address(identifier, "curves"))
    _log.info("Models:                  %s/#/models   (Ctrl+C ends the server)", address)
    command = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", uri]
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
