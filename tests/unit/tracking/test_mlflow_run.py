from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow_runs import client, exported, finished, key, md5

from pipeline.tracking import names
from pipeline.tracking.curve_csv import CsvSink, read_points
from pipeline.tracking.mlflow_run import MlflowRun, enabled
from pipeline.tracking.mlflow_store import Store, flatten
from pipeline.tracking.run_metadata import InputData, RunMetadata

pytestmark = pytest.mark.slow

NAME = "walk.Walker"


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path: Path, mlflow_tables: Path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]


def described(root: Path, **params: object) -> RunMetadata:
    (root / "data").mkdir(exist_ok=True)
    (root / "data/expert.demo").write_bytes(b"demo")
    data = InputData(
        name="expert", path="data/expert.demo", context="demonstrations", facts={"steps": 9}
    )
    return RunMetadata(params=params, configuration="seed: 1\n", data=[data], note="what it is")


def test_stages_of_one_seed_write_params_metrics_tags_and_data_to_one_run(tmp_path: Path):
    row = described(tmp_path, learning_rate=3e-4, **{"network_settings.hidden_units": 64})
    train = MlflowRun(key(tmp_path, "train"))
    train.describe(row, tmp_path)
    for step in (10, 20):
        train.on_summary("Walker", {"Environment/Cumulative Reward": step / 10}, step)
    train.points({"loss": [(1, 0.5), (2, 0.25)]}, stage="pretrain")
    first = finished(train)
    assert not monitors(), "the machine is not sampled unasked"

    evaluate = MlflowRun(key(tmp_path, "evaluate"))
    evaluate.describe(row, tmp_path)
    evaluate.results({"mean_return": 7.50000014901, "rows": 1_234_567})
    evaluate.settings({"episodes": 100})
    (tmp_path / "note.txt").write_text("hello")
    evaluate.artifacts([tmp_path / "note.txt"])
    evaluate.made(tmp_path / "note.txt")
    assert finished(evaluate) == first

    store = client(tmp_path)
    seen = store.get_run(first)
    assert seen.info.status == "FINISHED"
    assert seen.info.run_name == "walk-seed1"
    assert seen.data.params == {"learning_rate": "0.0003", "network_settings.hidden_units": "64"}
    assert seen.data.metrics["evaluate/mean_return"] == 7.5  # MLflow's table shows all digits
    assert seen.data.metrics["evaluate/rows"] == 1_234_567
    assert seen.data.tags["evaluate.episodes"] == "100"
    assert seen.data.tags["pipeline.algorithm"] == "ppo"
    assert seen.data.tags["pipeline.current"] == "yes"
    assert seen.data.tags["mlflow.note.content"] == "what it is"
    assert seen.data.tags["dvc.evaluate"] == md5(b"hello")
    assert steps_of(first, tmp_path, "Environment/Cumulative Reward") == [(10, 1.0), (20, 2.0)]
    assert steps_of(first, tmp_path, "pretrain/loss") == [(1, 0.5), (2, 0.25)]
    assert steps_of(first, tmp_path, "evaluate/mean_return") == [(0, 7.5)]
    (data,) = seen.inputs.dataset_inputs
    assert (data.dataset.name, data.tags[0].value) == ("expert", "demonstrations")
    assert data.dataset.digest == md5(b"demo")
    assert json.loads(data.dataset.source) == {"uri": "data/expert.demo"}
    assert {a.path for a in store.list_artifacts(first)} == {"configuration.yaml", "evaluate"}
    assert [a.path for a in store.list_artifacts(first, "evaluate")] == ["evaluate/note.txt"]
    assert (tmp_path / "mlartifacts").is_dir()


def steps_of(run: str, root: Path, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client(root).get_metric_history(run, name)]


def current(root: Path, query: str = "tags.`pipeline.current` = 'yes'") -> dict[str, str]:
    """Return the ids of runs by their names."""
    return {run.info.run_name: run.info.run_id for run in client(root).search_runs(["1"], query)}


def aliases(root: Path) -> dict[str, str]:
    """Return the version of each alias of the model."""
    model = client(root).get_registered_model(NAME)
    return {name: str(version) for name, version in model.aliases.items()}


