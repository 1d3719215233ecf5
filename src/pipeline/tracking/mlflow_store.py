"""What the pipeline needs of an MLflow store, through its client and without global state."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXPERIMENT = "pipeline"
_BATCH = 900
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


def set_environment() -> None:
    """Give MLflow short retries and no telemetry, unless the user chose otherwise."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def default_uri(root: Path) -> str:
    """The store in use: MLFLOW_TRACKING_URI, else `mlflow.db` in the repository."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def clean(name: str) -> str:
    """`name` with the characters that MLflow refuses replaced by underscores."""
    return _NOT_ALLOWED.sub("_", name)


def checkout(root: Path) -> str:
    """A name for this copy of the repository on this machine, without saying where it is."""
    return files.fingerprint([os.uname().nodename, str(root)])[:12]


def flatten(values: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Nested mappings as `{dotted name: text}`; lists stay whole."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{start}{name}.")
        else:
            flat[clean(f"{start}{name}")] = str(value)[:5900]
    return flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An open store and the experiment in it."""

    uri: str
    experiment_id: str
    client: Any

    @classmethod
    def open(cls, root: Path) -> Store:
        """Open the store, and make it when it does not exist; many processes may do so at once.

        Raises:
            mlflow.exceptions.MlflowException: The store cannot be reached or read.
            filelock.Timeout: Another process holds the new store's lock for too long.
        """
        set_environment()
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table it makes
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # we say what its retries came to
        uri = default_uri(root)
        with _first_use(uri):
            _make_whole(uri)
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is not None:
                identifier = found.experiment_id
            elif uri.startswith("sqlite:"):
                place = (root / "mlartifacts").as_uri()
                identifier = client.create_experiment(EXPERIMENT, artifact_location=place)
            else:
                identifier = _create_shared(client)
        return cls(uri=uri, experiment_id=identifier, client=client)

    def exists(self, run: str) -> bool:
        """Whether the store knows the run and it is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return bool(self.client.get_run(run).info.lifecycle_stage == "active")
        except MlflowException:
            return False

    def create(self, name: str, tags: Mapping[str, str]) -> str:
        """A new running run."""
        made = self.client.create_run(self.experiment_id, run_name=name, tags=dict(tags))
        return str(made.info.run_id)

    def reopen(self, run: str, tags: Mapping[str, str]) -> None:
        """Mark a run as running again."""
        self.client.update_run(run, status="RUNNING")
        self.set_tags(run, tags)

    def end(self, run: str, status: str) -> None:
        """Close the run with `status`: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run, status=status)

    def end_if_running(self, run: str, status: str) -> None:
        """Close a run that nothing writes to any more."""
        if self.client.get_run(run).info.status == "RUNNING":
            self.end(run, status)

    def end_dead(self, current: str, tags: Mapping[str, str]) -> None:
        """Close the runs that killed attempts of the same experiment and seed left running."""
        same = ("pipeline.experiment", "pipeline.seed", "pipeline.checkout")
        wanted = " and ".join(f"tags.`{name}` = '{tags[name]}'" for name in same)
        query = f"attributes.status = 'RUNNING' and {wanted}"
        for found in self.client.search_runs([self.experiment_id], query):
            if found.info.run_id != current:
                self.end(found.info.run_id, "KILLED")

    def log_metrics(self, run: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Write `(name, value, unix ms, step)` points."""
        from mlflow.entities import Metric

        for start in range(0, len(points), _BATCH):
            part = [Metric(*point) for point in points[start : start + _BATCH]]
            self.client.log_batch(run, metrics=part)

    def steps_of(self, run: str, name: str) -> set[int]:
        """Steps at which the run has a point of this metric."""
        return {point.step for point in self.client.get_metric_history(run, name)}

    def log_params(self, run: str, values: Mapping[str, str]) -> None:
        """Write parameters; MLflow refuses to change one."""
        from mlflow.entities import Param

        self.client.log_batch(run, params=[Param(name, text) for name, text in values.items()])

    def set_tags(self, run: str, values: Mapping[str, str]) -> None:
        """Write tags, replacing those of the same name."""
        from mlflow.entities import RunTag

        self.client.log_batch(run, tags=[RunTag(name, text) for name, text in values.items()])

    def log_files(self, run: str, paths: Sequence[Path], folder: str) -> None:
        """Copy files into the run's artifacts."""
        for path in paths:
            self.client.log_artifact(run, str(path), folder)

    def log_onnx(self, run: str, path: Path, name: str) -> None:
        """Log an ONNX file as a model with the signature that its graph declares."""
        import mlflow
        import mlflow.onnx
        import onnx

        model = onnx.load(str(path))
        mlflow.set_tracking_uri(self.uri)
        with mlflow.start_run(run_id=run):
            mlflow.onnx.log_model(
                model,
                name=clean(name),
                signature=_signature(model),
                pip_requirements=["onnxruntime", "numpy"],
                onnx_execution_providers=["CPUExecutionProvider"],
            )


def source_tags(root: Path) -> dict[str, str]:
    """The commit that the code comes from, and DVC's experiment when there is one."""
    tags = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(  # noqa: S603  # fixed command
            command, capture_output=True, text=True, check=True, timeout=5
        )
        tags["mlflow.source.git.commit"] = done.stdout.strip()
    if os.environ.get("DVC_EXP_NAME"):
        tags["dvc.exp"] = os.environ["DVC_EXP_NAME"]
    return tags


@contextlib.contextmanager
def _first_use(uri: str) -> Any:
    """Let one process at a time create the tables of a SQLite store."""
    path = _file_of(uri)
    if path is None:
        yield
        return
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=300):
        yield


def _file_of(uri: str) -> Path | None:
    """The file of a SQLite store."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _make_whole(uri: str) -> None:
    """Make a SQLite store under another name first.

    MLflow makes its tables in dozens of steps when a client is made. A process that is killed in
    between would leave a file that no client can open any more.
    """
    path = _file_of(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    new = path.with_name(f"{path.name}.new")
    for left in (new, new.with_name(f"{new.name}-journal")):
        left.unlink(missing_ok=True)
    MlflowClient(tracking_uri=f"sqlite:///{new}")
    new.replace(path)


def _create_shared(client: Any) -> str:
    """Create the experiment on a server, where another client may be faster."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.create_experiment(EXPERIMENT))
    except MlflowException:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            raise
        return str(found.experiment_id)


def _signature(model: Any) -> Any:
    import numpy as np
    import onnx
    from mlflow.models.signature import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    def specs(values: Any) -> Schema:
        made: list[ColSpec | TensorSpec] = []
        for value in values:
            tensor = value.type.tensor_type
            dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            made.append(TensorSpec(dtype, dims, value.name))
        return Schema(made)

    return ModelSignature(inputs=specs(model.graph.input), outputs=specs(model.graph.output))
