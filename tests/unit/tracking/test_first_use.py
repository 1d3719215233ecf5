"""Several processes create the MLflow store at the same time, or one is killed meanwhile."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interpreter import variables
from mlflow_runs import client

pytestmark = pytest.mark.slow

OPEN = """
import sys
from pathlib import Path
from pipeline.tracking.mlflow_store import Store
store = Store.open(Path(sys.argv[1]))
run = store.client.create_run(store.experiment_id, run_name=sys.argv[2]).info.run_id
store.client.set_terminated(run)
"""


def opening(root: Path, name: str) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in variables().items() if not k.startswith("MLFLOW_")}
    return subprocess.Popen([sys.executable, "-c", OPEN, str(root), name], env=env)  # noqa: S603


def runs_in(root: Path) -> set[str]:
    return {run.info.run_name for run in client(root).search_runs(["1"])}


def test_several_processes_that_start_at_once_create_one_mlflow_store(tmp_path: Path):
    processes = [opening(tmp_path, f"run{number}") for number in range(4)]
    assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    assert runs_in(tmp_path) == {"run0", "run1", "run2", "run3"}
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_a_process_killed_while_creating_the_store_leaves_no_broken_store(tmp_path: Path):
    process = opening(tmp_path, "killed")
    unfinished, limit = tmp_path / "mlflow.db.new", time.monotonic() + 60
    while not (unfinished.exists() and unfinished.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert unfinished.exists()
    assert not (tmp_path / "mlflow.db").exists()
    assert opening(tmp_path, "next").wait(120) == 0
    assert runs_in(tmp_path) == {"next"}
