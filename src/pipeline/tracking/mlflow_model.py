"""A policy as a model of MLflow, made with what is known of it instead of what MLflow can find out.

`mlflow.onnx.log_model` would look through every installed package for the requirements, take the
weights out of the file into a second one with a random name, and end the run. Here the file is the
exported one, byte by byte, which Unity loads too.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEEDED = ("mlflow", "onnx", "onnxruntime", "numpy")
"""What loading and running the model takes, as `mlflow.onnx` and `mlflow.pyfunc` do it."""
_REQUIREMENTS, _CONDA, _PYTHON = "requirements.txt", "conda.yaml", "python_env.yaml"


def log(
    client: Any, run: str, path: Path, *, params: dict[str, str], metrics: Sequence[Any]
) -> str:
    """Log an ONNX file as a model of a run, with the signature that its graph declares.

    Args:
        client: of MLflow.
        run: that made it.
        path: the file; the model has its name.
        params: of the run, which its models show too.
        metrics: of the run, which are the model's too.

    Returns:
        The logged model's id.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    info = client.get_run(run).info
    model = client.create_logged_model(
        info.experiment_id, name=path.stem, source_run_id=run, params=params
    )
    status = LoggedModelStatus.FAILED
    try:
        client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])
        if metrics:
            client.log_batch(run, metrics=[_of_model(one, run, model.model_id) for one in metrics])
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), path, model=model)
            client.log_model_artifacts(model.model_id, folder)
        status = LoggedModelStatus.READY
    finally:
        client.finalize_logged_model(model.model_id, status)
    return str(model.model_id)


def write(folder: Path, path: Path, *, model: Any) -> None:
    """Fill a folder with an ONNX file and what `mlflow.onnx` and `mlflow.pyfunc` load it by.

    Args:
        folder: an empty one.
        path: the file.
        model: the logged model that the folder will be of.
    """
    import onnx
    from mlflow import pyfunc
    from mlflow.models import Model

    graph = onnx.load(str(path), load_external_data=False).graph
    described = Model(
        artifact_path=path.stem,  # its place would be an absolute path, wrong after a move
        model_uuid=model.model_id,
        run_id=model.source_run_id,
        model_id=model.model_id,
        signature=_signature(graph),
        model_size_bytes=path.stat().st_size,
    )
    pyfunc.add_to_model(
        described, loader_module="mlflow.onnx", data=path.name, conda_env=_CONDA, python_env=_PYTHON
    )
    described.add_flavor(
        "onnx",
        onnx_version=metadata.version("onnx"),
        data=path.name,
        providers=["CPUExecutionProvider"],
        onnx_session_options=None,
        code=None,
    )
    shutil.copyfile(path, folder / path.name)
    described.save(str(folder / "MLmodel"))
    _write_requirements(folder)


def _of_model(metric: Any, run: str, model: str) -> Any:
    from mlflow.entities import Metric

    return Metric(
        metric.key, metric.value, metric.timestamp, metric.step, run_id=run, model_id=model
    )


def _write_requirements(folder: Path) -> None:
    """Pin what loads the model, for pip, for conda and for MLflow's own environments."""
    pins = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _NEEDED]
    python = platform.python_version()
    conda = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", "pip", {"pip": pins}],
    }
    own = {
        "python": python,
        "build_dependencies": ["pip", "setuptools", "wheel"],
        "dependencies": [f"-r {_REQUIREMENTS}"],
    }
    (folder / _REQUIREMENTS).write_text("\n".join(pins) + "\n", encoding="utf-8")
    for name, content in ((_CONDA, conda), (_PYTHON, own)):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _signature(graph: Any) -> Any:
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

    return ModelSignature(inputs=specs(graph.input), outputs=specs(graph.output))
