"""A store that cannot be opened causes one warning without delay, and the stage continues."""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interpreter import python
from mlflow_runs import key

from pipeline.cli import main as cli
from pipeline.errors import PipelineError
from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.mlflow_store import Store

LIMIT_S = 15.0
"""MLflow itself would try for 100 s."""


def cut_off(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
        database.commit()
    path.write_bytes(path.read_bytes()[:100].ljust(8192, b"\xff"))


def in_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("in the place of the checkout")


BROKEN: dict[str, Callable[[Path], object]] = {
    "a folder in its place": Path.mkdir,
    "no database": lambda path: path.write_bytes(b"no database" * 1000),
    "a damaged database": cut_off,
    "a file in the checkout's place": in_a_file,
}


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "checkout").mkdir()
    return tmp_path / "checkout"


def stage(root: Path) -> MlflowRun:
    run = MlflowRun(key(root, "train"))
    run.results({"mean_reward": 1.0})
    run.end()
    return run


def refused(root: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return a stage's only warning; the stage must end in time."""
    began = time.monotonic()
    run = stage(root)
    assert time.monotonic() - began < LIMIT_S
    assert run.run_id is None
    (warning,) = caplog.messages
    assert "the MLflow store" in warning
    assert "MLflow cannot be written" in warning
    return warning


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_store_causes_one_warning_without_delay(
    broken: str, root: Path, caplog: pytest.LogCaptureFixture
):
    BROKEN[broken](root / "mlflow.db")
    refused(root, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EXCLUSIVE", "IMMEDIATE"])
def test_tracking_is_given_up_within_seconds_if_another_program_has_locked_the_store(
    kind: str, root: Path, caplog: pytest.LogCaptureFixture
):
    with holding(root / "mlflow.db", kind):
        assert "database is locked" in refused(root, caplog)


@contextlib.contextmanager
def holding(path: Path, kind: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
        database.isolation_level = None
        database.execute(f"BEGIN {kind}")
        yield


@pytest.mark.parametrize("command", [["runs"], ["ui"]])
@pytest.mark.parametrize("broken", ["a folder in its place", "no database"])
def test_commands_that_read_a_broken_store_report_the_error_in_one_line(
    command: list[str],
    broken: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    BROKEN[broken](root / "mlflow.db")
    monkeypatch.chdir(root)
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the MLflow store {root / 'mlflow.db'} cannot be opened: ")


def test_an_unreachable_server_is_reported_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(PipelineError, match=r"the MLflow store cannot be opened: .*127\.0\.0\.1"):
        Store.existing(root)


WITHOUT_RIGHTS = """
import logging, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_unusable_store import stage
began = time.monotonic()
assert stage(Path(sys.argv[1])).run_id is None
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_missing_permission_to_write_the_store_is_reported_without_delay(what: str, root: Path):
    user = (
        [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override"]
    )  # root has every permission otherwise
    if user and not shutil.which(user[0]):
        pytest.skip("the superuser has every right, and setpriv is not here to take it away")
    path = root / "mlflow.db"
    path.touch()
    locked, mode = (path, 0o444) if what == "the file" else (root, 0o555)
    locked.chmod(mode)
    try:
        done = python("-c", WITHOUT_RIGHTS, root, Path(__file__).parent, before=user)
    finally:
        locked.chmod(0o755)
    assert done.stderr.count("MLflow cannot be written") == 1
    assert f"the MLflow store {path} cannot be opened: " in done.stderr
    assert {"the file": "no right to write", "the folder": "Permission denied"}[what] in done.stderr
    assert float(done.stdout) < LIMIT_S


TAKEN_AWAY = """
import logging, sys, time
from pathlib import Path
from mlflow_runs import key
from pipeline.tracking.mlflow_run import MlflowRun
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("pipeline").setLevel(sys.argv[2])
root = Path(sys.argv[1])
run = MlflowRun(key(root, "train"))
run.settings({"begun": "yes"})
(root / "mlflow.db").rename(root / "elsewhere.db")
run.results({"mean_reward": 1.0})
run.end()
"""


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_mlflow_store_moved_during_a_run_logs_one_warning_and_a_traceback_only_at_debug_level(
    level: str, root: Path
):
    done = python("-c", TAKEN_AWAY, root, level)
    warnings = [line for line in done.stderr.splitlines() if "MLflow cannot be written" in line]
    assert len(warnings) == 1
    assert ("Traceback" in done.stderr) == (level == "DEBUG")
    assert level == "DEBUG" or done.stderr.splitlines() == warnings
