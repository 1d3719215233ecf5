"""Runs in an MLflow store of the test's own, as stages of one experiment write them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.tracking.run_metadata import RunKey

if TYPE_CHECKING:
    from pipeline.tracking.mlflow_run import MlflowRun


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def client(root: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def key(
    root: Path,
    stage: str,
    fingerprint: str = "a",
    experiment: str = "walk",
    *,
    seed: int = 1,
    resumed: bool = False,
    **tags: str,
) -> RunKey:
    return RunKey(
        experiment=experiment,
        seed=seed,
        stage=stage,
        fingerprint=fingerprint,
        resumed=resumed,
        root=root,
        record=root / "results/.work/mlflow" / f"{experiment}-seed{seed}.json",
        tags={"pipeline.algorithm": "ppo", **tags},
    )


def finished(run: MlflowRun, **options: Any) -> str:
    """End a run that has lost nothing, and return its id."""
    run.end(timeout_s=60, **options)
    assert run.lost == 0
    assert run.run_id is not None
    return run.run_id


def exported(root: Path, bias: float) -> Path:
    """An ONNX file in a folder of its own, of a policy that adds `bias` to what it observes."""
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["obs_0", "bias"], ["continuous_actions"])],
        "policy",
        [value("obs_0", TensorProto.FLOAT, ["batch", 8])],
        [value("continuous_actions", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor("bias", TensorProto.FLOAT, [1], [bias])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = root / f"export{bias:g}" / "Walker.onnx"
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, str(path))
    return path