def test_training_again_makes_a_new_run_the_parent_of_the_superseded_runs(tmp_path: Path):
    first = finished(MlflowRun(key(tmp_path, "train")))
    assert finished(MlflowRun(key(tmp_path, "train", resumed=True))) == first, "a resumed one"
    assert finished(MlflowRun(key(tmp_path, "export"))) == first
    other = finished(MlflowRun(key(tmp_path, "train", "b", resumed=True)))
    assert other != first, "other inputs"
    retrained = finished(MlflowRun(key(tmp_path, "train", "b")))
    assert retrained not in (first, other), "the same inputs from the start"
    assert finished(MlflowRun(key(tmp_path, "evaluate"))) == retrained
    beside = [
        finished(MlflowRun(key(tmp_path, "train", seed=2))),
        finished(MlflowRun(key(tmp_path, "train", experiment="run"))),
    ]

    runs = {run.info.run_id: run for run in client(tmp_path).search_runs(["1"])}
    assert set(runs) == {first, other, retrained, *beside}
    top_rows = {run for run, row in runs.items() if "mlflow.parentRunId" not in row.data.tags}
    assert top_rows == {retrained, *beside}, "one row for each experiment and seed"
    assert set(current(tmp_path)) == {"walk-seed1", "walk-seed2", "run-seed1"}
    for old in (first, other):
        assert runs[old].data.tags["mlflow.parentRunId"] == retrained
        assert runs[old].info.run_name == "walk-seed1 (superseded)"


def tried(root: Path, stage: str, variant: str = "brave-emu", baseline: str = "c0de", **options):
    """Return a run as a stage in `dvc exp run` writes it."""
    names = {"pipeline.variant": variant, "pipeline.baseline": baseline}
    return MlflowRun(key(root, stage, **options, **names))


def evaluated(run: MlflowRun, score: float) -> str:
    run.results({"mean_return": score})
    return finished(run)


def test_evaluating_in_a_dvc_experiment_does_not_change_the_run_of_the_baseline(tmp_path: Path):
    finished(MlflowRun(key(tmp_path, "train")))
    row = evaluated(MlflowRun(key(tmp_path, "evaluate")), 5.0)
    before = client(tmp_path).get_run(row).to_dictionary()
    first = evaluated(tried(tmp_path, "evaluate"), 7.0)
    assert client(tmp_path).get_run(row).to_dictionary() == before
    assert evaluated(tried(tmp_path, "evaluate"), 8.0) == first, "the same experiment again"
    other = evaluated(tried(tmp_path, "evaluate", "it's"), 9.0)
    assert len({row, first, other}) == 3
    rebased = evaluated(tried(tmp_path, "evaluate", baseline="beef"), 6.0)
    assert rebased != first, "the same name, based on another commit"
    retrained = finished(MlflowRun(key(tmp_path, "train", "b")))
    assert finished(MlflowRun(key(tmp_path, "evaluate"))) == retrained
    assert current(tmp_path) == {
        "walk-seed1": retrained,
        "walk-seed1 (brave-emu)": rebased,
        "walk-seed1 (it's)": other,
    }
    runs = [client(tmp_path).get_run(run_id) for run_id in (retrained, rebased, other)]
    groups = {run.data.tags["pipeline.experiment"] for run in runs}
    assert len(groups) == 3, "no two of them look like seeds of one experiment"


def test_a_dvc_experiment_has_a_separate_alias_and_keeps_the_alias_of_the_baseline(tmp_path: Path):
    played(tmp_path, 1, 5.0)
    played(tmp_path, 1, 6.0, **{"pipeline.variant": "brave-emu"})
    assert aliases(tmp_path) == {"best": "2", "walk": "1", "walk__brave-emu_": "2"}


