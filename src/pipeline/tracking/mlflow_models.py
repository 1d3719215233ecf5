"""Exported policies as models of MLflow, registered, with aliases on the best evaluated ones.

A registered model is a behavior of an environment, since only returns of the same one can be
compared; a version is a run's policy. `best` is the version with the highest mean return in
evaluation, and the name of an experiment is an alias of the best among its seeds. Only versions
that were evaluated in the present build of the environment count, and an equal score moves no
alias.
"""

from __future__ import annotations

import json
import re
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEST = "best"
SCORE, BUILD, EXPERIMENT, CONTENT = "score", "environment.dvc", "experiment", "sha256"
"""Tags of a version: mean return, digest of the build it was evaluated in, experiment, file."""

_NEEDED = ("mlflow", "onnx", "onnxruntime", "numpy")
"""Packages that `mlflow.onnx` and `mlflow.pyfunc` need to load and run a model."""


def model_name(environment: str, behavior: str) -> str:
    """Return the registered model's name; MLflow refuses slashes and colons."""
    return re.sub(r"[/:]", "_", f"{environment}.{behavior}")


def alias_of(experiment: str) -> str:
    """Return an experiment's name as an alias: letters, digits, dashes and underscores."""
    text = re.sub(r"[^A-Za-z0-9_-]", "_", experiment)
    # Aliases that MLflow reserves, and `best`.
    reserved = re.fullmatch(r"[vV]\d+|latest|best", text)
    return f"{text}_" if reserved else text


def best(
    versions: Mapping[str, Mapping[str, str]], build: str, incumbent: str | None
) -> str | None:
    """Return the version with the highest score in a build; an equal incumbent stays.

    `versions` has the tags of the candidates by version number; `build` is the digest of the
    environment in which scores are compared.
    """
    # Scores in different builds belong to different tasks.
    scores = {
        version: float(tags[SCORE])
        for version, tags in versions.items()
        if SCORE in tags and tags.get(BUILD) == build
    }
    winners = [version for version, score in scores.items() if score == max(scores.values())]
    # The lowest number among equals: the earliest, so that repeating a run moves no alias.
    return incumbent if incumbent in winners or not winners else min(winners, key=int)


def log_model(
    client: Any, run: str, path: Path, *, params: dict[str, str], metrics: Sequence[Any]
) -> str:
    """Log an ONNX file as a model of a run, with the run's params and metrics; return its id."""
    # `mlflow.onnx.log_model` would end the run, and store an absolute path, wrong after a move.
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

    # A logged model is made in three steps; one that fails in between must not look usable.
    info = client.get_run(run).info
    model = client.create_logged_model(
        info.experiment_id, name=path.stem, source_run_id=run, params=params
    )
    status = LoggedModelStatus.FAILED
    try:
        # So that the run's page shows the model.
        client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])
        if metrics:
            copies = [
                Metric(m.key, m.value, m.timestamp, m.step, run_id=run, model_id=model.model_id)
                for m in metrics
            ]
            client.log_batch(run, metrics=copies)
        with tempfile.TemporaryDirectory() as folder:
            _save(Path(folder), path, model=model)
            client.log_model_artifacts(model.model_id, folder)
        status = LoggedModelStatus.READY
    finally:
        client.finalize_logged_model(model.model_id, status)
    return str(model.model_id)


def _save(folder: Path, path: Path, *, model: Any) -> None:
    """Save an ONNX file into a folder in the form that `mlflow.onnx` and `mlflow.pyfunc` load."""
    import mlflow.onnx
    import onnx
    from mlflow.models import Model

    pins = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _NEEDED]
    exported = onnx.load(str(path), load_external_data=False)
    mlflow.onnx.save_model(
        exported,
        str(folder),
        mlflow_model=Model(
            artifact_path=path.stem,
            model_uuid=model.model_id,
            run_id=model.source_run_id,
            model_id=model.model_id,
        ),
        signature=_signature(exported.graph),
        # Else MLflow starts a process that imports the model's packages, to find these four.
        pip_requirements=pins,
        onnx_execution_providers=["CPUExecutionProvider"],
        # The weights stay in the file, so that it equals the exported file byte by byte.
        save_as_external_data=False,
    )


def _signature(graph: Any) -> Any:
    import numpy as np
    import onnx
    from mlflow.models.signature import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    def specs(values: Any) -> Schema:
        columns: list[ColSpec | TensorSpec] = []
        for value in values:
            tensor = value.type.tensor_type
            dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            columns.append(TensorSpec(dtype, dims, value.name))
        return Schema(columns)

    return ModelSignature(inputs=specs(graph.input), outputs=specs(graph.output))


def register(client: Any, name: str, source: str, run: str, tags: Mapping[str, str]) -> None:
    """Register a logged model as a new version of `name`, and `name` when it is not there."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            name,
            description=(
                "Policies for Unity as ONNX, a version for each run. `best` has the highest mean "
                "return in evaluation; an experiment's alias is the best of its seeds."
            ),
        )
    except MlflowException:
        # Usually the policy of another seed was registered first; else this raises.
        client.get_registered_model(name)
    version = client.create_model_version(
        name, source=f"models:/{source}", run_id=run, model_id=source, tags=dict(tags)
    )
    # MLflow's pages of runs and models show by this tag that a logged model is registered.
    registered = json.dumps([{"name": name, "version": version.version}])
    client.set_logged_model_tags(source, {"mlflow.modelVersions": registered})


def versions_of(client: Any, run: str, name: str) -> list[Any]:
    """Return the versions of a model that a run made, newest first."""
    versions = client.search_model_versions(f"run_id = '{run}'")
    of_model = (version for version in versions if version.name == name)
    return sorted(of_model, key=lambda version: int(version.version), reverse=True)


def score(client: Any, run: str, name: str, tags: Mapping[str, str]) -> None:
    """Note SCORE, BUILD and EXPERIMENT of a run's policy, and move aliases where it is best."""
    versions = versions_of(client, run, name)
    if not versions:
        return
    for key, value in tags.items():
        client.set_model_version_tag(name, versions[0].version, key, value)
    # The logged model's page shows the score too; a version has the model's id in its source.
    mean, model = float(f"{float(tags[SCORE]):.6g}"), versions[0].source.removeprefix("models:/")
    client.log_metric(run, "evaluate/mean_return", mean, step=0, model_id=model)
    _move_aliases(client, name, tags)


def _move_aliases(client: Any, name: str, tags: Mapping[str, str]) -> None:
    """Move BEST and the experiment's alias to the versions that are best in tags[BUILD]."""
    from mlflow.exceptions import MlflowException

    versions = {
        str(version.version): version.tags
        for version in client.search_model_versions(f"name = '{name}'")
    }
    experiment = tags[EXPERIMENT]
    of_experiment = {
        version: version_tags
        for version, version_tags in versions.items()
        if version_tags.get(EXPERIMENT) == experiment
    }
    aliases, moved = client.get_registered_model(name).aliases, False
    for alias, candidates in ((BEST, versions), (alias_of(experiment), of_experiment)):
        current = aliases.get(alias)
        chosen = best(candidates, tags[BUILD], None if current is None else str(current))
        if chosen is not None and chosen != str(current):
            try:
                client.set_registered_model_alias(name, alias, chosen)
            except MlflowException:
                # Two clients that set a new alias at once: the store refuses one of them.
                if client.get_registered_model(name).aliases.get(alias) == current:
                    raise
            moved = True
    if moved:
        # Another stage may have scored a better version since the versions were read.
        _move_aliases(client, name, tags)
