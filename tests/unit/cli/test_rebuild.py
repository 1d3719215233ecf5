"""`pipeline runs --rebuild`: a store made from the files of `results/`."""

import json
import shutil
from pathlib import Path

import pytest
from mlflow_runs import client, exported, in_mlflow, in_results
from PIL import Image
from small_project import left

pytestmark = pytest.mark.slow

PARAMS = """\
environments: {hill: gymnasium:CartPole-v1}
experiments:
  walk:
    environment: hill
    trainer: t.yaml
    overrides: {}
    seeds: [1, 2]
    stages: [train, export, evaluate]
    evaluation: {episodes: 4, seed: 1}
"""
CURVE = "behavior,step,reward\nWalker,10,1.5\nWalker,20,2.5\n"


def made(root: Path, seed: int, score: float) -> None:
    """Write the files of the stages of a run."""
    from pipeline.trainer.checkpoints.file import save_checkpoint

    place = f"walk/seed{seed}"
    train, export, evaluate = (
        root / f"results/{stage}/{place}" for stage in ("train", "export", "evaluate")
    )
    for folder in (train, export, evaluate):
        folder.mkdir(parents=True)
    history = json.dumps([{"stage": "pretrain"}, {"interrupted_at_steps": [10]}])
    save_checkpoint(train / "policy.pt", {"history": history, "seed": seed})
    (train / "progress.csv").write_text(CURVE)
    (train / "metrics.json").write_text('{"Walker": {"steps": 20, "mean_reward": null}}')
    shutil.move(exported(root, float(seed)), export / "Walker.onnx")
    (export / "export.json").write_text('{"Walker": {"step": 20}}')
    Image.new("RGB", (2, 2)).save(evaluate / "returns.png")
    (evaluate / "episodes.csv").write_text("episode\n")
    numbers = {"mean_return": score, "policy_md5": "x", "stochastic": True, "std_return": None}
    (evaluate / "metrics.json").write_text(json.dumps({"Walker": numbers}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = tmp_path / "project"
    root.mkdir()
    (root / "params.yaml").write_text(PARAMS)
    (root / "t.yaml").write_text("behaviors: {Walker: {max_steps: 20}}\n")
    for seed, score in ((1, 5.0), (2, 6.0)):
        made(root, seed, score)
    monkeypatch.chdir(root)
    return root


def test_rebuild_writes_an_mlflow_row_for_each_run_in_results(project: Path, printed, refused):
    assert "`pipeline runs --rebuild` makes it" in refused("runs")
    facts = {"started_unix_s": 1000.0, "duration_s": 60.0, "seconds": {"total": 4.0}}
    left(project, ".work/train", "walk/seed1", stage=facts)
    shutil.copytree(project / "results/train/walk", project / "results/train/gone")
    table = printed("runs", "--rebuild")
    assert table.count("as in results/") == 2
    (gone,) = (line.split() for line in table.splitlines() if line.startswith("gone-1"))
    assert gone[:3] == ["gone-1", "no", "row"]
    uri = f"sqlite:///{project / 'mlflow.db'}"
    files = {place: facts for place, facts in in_results(project).items() if place[0] == "walk"}
    assert in_mlflow(uri) == files
    store = client(project)
    first, second = sorted(store.search_runs(["1"]), key=lambda run: run.info.run_name)
    assert (first.info.start_time, first.info.status) == (1_000_000, "FINISHED")
    assert first.data.metrics["train/steps_per_second"] == 5.0
    assert "train/training_s" not in second.data.metrics
    assert first.data.tags["train.exact"] == "interrupted at steps 10, not exact"
    assert not {"mlflow.source.git.commit", "train.machine"} & first.data.tags.keys()
    assert first.data.params["max_steps"] == "20"
    history = store.get_metric_history(first.info.run_id, "Environment/Cumulative Reward")
    assert [(point.step, point.value) for point in history] == [(10, 1.5), (20, 2.5)]
    artifacts = {entry.path for entry in store.list_artifacts(first.info.run_id, "evaluate")}
    assert "evaluate/episodes.csv" in artifacts
    best = store.get_model_version_by_alias("hill.Walker", "best")
    assert best.run_id == second.info.run_id


def test_rebuild_in_a_copied_project_leaves_the_original_mlflow_store_unchanged(
    project: Path, monkeypatch, printed
):
    printed("runs", "--rebuild")
    copy = shutil.copytree(project, project.with_name("copy"))
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    monkeypatch.chdir(copy)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # MLflow has set it for this process
    printed("runs", "--rebuild")
    assert (copy / "mlflow.db.1").is_file()
    assert in_mlflow(f"sqlite:///{copy / 'mlflow.db'}") == in_results(copy)
    store = client(copy)
    for run in store.search_runs(["1"]):
        assert run.info.artifact_uri.startswith(copy.as_uri())
    after = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    assert after == before


def test_rebuild_refuses_to_replace_an_mlflow_server(project: Path, monkeypatch, refused):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "MLFLOW_TRACKING_URI names http://127.0.0.1:9" in refused("runs", "--rebuild")