def test_checkouts_that_share_a_store_write_to_separate_runs(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
    original.mkdir()
    first = finished(MlflowRun(key(original, "train")))
    shutil.copytree(original, copy)
    beside = finished(MlflowRun(key(copy, "evaluate")))
    assert beside != first
    original.rename(moved)
    assert finished(MlflowRun(key(moved, "evaluate"))) == first
    retrained = finished(MlflowRun(key(moved, "train", "b")))
    rows = client(tmp_path).search_runs(["1"], "tags.`pipeline.current` = 'yes'")
    assert {run.info.run_id for run in rows} == {retrained, beside}


def test_evaluation_of_another_policy_is_recorded_in_a_separate_mlflow_run(tmp_path: Path):
    """DVC restores an earlier policy from its cache, so that only the evaluation runs again."""

    def stage(name: str, policy: bytes, fingerprint: str = "a") -> str:
        (tmp_path / "policy.pt").write_bytes(policy)
        worked_on = None if name == "train" else md5(policy)
        run = MlflowRun(replace(key(tmp_path, name, fingerprint), policy=worked_on))
        if name == "train":
            run.made(tmp_path / "policy.pt")
        return finished(run)

    first = stage("train", b"first")
    assert stage("evaluate", b"first") == first
    second = stage("train", b"second", "b")
    assert stage("evaluate", b"second") == second
    assert stage("evaluate", b"first") == first, "the row of that policy is the current one again"
    assert current(tmp_path) == {"walk-seed1": first}
    unknown = stage("evaluate", b"unknown")
    assert unknown not in (first, second)
    assert stage("evaluate", b"unknown") == unknown
    assert current(tmp_path) == {"walk-seed1": unknown}
    assert client(tmp_path).get_run(unknown).data.tags["dvc.train"] == md5(b"unknown")
    assert stage("evaluate", b"second") == second


def test_training_does_not_continue_the_run_of_a_policy_that_was_only_evaluated(tmp_path: Path):
    """A clone has pulled and evaluated a policy; then it trains another policy."""
    row = finished(MlflowRun(replace(key(tmp_path, "evaluate"), policy=md5(b"pulled"))))
    assert finished(MlflowRun(key(tmp_path, "train", "b"))) != row


def test_a_later_stage_adds_params_to_the_run_but_changes_none(tmp_path: Path):
    train = MlflowRun(key(tmp_path, "train"))
    train.describe(described(tmp_path, learning_rate=3e-4), tmp_path)
    first = finished(train)
    export = MlflowRun(key(tmp_path, "export"))
    export.describe(described(tmp_path, learning_rate=1e-3, beta=0.1), tmp_path)
    assert finished(export) == first
    params = client(tmp_path).get_run(first).data.params
    assert params == {"learning_rate": "0.0003", "beta": "0.1"}
    assert len(client(tmp_path).get_run(first).inputs.dataset_inputs) == 1


def test_the_open_run_of_a_killed_attempt_is_ended_as_killed(tmp_path: Path, monkeypatch):
    killed = MlflowRun(key(tmp_path, "train"))
    killed.on_summary("Walker", {"loss": 1.0}, 1)
    with monkeypatch.context() as patched:
        patched.setattr(MlflowRun, "_terminate", lambda *_: None)  # so that the run stays open
        finished(killed)
    assert client(tmp_path).get_run(killed.run_id).info.status == "RUNNING"

    fresh = finished(MlflowRun(key(tmp_path, "train", fingerprint="b")))
    assert fresh != killed.run_id
    assert client(tmp_path).get_run(killed.run_id).info.status == "KILLED"


@pytest.mark.parametrize(
    ("fails", "n_attempts", "lost"),
    [
        (lambda call: call % 3 != 0, 12, 8),  # never three successive failures
        (lambda call: call in (2, 3, 4), 5, 3 + 7 + 1),  # then not even the end is written
    ],
)
def test_tracking_ends_after_three_successive_failures_but_not_after_fewer(
    fails, n_attempts, lost, tmp_path: Path, monkeypatch
):
    run = MlflowRun(key(tmp_path, "train"))
    run.settings({})
    written: list[dict[str, str]] = []
    set_tags = Store.set_tags

    def sometimes(self: Store, run_id: str, values) -> None:
        if run_id == run.run_id:  # another test's run may still be writing
            written.append(values)
            if fails(len(written) - 1):
                raise RuntimeError("no answer")
        set_tags(self, run_id, values)

    monkeypatch.setattr(Store, "set_tags", sometimes)
    for number in range(12):
        run.settings({f"n{number}": number})
    run.end()
    assert (len(written), run.lost) == (n_attempts, lost)
    tags = client(tmp_path).get_run(run.run_id).data.tags
    kept = {name for name in tags if name.startswith("train.n")}
    assert kept == {f"train.n{number}" for number in range(n_attempts) if not fails(number)}


def test_metric_points_lost_by_a_killed_training_are_restored_from_progress_csv(tmp_path: Path):
    curve = CsvSink(tmp_path / "progress.csv")
    run = MlflowRun(key(tmp_path, "train", resumed=True), prefix=True)
    for step in (1000, 2000, 3000):
        values = {names.REWARD: step / 1000, "Losses/Q1 Loss": 0.5}
        curve.on_summary("Walker", values, step)
        if step == 2000:
            run.on_summary("Walker", values, step)
    points = read_points(curve.path)
    run.trained({"Walker": {"steps": 3000}}, curve=points, seconds=None, interrupted=[])
    run_id = finished(run)
    assert client(tmp_path).get_run(run_id).data.metrics.get("train/training_s") is None
    for name, expected in ((names.REWARD, [1.0, 2.0, 3.0]), ("Losses/Q1 Loss", [0.5, 0.5, 0.5])):
        history = steps_of(run_id, tmp_path, f"Walker/{name}")
        assert sorted(history) == [*zip((1000, 2000, 3000), expected, strict=True)]


def played(root: Path, seed: int, score: float, build: str = "first", **tags: str) -> str:
    """Train, export and evaluate as the stages do; return the id of the run."""
    (root / "build").mkdir(exist_ok=True)
    (root / "build/walker").write_text(build)
    finished(MlflowRun(key(root, "train", str(score), seed=seed, **tags)))
    export = MlflowRun(key(root, "export", seed=seed, **tags))
    export.model(exported(root, score), environment="walk")
    export.model(exported(root, score), environment="walk")
    finished(export)
    evaluate = MlflowRun(key(root, "evaluate", seed=seed, **tags))
    evaluate.score(
        {"Walker": score}, environment="walk", build=root / "build", params={"episodes": 4}
    )
    return finished(evaluate)


def test_the_alias_best_moves_only_to_a_version_with_a_higher_score(tmp_path: Path):
    import mlflow

    store = client(tmp_path)
    first = played(tmp_path, 1, 5.0)
    assert aliases(tmp_path) == {"best": "1", "walk": "1"}
    played(tmp_path, 2, 4.0)
    assert aliases(tmp_path) == {"best": "1", "walk": "1"}, "a worse one"
    played(tmp_path, 3, 5.0)
    assert aliases(tmp_path) == {"best": "1", "walk": "1"}, "one that is as good"
    played(tmp_path, 4, 6.0)
    assert aliases(tmp_path) == {"best": "4", "walk": "4"}
    versions = store.search_model_versions(f"name = '{NAME}'")
    assert len(versions) == 4, "one for each run, though logged twice"
    version = store.get_model_version(NAME, "1")
    assert version.run_id == first
    assert version.tags["run"] == "walk-seed1"
    assert version.tags["evaluate.episodes"] == "4"
    assert version.tags["dvc.export"].endswith(".dir")
    model = store.get_logged_model(version.source.removeprefix("models:/"))
    assert [entry.value for entry in model.metrics if entry.key == "evaluate/mean_return"] == [5.0]
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    signature = mlflow.models.get_model_info(f"models:/{NAME}@best").signature
    assert signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 8)
    assert store.search_logged_models(["1"])[0].source_run_id is not None


