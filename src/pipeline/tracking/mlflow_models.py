"""Exported policies as models of MLflow, registered, with aliases on the best evaluated ones.

A registered model is a behavior of an environment, since only returns of the same one can be
compared; a version is a run's policy. `best` is the version with the highest mean return in
evaluation, and the name of an experiment is an alias of the best among its seeds. Only versions
that were evaluated in the present build of the environment count, and an equal score moves no
alias.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.tracking.mlflow_store import Store, locked

BEST = "best"
SCORE, BUILD, EXPERIMENT, CONTENT = "score", "environment.dvc", "experiment", "sha256"
"""Tags of a version: mean return, digest of the build it was evaluated in, experiment, file."""

_NEEDED = ("mlflow", "onnx", "onnxruntime", "numpy")
"""Packages that `mlflow.onnx` and `mlflow.pyfunc` need to load and run a model."""

_DESCRIPTION = (
    "Policies for Unity as ONNX, a version for each run. `best` has the highest mean return in "
    "evaluation; an experiment's alias is the best of its seeds."
)


def model_name(environment: str, behavior: str) -> str:
    """Return the registered model's name; MLflow refuses slashes and colons."""
    return re.sub(r"[/:]", "_", f"{environment}.{behavior}")


def alias_of(experiment: str) -> str:
    """Return an experiment's name as an alias: letters, digits, dashes and underscores."""
    text = re.sub(r"[^A-Za-z0-9_-]", "_", experiment)
    # Aliases that MLflow reserves, and `best`.
    return f"{text}_" if re.fullmatch(r"[vV]\d+|latest|best", text) else text


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


def log_onnx(store: Store, run: str, path: Path, name: str, tags: Mapping[str, str]) -> None:
    """Log an ONNX file as a model of a run and register it; the same file of a run only once.

    The model has the run's parameters and its final numbers.
    """
    import mlflow.onnx
    import onnx

    content = files.sha256_of(path)
    # A retried stage exports the same bytes, which are no new version.
    if any(version.tags.get(CONTENT) == content for version in _versions(store.client, run, name)):
        return
    exported = onnx.load(str(path), load_external_data=False)
    needed = {package: metadata.version(package).partition("+")[0] for package in _NEEDED}
    mlflow.set_tracking_uri(store.uri)
    # Nested, since a program may have a run of its own open.
    with mlflow.start_run(run_id=run, nested=True, log_system_metrics=False):
        info = mlflow.onnx.log_model(
            exported,
            name=path.stem,
            signature=_signature(exported.graph),
            # Else MLflow starts a process that imports the model's packages, to find these four.
            pip_requirements=[f"{package}=={version}" for package, version in needed.items()],
            onnx_execution_providers=["CPUExecutionProvider"],
            # The weights stay in the file, so that it equals the exported file byte by byte.
            save_as_external_data=False,
        )
    # It prints two lines, which would be in the output of every stage.
    with locked(store.uri), contextlib.redirect_stderr(io.StringIO()):
        mlflow.register_model(f"models:/{info.model_id}", name, tags={**tags, CONTENT: content})
        store.client.update_registered_model(name, description=_DESCRIPTION)


def _signature(graph: Any) -> Any:
    import numpy as np
    import onnx
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def spec(value: Any) -> TensorSpec:
        tensor = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        return TensorSpec(dtype, tuple(dims), value.name)

    inputs, outputs = (Schema([*map(spec, values)]) for values in (graph.input, graph.output))
    return ModelSignature(inputs, outputs)


def _versions(client: Any, run: str, name: str) -> list[Any]:
    """Return the versions of a model that a run made, newest first."""
    versions = client.search_model_versions(f"run_id = '{run}'")
    of_model = (version for version in versions if version.name == name)
    return sorted(of_model, key=lambda version: int(version.version), reverse=True)


def score(client: Any, run: str, name: str, tags: Mapping[str, str]) -> None:
    """Note SCORE, BUILD and EXPERIMENT of a run's policy, and move aliases where it is best."""
    versions = _versions(client, run, name)
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

    registered = client.search_model_versions(f"name = '{name}'")
    versions = {str(version.version): version.tags for version in registered}
    own = {k: v for k, v in versions.items() if v.get(EXPERIMENT) == tags[EXPERIMENT]}
    aliases, moved = client.get_registered_model(name).aliases, False
    for alias, candidates in ((BEST, versions), (alias_of(tags[EXPERIMENT]), own)):
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
