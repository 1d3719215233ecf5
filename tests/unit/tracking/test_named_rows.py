"""MLflow and Weights & Biases record a training outside the DAG as a run of its own."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import yaml
from mlflow_runs import client

from pipeline.dag import run_context
from pipeline.dag.stages import export, train
from pipeline.errors import Interrupted, TrainingError
from pipeline.settings import load_run_settings
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import plan
from pipeline.tracking.base import Tracker
from pipeline.tracking.sinks import mlflow as mlflow_sink
from pipeline.tracking.sinks import named_sinks, run_outside_dag

TRAINER = "behaviors: {Walker: {trainer_type: ppo, max_steps: 40}}"
PARAMS = """\
environments: {hill: {source: builtin, name: balance_ball}}
experiments:
  walk:
    environment: hill
    trainer: trainer.yaml
    overrides: {}
    seeds: [3]
    stages: [train]
"""
REWARD = "Environment/Cumulative Reward"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder; HOME is another folder below it."""
    for name in ("MLFLOW_TRACKING_URI", "PIPELINE_MLFLOW", "DVC_ROOT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    (tmp_path / "params.yaml").write_text(PARAMS)
    build = tmp_path / "build/env/hill"
    build.mkdir(parents=True)
    (build / "hill").write_text("player")
    return tmp_path


def result_of(numbers: dict) -> SimpleNamespace:
    """A result of a run with final numbers by behavior."""
    return SimpleNamespace(numbers=lambda: numbers)


def described(folder: Path, **more):
    return run_outside_dag(
        load_run_settings(folder / "trainer.yaml"),
        env="build/env/hill/hill",
        folder=folder / "runs/walk",
        seed=3,
        source="pipeline learn",
        trainer="trainer.yaml",
        **more,
    )


def stage_run(folder: Path) -> run_context.Run:
    params = load_params(folder / "params.yaml")
    return run_context.Run(root=folder, params=params, name="walk", seed=3)


def rows(folder: Path) -> list:
    """Return the runs of the store in the folder."""
    return client(folder).search_runs(["1"])


def play(sink, *steps: int, complete: bool = True) -> None:
    sink.on_start("Walker", {})
    for step in steps:
        sink.on_summary("Walker", {REWARD: step / 10}, step)
        sink.on_distribution("Walker", REWARD, [0.0, step / 10], step)
    if complete:
        sink.on_end(result_of({"Walker": {"steps": 40.0, "mean_reward": 2.5}}))
    sink.close()
    sink.close()


def test_metadata_of_a_run_outside_the_dag_equals_the_metadata_of_the_stage_train(folder: Path):
    ours = described(folder)
    run = stage_run(folder)
    stage = run_context.row_of(run)
    assert ours.row.params == {k: v for k, v in stage.params.items() if k != "pretrain"}
    config, stage_config = (yaml.safe_load(row.configuration) for row in (ours.row, stage))
    assert config.keys() == stage_config.keys()
    assert config["behaviors"] == stage_config["behaviors"]
    assert [data.context for data in ours.row.data] == [data.context for data in stage.data]
    job = SimpleNamespace(job=SimpleNamespace(stage="train"), fingerprint="", resumed=False)
    key = run_context.key_of(run, job)
    assert ours.key.tags.keys() == key.tags.keys()
    assert (ours.key.name, key.name) == ("./runs/walk-seed3", "walk-seed3")


def test_each_demonstration_in_a_list_of_settings_is_recorded_as_a_separate_dataset(folder: Path):
    demos = "[one.demo, {path: more/two.demo, weight: 3}]"
    cloned = TRAINER.replace("}}", f", behavioral_cloning: {{demo_path: {demos}}}}}}}")
    (folder / "trainer.yaml").write_text(cloned)
    row = run_context.row_of(stage_run(folder))
    assert [(data.name, data.path) for data in row.data[1:]] == [
        ("one", "one.demo"),
        ("two", "more/two.demo"),
    ]


def test_training_job_export_job_and_plan_do_not_depend_on_the_chosen_sinks(folder: Path):
    def jobs() -> list:
        run = stage_run(folder)
        return [train.job_of(run), export.job_of(run), plan(run.params)]

    before = jobs()
    (folder / "params.yaml").write_text(f"{PARAMS}track: [jsonl]\n")
    assert jobs() == before


@pytest.mark.slow
def test_a_resumed_training_continues_its_mlflow_run_and_completes_the_curve(folder: Path):
    run = folder / "runs/walk"
    (run / "Walker").mkdir(parents=True)
    (run / "Walker/checkpoint.pt").write_bytes(b"weights")
    (sink,) = named_sinks(described(folder), ["mlflow"])
    play(sink, 10, 20, complete=False)
    (run / "progress.csv").write_text("behavior,step,reward\nWalker,10,1\nWalker,30,3\n")
    (resumed,) = named_sinks(described(folder, resume=True), ["mlflow"])
    play(resumed, 40)
    (row,) = rows(folder)
    assert (row.info.run_name, row.info.status) == ("./runs/walk-seed3", "FINISHED")
    assert row.data.params["trainer"] == "trainer.yaml"
    assert row.data.metrics["train/mean_reward"] == 2.5
    history = client(folder).get_metric_history(row.info.run_id, REWARD)
    # The killed attempt has lost step 30, which is in progress.csv.
    assert sorted((point.step, point.value) for point in history) == [
        (10, 1),
        (20, 2),
        (30, 3),
        (40, 4),
    ]
    assert {"dvc.train", "dvc.environment", "mlflow.note.content"} <= row.data.tags.keys()
    (new,) = named_sinks(described(folder), ["mlflow"])
    play(new, 10)
    assert sorted(entry.data.tags["pipeline.current"] for entry in rows(folder)) == ["no", "yes"]


@pytest.mark.slow
def test_mlflow_status_distinguishes_failed_stopped_and_inexactly_resumed_runs(folder: Path):

    def status(error: Exception | None, *, resume: bool = True, **numbers: float) -> tuple:
        sinks = named_sinks(described(folder, resume=resume), ["mlflow"])
        with nullcontext() if error is None else pytest.raises(type(error)), Tracker(sinks) as all_:
            all_.tell("on_start", "Walker", {})
            if error is not None:
                raise error
            all_.tell("on_end", result_of({"Walker": {"steps": 40.0, **numbers}}))
        (row,) = rows(folder)
        return row.info.status, row.data.tags.get("train.exact")

    assert status(TrainingError("diverged"), resume=False) == ("FAILED", None)
    assert status(Interrupted("told to stop")) == ("KILLED", None)
    note = "interrupted at steps 30, not exact"
    assert status(None, interrupted_at_step=30) == ("FINISHED", note)
    assert status(None) == ("FINISHED", "yes")


def records(path: Path) -> list:
    """Return the records of a file of Weights & Biases, which is a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at, parts, parsed = 7, b"", []  # after the header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no part begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            parsed.append(Record.FromString(parts))
            parts = b""
    return parsed


@pytest.mark.slow
def test_wandb_without_a_login_writes_a_complete_offline_run(folder: Path, caplog):
    import wandb

    caplog.set_level("INFO")
    run = folder / "runs/walk"
    run.mkdir(parents=True)
    (sink,) = named_sinks(described(folder), ["wandb"])
    play(sink, 10, 20)
    wandb.teardown()  # its process still writes after the end of a run
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    read = records(file)
    (run_record,) = [record.run for record in read if record.WhichOneof("record_type") == "run"]
    assert (run_record.project, run_record.display_name) == ("pipeline", "./runs/walk-seed3")
    assert run_record.run_id == (run / "wandb/run-id.txt").read_text()
    config = {setting.key: setting.value_json for setting in run_record.config.update}
    assert config["trainer"] == '"trainer.yaml"'
    assert config["learning_rate"] == "0.0003"
    rows = [
        {(*item.nested_key, item.key)[0]: item.value_json for item in record.history.item}
        for record in read
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row[REWARD]) for row in rows if REWARD in row] == [
        ("10", "1"),
        ("20", "2"),
    ]
    assert sum(f"{REWARD}_hist" in row for row in rows) == 2
    summary = {item.key: item.value_json for record in read for item in record.summary.update}
    assert summary["train/mean_reward"] == "2.5"
    (exit_,) = [record.exit for record in read if record.WhichOneof("record_type") == "exit"]
    assert exit_.exit_code == 0
    assert "wandb sync" in caplog.text
    (resumed,) = named_sinks(described(folder, resume=True), ["wandb"])
    play(resumed, 30, complete=False)
    wandb.teardown()
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{run_record.run_id}"}


def test_wandb_that_cannot_start_logs_one_warning_and_is_not_tried_again(
    folder: Path, caplog, monkeypatch
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    timeouts = []

    def refuse(**options):
        timeouts.append(options["settings"].init_timeout)
        raise OSError("no way to the server\nConsider waiting")

    monkeypatch.setattr(wandb, "init", refuse)
    (sink,) = named_sinks(described(folder), ["wandb"])
    sink.on_start("Walker", {})
    play(sink, 10, 20)
    assert timeouts == [30]
    assert [record.message for record in caplog.records] == [
        "The run cannot be written to Weights & Biases (OSError: no way to the server). "
        "WANDB_MODE=offline writes the run into files."
    ]


def test_metadata_and_key_of_a_run_include_the_options_with_which_the_run_was_started(folder: Path):
    text = "behaviors: {Walker: {max_steps: 40}, Guide: {max_steps: 70}}"
    (folder / "trainer.yaml").write_text(f"{text}\nenv_settings: {{num_envs: 2}}\n")
    started = {"num_envs": 5, "device": "cuda", "torch_threads": 3, "resume": True}
    run = described(folder, debug_folder=folder / "debug", **started)
    configuration = yaml.safe_load(run.row.configuration)
    assert configuration["env_settings"]["num_envs"] == 5
    assert yaml.safe_load(described(folder).row.configuration)["env_settings"]["num_envs"] == 2
    assert {run.row.params[name] for name in ("torch_threads", "device")} == {3, "cuda"}
    assert (run.keep_earlier, run.key.resumed) == (True, True)
    assert (described(folder).keep_earlier, described(folder).key.resumed) == (False, False)
    assert (run.debug_folder, run.key.seed) == (folder / "debug", 3)
    assert (run.max_steps, run.prefixed) == ({"Walker": 40, "Guide": 70}, True)
    assert not replace(run, max_steps={"Walker": 40}).prefixed


def test_the_mlflow_sink_writes_params_results_and_files_of_each_behavior_once(
    folder: Path, monkeypatch
):
    told = Mock()
    for name in ("describe", "params", "trained", "made", "model"):
        monkeypatch.setattr(mlflow_sink.MlflowRun, name, getattr(told, name))
    clock = iter((100.0, 130.0))
    monkeypatch.setattr(mlflow_sink, "time", SimpleNamespace(monotonic=clock.__next__))
    run = described(folder)
    (sink,) = named_sinks(run, ["mlflow"])
    for behavior, threshold in (("Walker", 1), ("Guide", 2)):
        sink.on_start(behavior, {"threshold": threshold})
    (run.folder / "Guide").mkdir(parents=True)
    (run.folder / "Guide/checkpoint.pt").touch()
    (run.folder / "Walker.onnx").touch()
    results = {"Walker": {"interrupted_at_step": 30.0}, "Guide": {"interrupted_at_step": 20.0}}
    sink.on_end(result_of(results))
    model, hill = run.folder / "Walker.onnx", {"environment": "hill"}
    assert told.mock_calls == [
        call.describe(run.row, folder),
        call.params({"Guide.threshold": 2}),
        call.trained(results, curve=[], seconds=30.0, interrupted=[20, 30]),
        call.made(model, what="export.Walker"),
        call.model(model, made=model, **hill),
        call.made(run.folder / "Guide/checkpoint.pt", what="train.Guide"),
    ]