def test_the_registered_model_has_the_exported_bytes_and_loads_as_onnx_and_pyfunc(tmp_path: Path):
    import mlflow

    training = MlflowRun(key(tmp_path, "train"))
    training.results({"mean_reward": 2.0})
    finished(training)
    export = MlflowRun(key(tmp_path, "export"))
    export.model(file := exported(tmp_path, 3.0), environment="walk")
    assert finished(export) == training.run_id
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    uri = f"models:/{NAME}/1"
    folder = mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "got"))
    assert (Path(folder) / "model.onnx").read_bytes() == file.read_bytes()
    graph = mlflow.onnx.load_model(uri).graph
    assert [output.name for output in graph.output] == ["continuous_actions"]
    acted = mlflow.pyfunc.load_model(uri).predict({"obs_0": np.zeros((2, 8), np.float32)})
    assert acted["continuous_actions"].tolist() == [[3.0] * 8] * 2
    needed = (Path(folder) / "requirements.txt").read_text().split()
    names = [line.partition("==")[0] for line in needed]
    assert names == ["mlflow", "onnx", "onnxruntime", "numpy"]
    model = client(tmp_path).search_logged_models(["1"])[0]
    assert (model.status, model.name) == ("READY", "Walker")
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": NAME, "version": 1}]
    assert {metric.key: metric.value for metric in model.metrics} == {"train/mean_reward": 2.0}


def test_an_unreachable_server_causes_one_warning_within_ten_seconds(tmp_path, monkeypatch, caplog):
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        port = bound_socket.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        run = MlflowRun(key(tmp_path, "train"))
        start = time.perf_counter()
        for step in range(1000):
            run.on_summary("Walker", {"loss": 1.0}, step)
        spent = time.perf_counter() - start
        run.end()
    assert spent < 10.0, "only the first summary asks, a few times"
    assert run.run_id is None
    messages = [r.message for r in caplog.records if "MLflow cannot be written" in r.message]
    assert len(messages) == 1


@pytest.mark.parametrize(("text", "wanted"), [("off", False), ("0", False), ("on", True)])
def test_variable_pipeline_mlflow_turns_mlflow_on_or_off(monkeypatch, text, wanted):
    monkeypatch.setenv("PIPELINE_MLFLOW", text)
    assert enabled() is wanted


def test_params_are_flattened_to_dotted_names():
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e(f)": {}}) == {
        "a.b": "1",
        "a.c.d": "[1, 2]",
        "e_f_": "{}",
    }


def test_mlflow_records_system_metrics_if_its_environment_variable_is_set(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = MlflowRun(key(tmp_path, "train"))
    run.settings({"begun": "yes"})
    deadline = time.monotonic() + 30
    seen: dict = {}
    while "system/cpu_utilization_percentage" not in seen and time.monotonic() < deadline:
        time.sleep(0.05)
        if run.run_id is not None:
            seen = client(tmp_path).get_run(run.run_id).data.metrics
    assert "system/system_memory_usage_megabytes" in seen
    finished(run)
    assert not monitors()
