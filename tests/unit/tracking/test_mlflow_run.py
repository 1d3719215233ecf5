from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path

import pytest

from pipeline.tracking import names
from pipeline.tracking.csvfile import CsvSink
from pipeline.tracking.mlflow_run import MlflowRun, RunKey, enabled
from pipeline.tracking.mlflow_store import flatten

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def key(root: Path, stage: str, fingerprint: str = "a", experiment: str = "walk") -> RunKey:
    record = root / "results/.work/mlflow" / f"{experiment}-seed1.json"
    return RunKey(
        experiment=experiment,
        seed=1,
        stage=stage,
        fingerprint=fingerprint,
        root=root,
        record=record,
        tags={"pipeline.algorithm": "ppo"},
    )


def client(root: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def finished(run: MlflowRun, **options) -> str:
    run.close(timeout_s=60, **options)
    assert run.lost == 0
    assert run.run_id is not None
    return run.run_id


def test_stages_of_one_seed_share_a_run_and_other_inputs_begin_a_new_one(tmp_path: Path):
    train = MlflowRun(key(tmp_path, "train"))
    train.params({"overrides": {"learning_rate": 3e-4}, "seed": 1})
    for step in (10, 20):
        train.metrics("Walker", {"Environment/Cumulative Reward": step / 10}, step)
    first = finished(train)

    evaluate = MlflowRun(key(tmp_path, "evaluate"))
    evaluate.results({"mean_return": 7.5})
    evaluate.params({"episodes": 100})
    (tmp_path / "note.txt").write_text("hello")
    evaluate.artifacts([tmp_path / "note.txt"])
    assert finished(evaluate) == first

    store = client(tmp_path)
    seen = store.get_run(first)
    assert seen.info.status == "FINISHED"
    assert seen.data.params == {"overrides.learning_rate": "0.0003", "seed": "1"}
    assert seen.data.metrics["evaluate/mean_return"] == 7.5
    assert seen.data.tags["evaluate.episodes"] == "100"
    assert seen.data.tags["pipeline.algorithm"] == "ppo"
    history = store.get_metric_history(first, "Environment/Cumulative Reward")
    assert [(point.step, point.value) for point in history] == [(10, 1.0), (20, 2.0)]
    assert [a.path for a in store.list_artifacts(first, "evaluate")] == ["evaluate/note.txt"]
    assert (tmp_path / "mlartifacts").is_dir()

    again = finished(MlflowRun(key(tmp_path, "train")))
    assert again == first, "the same inputs continue the run"
    other = finished(MlflowRun(key(tmp_path, "train", fingerprint="b")))
    assert other != first


def test_a_killed_run_is_continued_or_closed(tmp_path: Path):
    killed = MlflowRun(key(tmp_path, "train"))
    killed.metrics("Walker", {"loss": 1.0}, 1)
    killed._jobs.put(None)  # the thread dies, and the run stays open
    killed._thread.join(60)
    assert client(tmp_path).get_run(killed.run_id).info.status == "RUNNING"

    fresh = finished(MlflowRun(key(tmp_path, "train", fingerprint="b")))
    assert fresh != killed.run_id
    assert client(tmp_path).get_run(killed.run_id).info.status == "KILLED"


def test_a_finished_run_waits_for_a_slow_store_and_a_stopped_one_does_not(tmp_path: Path):
    slow = [MlflowRun(key(tmp_path, "train", experiment=name)) for name in ("whole", "stopped")]
    for run in slow:
        run.results({"seen": 1.0})
        while run.run_id is None:
            time.sleep(0.01)
        for _ in range(12):
            run._put(lambda *_: time.sleep(0.5))
    began = time.monotonic()
    slow[1].close(status="KILLED", timeout_s=1.5)
    assert time.monotonic() - began < 2.5
    slow[0].close(timeout_s=2)
    assert client(tmp_path).get_run(slow[0].run_id).info.status == "FINISHED"


def test_points_that_a_killed_attempt_took_along_are_filled_in_from_the_curve(tmp_path: Path):
    curve = CsvSink(tmp_path / "progress.csv")
    run = MlflowRun(key(tmp_path, "train"), prefix=True)
    for step in (1000, 2000, 3000):
        values = {names.REWARD: step / 1000, "Losses/Q1 Loss": 0.5}
        curve.metrics("Walker", values, step)
        if step == 2000:
            run.metrics("Walker", values, step)
    run.complete(curve.path)
    made = finished(run)
    for name, wanted in ((names.REWARD, [1.0, 2.0, 3.0]), ("Losses/Q1 Loss", [0.5, 0.5, 0.5])):
        history = client(tmp_path).get_metric_history(made, f"Walker/{name}")
        assert sorted((p.step, p.value) for p in history) == list(
            zip((1000, 2000, 3000), wanted, strict=True)
        )


def test_an_onnx_model_is_logged_with_its_signature(tmp_path: Path):
    import mlflow
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["obs_0"], ["continuous_actions"])],
        "policy",
        [value("obs_0", TensorProto.FLOAT, ["batch", 8])],
        [value("continuous_actions", TensorProto.FLOAT, ["batch", 8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(tmp_path / "Walker.onnx"))
    run = MlflowRun(key(tmp_path, "export"))
    run.model(tmp_path / "Walker.onnx", name="Walker")
    finished(run)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    (logged,) = client(tmp_path).search_logged_models(["1"])
    signature = mlflow.models.get_model_info(logged.model_uri).signature
    assert signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 8)
    assert logged.source_run_id == run.run_id


def test_an_unreachable_server_costs_one_warning_and_no_time(tmp_path, monkeypatch, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        run = MlflowRun(key(tmp_path, "train"))
        start = time.perf_counter()
        for step in range(1000):
            run.metrics("Walker", {"loss": 1.0}, step)
        spent = time.perf_counter() - start
        run.close(timeout_s=60)
    assert spent < 1.0
    assert run.run_id is None
    messages = [r.message for r in caplog.records if "MLflow is not being written" in r.message]
    assert len(messages) == 1


def test_a_broken_record_file_begins_a_new_run(tmp_path: Path):
    place = key(tmp_path, "train").record
    place.parent.mkdir(parents=True)
    place.write_text("{")
    run = finished(MlflowRun(key(tmp_path, "train")))
    assert json.loads(place.read_text())["run_id"] == run


@pytest.mark.parametrize(("text", "wanted"), [("off", False), ("0", False), ("on", True)])
def test_the_switch_turns_mlflow_off(monkeypatch, text, wanted):
    monkeypatch.setenv("PIPELINE_MLFLOW", text)
    assert enabled() is wanted


def test_params_are_flattened_to_dotted_names():
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e(f)": {}}) == {
        "a.b": "1",
        "a.c.d": "[1, 2]",
        "e_f_": "{}",
    }
