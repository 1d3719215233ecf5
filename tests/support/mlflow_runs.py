"""Runs in a test's MLflow store, written as by the stages of an experiment."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import RunKey, dvc_digest


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
        tags={"pipeline.algorithm": "ppo", **tags},
    )


def finished(run: MlflowRun, status: str = "FINISHED") -> str:
    """End a run, check that no data was lost, and return the run's id."""
    run.end(status)
    assert run.lost == 0
    assert run.run_id is not None
    return run.run_id


def exported(root: Path, bias: float) -> Path:
    """Write an ONNX policy that adds `bias` to its observations into a new folder."""
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


def ran(
    root: Path, stage: str, seed: int = 1, *, policy: float | None = None, score: float = 5.0
) -> str:
    """Write a stage's files in `results/` and its MLflow run; return the run's id.

    `train` writes a policy that adds `policy` (default: the seed), `evaluate` a mean return of
    `score`.
    """
    policy = float(seed if policy is None else policy)
    folders = {name: root / f"results/{name}/walk/seed{seed}" for name in _MADE}
    folder, trained = folders[stage], folders["train"] / _MADE["train"]
    folder.mkdir(parents=True, exist_ok=True)
    if stage == "train":
        trained.write_text(str(policy))
    elif stage == "export":
        made = exported(root, float(trained.read_text()))
        shutil.move(made, folder / made.name)
    else:
        numbers = {"mean_return": score, "policy_md5": dvc_digest(trained)}
        (folder / "metrics.json").write_text(json.dumps({"Walker": numbers}))
    stage_key = key(root, stage, str(policy), seed=seed)
    run = MlflowRun(
        stage_key if stage == "train" else replace(stage_key, policy=dvc_digest(trained))
    )
    if stage == "train":
        run.on_summary("Walker", {"loss": policy}, 10)
    elif stage == "export":
        run.model(folder / "Walker.onnx", environment="walk")
    else:
        run.results({"mean_return": score})
        run.artifacts([folder / "metrics.json"])
        run.score({"Walker": score}, environment="walk", build=folders["export"], params={})
    run.made(folder / _MADE[stage])
    return finished(run)


_MADE = {"train": "policy.pt", "export": "", "evaluate": "metrics.json"}
"""The file in a stage's folder for the digest in MLflow; empty for the whole folder."""


def in_results(root: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return digests and score of each run's files, by experiment and seed."""
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for stage, name in _MADE.items():
        for folder in (root / "results" / stage).glob("*/seed*"):
            place = (folder.parent.name, folder.name.removeprefix("seed"))
            facts = runs.setdefault(place, {})
            facts[f"dvc.{stage}"] = dvc_digest(folder / name)
            if stage == "evaluate":
                metrics = json.loads((folder / name).read_text())
                facts["score"] = next(iter(metrics.values()))["mean_return"]
    return runs


def in_mlflow(uri: str, experiment: str = "pipeline") -> dict[tuple[str, str], dict[str, Any]]:
    """Return digests and score of each current run in MLflow, by experiment and seed."""
    from mlflow import MlflowClient

    store = MlflowClient(tracking_uri=uri)
    where = store.get_experiment_by_name(experiment).experiment_id
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in store.search_runs([where], "tags.`pipeline.current` = 'yes'"):
        tags = run.data.tags
        place = (tags["pipeline.experiment"], tags["pipeline.seed"])
        assert place not in rows, f"two current rows of {place}"
        rows[place] = {
            f"dvc.{name}": tags[f"dvc.{name}"] for name in _MADE if f"dvc.{name}" in tags
        }
        if "evaluate/mean_return" in run.data.metrics:
            rows[place]["score"] = run.data.metrics["evaluate/mean_return"]
    return rows
