"""MLflow runs of stages, written by another process or thread than the stage's main thread."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from interpreter import variables
from mlflow_runs import client, exported, key

from pipeline.dag import recorder
from pipeline.dag.recorder import WRITER, ForwardedRun
from pipeline.tracking.run_metadata import RunMetadata

STAGE = """
import sys
from pathlib import Path
from mlflow_runs import key
from pipeline.dag.recorder import ForwardedRun

run = ForwardedRun(key(Path(sys.argv[1]), "train"))
run.on_summary("Walker", {"loss": 0.5}, 10)
if sys.argv[2] == "dies":
    import os
    os._exit(9)
run.end()
print(run.run_id, run.lost, "mlflow" in sys.modules)
"""


@pytest.fixture
def store(tmp_path: Path, mlflow_tables: Path) -> None:
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")


@pytest.fixture(autouse=True)
def _own_store(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(WRITER, raising=False)


def started(arguments: list[str], **more: str) -> subprocess.Popen[str]:
    """Start this Python with code and its arguments, and read what it prints."""
    command = [sys.executable, "-c", *arguments]
    return subprocess.Popen(  # noqa: S603  # this Python
        command, env=variables(**more), stdout=subprocess.PIPE, text=True
    )


def stage(root: Path, more: dict[str, str], how: str = "ends") -> subprocess.Popen[str]:
    return started([STAGE, str(root), how], **more)


def written(run: ForwardedRun, root: Path) -> str:
    """Call each method that writes, as stages do; return the run's id."""
    row = RunMetadata(params={"lr": 1e-3}, configuration="seed: 1\n", data=[], note="a note")
    note = root / "note.txt"
    note.write_text("hello")
    run.describe(row, root)
    run.on_summary("Walker", {"loss": 0.5}, 10)
    run.on_image("Walker", "view", np.zeros((600, 600, 3), np.uint8), 10)
    numbers = {"Walker": {"steps": 20, "mean_reward": 2.0}}
    curve = [("Walker", "loss", 0.5, 10), ("Walker", "loss", 0.25, 20)]
    run.trained(numbers, curve=curve, seconds=2.0, interrupted=[])
    run.artifacts([note])
    run.made(note)
    run.model(exported(root, 1.0), environment="walk")
    run.score({"Walker": 3.0}, environment="walk", build=root / "absent", params={"episodes": 1})
    run.end()
    run.end()
    assert run.lost == 0
    assert run.run_id is not None
    return run.run_id


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_stage_writes_the_same_row_with_a_shared_writer_and_alone(
    tmp_path: Path, monkeypatch, *, is_shared: bool
):
    with recorder.serving() as variables:
        for name, value in variables.items() if is_shared else ():
            monkeypatch.setenv(name, value)
        run_id = written(ForwardedRun(key(tmp_path, "train"), prefix=True), tmp_path)
    store = client(tmp_path)
    run = store.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "walk-seed1")
    assert run.data.params == {"lr": "0.001"}
    assert run.data.metrics["train/steps_per_second"] == 10.0
    assert run.data.metrics["evaluate/mean_return"] == 3.0
    assert run.data.tags["train.exact"] == "yes"
    assert "dvc.train" in run.data.tags
    points = store.get_metric_history(run_id, "Walker/loss")
    assert [(point.step, point.value) for point in points] == [(10, 0.5), (20, 0.25)]
    folders = {item.path for item in store.list_artifacts(run_id)}
    assert folders == {"configuration.yaml", "images", "train"}
    model = store.get_registered_model("walk.Walker")
    assert {name: str(n) for name, n in model.aliases.items()} == {"best": "1", "walk": "1"}


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_stages_with_a_shared_writer_do_not_import_mlflow_and_may_be_killed(tmp_path: Path):
    with recorder.serving() as variables:
        killed = stage(tmp_path, variables, "dies")
        assert killed.communicate() == ("", None)
        assert killed.returncode == 9
        stages = [stage(tmp_path, variables) for _ in range(2)]
        lines = [process.communicate()[0].split() for process in stages]
    assert [line[1:] for line in lines] == [["0", "False"]] * 2
    runs = {run.info.run_id: run for run in client(tmp_path).search_runs(["1"])}
    assert {line[0] for line in lines} < {*runs}
    assert all(run.data.metrics == {"loss": 0.5} for run in runs.values())


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_stage_writes_by_itself_if_no_writer_answers(tmp_path: Path):
    with recorder.serving() as variables:
        pass
    for address in (variables[WRITER], str(tmp_path / "absent")):
        process = stage(tmp_path, {WRITER: address})
        run_id, n_lost, _ = process.communicate()[0].split()
        assert n_lost == "0"
        assert client(tmp_path).get_run(run_id).info.status == "FINISHED"


def test_a_writer_that_is_killed_does_not_fail_the_stage(
    tmp_path: Path, monkeypatch, caplog, request
):
    script = (
        "import os, sys, time\n"
        "from pipeline.dag import recorder\n"
        "recorder.MlflowRun = lambda *_, **__: os._exit(9)\n"
        "with recorder.serving() as variables:\n"
        "    print(*variables.values(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    folder = tempfile.mkdtemp()  # the writer cannot delete its files, and pytest's path is long
    request.addfinalizer(lambda: shutil.rmtree(folder))
    with started([script], TMPDIR=folder) as writer:
        monkeypatch.setenv(WRITER, writer.stdout.readline().strip())
        run = ForwardedRun(key(tmp_path, "train"))
        writer.wait()
    run.on_summary("Walker", {"loss": 0.5}, 10)
    run.end()
    assert run.run_id is None
    assert run.lost > 0
    assert caplog.text.count("MLflow cannot be written") == 1


def write_with(monkeypatch, *, wait_s: float = 0.0) -> None:
    """Replace `MlflowRun` by an object that is made after a wait, and writes nothing."""

    def made(*_, **__) -> Mock:
        time.sleep(wait_s)
        return Mock(run_id="7", lost=0)

    monkeypatch.setattr(recorder, "MlflowRun", made)


def test_a_stage_does_not_wait_for_a_store_that_is_locked(tmp_path: Path, monkeypatch):
    write_with(monkeypatch, wait_s=0.5)
    with recorder.serving() as variables:
        monkeypatch.setenv(WRITER, variables[WRITER])
        run, began = ForwardedRun(key(tmp_path, "train")), time.perf_counter()
        for step in range(20):
            run.on_image("Walker", "view", np.zeros((300, 300, 3), np.uint8), step)
        assert time.perf_counter() - began < 0.4
        run.end()
    assert run.run_id == "7"


def test_a_signal_during_a_message_does_not_block_the_end_of_the_stage(tmp_path, monkeypatch):
    write_with(monkeypatch)

    class Interrupting:
        def __reduce__(self):
            raise KeyboardInterrupt

    run = ForwardedRun(key(tmp_path, "train"))
    with pytest.raises(KeyboardInterrupt):
        run.settings({"a": Interrupting()})
    run.end("KILLED")
    assert run.lost > 0
    run = ForwardedRun(key(tmp_path, "train"))
    run.settings({"a": lambda: 0})  # a value that cannot be sent
    assert run.lost == 1
    run.end()


def test_a_project_whose_path_is_too_long_for_a_socket_has_no_shared_writer(monkeypatch):
    monkeypatch.setattr(recorder, "Listener", Mock(side_effect=OSError("AF_UNIX path too long")))
    with recorder.serving() as variables:
        assert variables == {}
