"""Reports of users who keep runs in MLflow, and copy, move and repeat projects."""

import contextlib
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from forked import forking
from free_ports import free_ports
from interpreter import variables
from mlflow import MlflowClient
from mlflow_runs import client, in_mlflow, in_results, key, ran

from pipeline.cli import doctor
from pipeline.cli import main as cli
from pipeline.errors import PipelineError
from pipeline.tracking import mlflow_store
from pipeline.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.slow

STAGES = ("train", "export", "evaluate")


@pytest.fixture
def project(tmp_path: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an empty store of its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    root = tmp_path / "original"
    root.mkdir()
    shutil.copy(mlflow_tables, root / "mlflow.db")
    return root


def uri_of(root: Path) -> str:
    return f"sqlite:///{root / 'mlflow.db'}"


def files_in(root: Path) -> dict[str, str]:
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def test_training_repeated_with_an_equal_result_keeps_the_mlflow_row_of_the_first_training(project):
    (row,) = {ran(project, stage) for stage in STAGES}
    before = in_mlflow(uri_of(project))
    again = ran(project, "train")
    assert again == row, "later stages, and the stage's own record, name the row that is kept"
    assert in_mlflow(uri_of(project)) == before == in_results(project)
    kept = client(project).get_run(row)
    assert (kept.info.run_name, kept.info.status) == ("walk-seed1", "FINISHED")
    assert "mlflow.parentRunId" not in kept.data.tags
    model = client(project).get_model_version_by_alias("walk.Walker", "best")
    assert model.run_id == row
    (repeated,) = (run for run in client(project).search_runs(["1"]) if run.info.run_id != row)
    assert repeated.info.run_name == "walk-seed1 (superseded)"
    assert repeated.info.status == "FINISHED"
    assert repeated.data.tags["mlflow.parentRunId"] == row
    # As Snakemake does, which reruns all stages after a forced stage.
    assert {ran(project, stage) for stage in STAGES} == {row}
    assert in_mlflow(uri_of(project)) == before
    assert len(client(project).search_model_versions("name = 'walk.Walker'")) == 1


def test_stages_with_restored_settings_write_to_the_mlflow_row_of_the_restored_policy_again(
    project,
):
    """An interrupted training in between does not take the row of the restored policy."""

    def run(*stages, **options) -> str:
        (row,) = {ran(project, stage, **options) for stage in stages}
        return row

    first = run(*STAGES)
    other = run("train", policy=2.0)
    (facts,) = in_mlflow(uri_of(project)).values()
    assert set(facts) == {"dvc.train"}, "without the old evaluation"
    assert run("export", "evaluate", policy=2.0, score=7.0) == other != first
    assert in_mlflow(uri_of(project)) == in_results(project)
    assert run(*STAGES) == first
    assert in_mlflow(uri_of(project)) == in_results(project)
    stopped = MlflowRun(key(project, "train", "2.0"))
    stopped.end("KILLED")
    assert run("evaluate", score=6.0) == first
    assert in_mlflow(uri_of(project)) == in_results(project)
    row = client(project).get_run(stopped.run_id)
    assert (row.info.status, row.data.tags["pipeline.current"]) == ("KILLED", "no")


def test_prune_marks_rows_of_removed_experiments_as_not_current(project, monkeypatch, capsys):
    """`pipeline plan --prune`; the rows stay in the store, and come back with the experiment."""
    (row,) = {ran(project, stage) for stage in STAGES}
    (second,) = {ran(project, stage, seed=2) for stage in STAGES}
    (project / "t.yaml").write_text("behaviors: {Walker: {}}\n")
    described = "environments: {{walk: gymnasium:CartPole-v1}}\nexperiments: {{{}}}\n"
    of_walk = (
        "walk: {environment: walk, trainer: t.yaml, overrides: {}, seeds: [1], "
        "stages: [train, export, evaluate], evaluation: {episodes: 1, seed: 1}}"
    )
    monkeypatch.chdir(project)
    for experiments, left, said in ((of_walk, [row], 1), ("", [], 1), ("", [], 0)):
        Path("params.yaml").write_text(described.format(experiments))
        assert cli.main(["plan", "--prune"]) == 0
        assert f"rows removed from MLflow's tables: {said}." in capsys.readouterr().out
        current = client(project).search_runs(["1"], "tags.`pipeline.current` = 'yes'")
        assert [run.info.run_id for run in current] == left
    assert client(project).get_run(second).data.tags["dvc.evaluate"]
    assert in_results(project) == in_mlflow(uri_of(project)) == {}
    assert ran(project, "train") == row
    assert [*in_mlflow(uri_of(project))] == [("walk", "1")]


def test_deleted_mlflow_experiment_is_restored_by_the_printed_command(
    project: Path, monkeypatch: pytest.MonkeyPatch, refused, caplog
):
    """Regression: a table without rows was printed, and stages advised the wrong remedy."""
    (row,) = {ran(project, stage) for stage in STAGES}
    monkeypatch.chdir(project)
    client(project).delete_experiment("1")
    error = refused("runs")
    assert error == refused("ui")
    assert error.startswith("MLflow's experiment 'pipeline' was deleted; `")
    stage = MlflowRun(key(project, "train", "again"))
    stage.end()
    (warning,) = caplog.messages
    assert error in warning
    pasted(error, brings="1")
    assert [*in_mlflow(uri_of(project))] == [("walk", "1")]
    assert ran(project, "train") == row


def test_renamed_mlflow_experiment_is_named_in_the_error(project, monkeypatch, refused, capsys):
    """Regression: an experiment of the old name was made, and its empty table printed."""
    row = ran(project, "train")
    monkeypatch.chdir(project)
    client(project).rename_experiment("1", "mine")
    error = refused("runs")
    assert error == refused("ui")
    assert error == (
        "MLflow has no experiment 'pipeline'; it has 'mine': MLFLOW_EXPERIMENT_NAME chooses one"
    )
    assert {each.name for each in client(project).search_experiments()} == {"mine", "Default"}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert cli.main(["runs"]) == 0
    assert row in capsys.readouterr().out


@pytest.mark.parametrize(
    ("revision", "said"),
    [("451aebb31d03", "'mlflow db upgrade <database_uri>'"), ("0123456789ab", "0123456789ab")],
)
def test_doctor_reports_a_store_of_another_mlflow_version(project: Path, revision: str, said: str):
    """Regression: doctor reported OK, but no stage could write into the store."""
    assert doctor.CHECKS["MLflow"](project) == "mlflow.db, 0 runs"
    other = shutil.copytree(project, project.with_name("other"))
    with contextlib.closing(sqlite3.connect(other / "mlflow.db")) as store:
        store.execute("update alembic_version set version_num = ?", (revision,))
        store.commit()
    with pytest.raises(doctor.Problem) as problem:
        doctor.CHECKS["MLflow"](other)
    assert str(problem.value).startswith(f"{other}/mlflow.db cannot be read (")
    assert said in str(problem.value)


def pasted(message: str, *, brings: str) -> None:
    """Run the command that a message prints, with MLflow's own function in place of its program."""
    command = re.search(r"`(MLFLOW_TRACKING_URI=.*)`", message)[1]
    uri, *words = shlex.split(command)
    assert words == ["mlflow", "experiments", "restore", "-x", brings]
    store = MlflowClient(tracking_uri=uri.removeprefix("MLFLOW_TRACKING_URI="))
    store.restore_experiment(brings)


# Separate processes, because a process remembers where a run's artifacts are.
PROGRAM = """
import json, sys
from pathlib import Path
from mlflow_runs import ran

root, seeds, options = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
print(json.dumps([ran(root, stage, k, **options) for k in seeds for stage in sys.argv[4:]]))
"""
LIBRARIES = (
    *("mlflow.onnx", "mlflow.pyfunc", "mlflow.tracing.client", "onnx"),
    *("mlflow.store.model_registry.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_store"),
    "pipeline.tracking.mlflow_run",
)


def stages(
    root: Path,
    *names: str,
    seeds: Sequence[int] = (1,),
    more: dict[str, str] | None = None,
    **options: float,
) -> str:
    """Run stages in a separate process; return the run id of each seed, separated by spaces."""
    env = {k: v for k, v in variables().items() if not k.startswith(("MLFLOW_", "DVC_"))}
    told = (json.dumps(list(seeds)), json.dumps(options))
    done = forking(*LIBRARIES).run(
        *("-c", PROGRAM, str(root), *told, *names), timeout=300, env=env | (more or {})
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])  # MLflow prints addresses before
    assert len(set(runs)) == len(seeds), "the stages of a seed share a row"
    return " ".join(dict.fromkeys(runs))


def copied(root: Path) -> tuple[Path, dict[str, str]]:
    """A copy of a project with its runs, and the original's files before anything runs in it."""
    return shutil.copytree(root, root.with_name("copy"), symlinks=True), files_in(root)


def renamed(root: Path) -> dict[str, str]:
    client(root).rename_experiment("1", "of the original")
    return {}


def deleted_and_named(root: Path) -> dict[str, str]:
    client(root).delete_experiment("1")
    return {"MLFLOW_EXPERIMENT_NAME": "mine"}


def of_another_name(root: Path) -> dict[str, str]:
    (root / "mlflow.db").rename(root / "runs.db")
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{root / 'runs.db'}"}


PLACES = {"copied": shutil.copytree, "moved": Path.rename}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [lambda _: {}, renamed, deleted_and_named, of_another_name])
def test_copied_or_moved_store_is_refused_and_not_written_to(
    change: Callable[[Path], dict[str, str]],
    place: str,
    project: Path,
    monkeypatch,
    refused,
    caplog,
):
    """mlflow#3144: locations in the store are absolute."""
    ran(project, "train")
    there = project.with_name("my 100% chéckout")
    PLACES[place](project, there)
    before = files_in(project)
    monkeypatch.chdir(there)
    for name, text in change(there).items():
        monkeypatch.setenv(name, text)
    error = refused("runs")
    assert error == refused("ui")
    assert error == (
        f"the MLflow store here was made in {project} and keeps its artifacts there; `pipeline "
        "runs --rebuild` makes a store of this folder from the files in results/"
    )
    stage = MlflowRun(key(there, "train", "b"))
    stage.results({"loss": 1.0})
    stage.end()
    (warning,) = caplog.messages
    assert error in warning
    assert stage.run_id is None
    assert files_in(project) == before


def test_mlflow_artifacts_in_another_place_are_not_taken_for_a_moved_store(tmp_path: Path):
    def refuse(place: str) -> None:
        experiments = SimpleNamespace(
            search_experiments=lambda **_: [SimpleNamespace(artifact_location=place)]
        )
        mlflow_store._refuse_moved(experiments, tmp_path / "mlartifacts")

    for place in ("s3://bucket/mlartifacts", "mlflow-artifacts:/1", str(tmp_path / "shared")):
        refuse(place)
    refuse((tmp_path / "mlartifacts").as_uri())
    with pytest.raises(PipelineError, match=f"made in {tmp_path}/x and keeps"):
        refuse(f"{tmp_path}/x/mlartifacts")


def test_checkouts_with_a_shared_store_write_artifacts_next_to_the_store(project, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (project / "mlflow.db").rename(shared / "mlflow.db")
    more = {"MLFLOW_TRACKING_URI": uri_of(shared)}
    first = stages(project, *STAGES, more=more)
    copy, before = copied(project)
    second = stages(copy, *STAGES, score=6.0, more=more)
    assert files_in(project) == before
    assert not list(project.rglob("mlartifacts"))
    assert {first, second} <= {path.name for path in (shared / "mlartifacts").iterdir()}


class Server:
    """An MLflow server behind a proxy, which fails as the attribute `failing` says."""

    def __init__(self, folder: Path) -> None:
        self.failing: dict[str, tuple[int, int, str]] = {}
        """By the end of a path: number of failures that are left, their status and their text."""
        self.port = free_ports(1)
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", uri_of(folder)]
        command += ["--artifacts-destination", str(folder / "mlartifacts")]
        environment = variables(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        self.process = subprocess.Popen(  # noqa: S603  # MLflow's own server
            command,
            cwd=folder,
            env={name: text for name, text in environment.items() if name != "MLFLOW_TRACKING_URI"},
            start_new_session=True,  # the server's workers are ended with it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        handler = type("Handler", (Between,), {"server_before": self})
        self.front = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.front.serve_forever, args=(0.01,))
        self.thread.start()
        self.uri = f"http://127.0.0.1:{self.front.server_port}"

    def wait(self) -> None:
        limit = time.monotonic() + 120
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                address = f"http://127.0.0.1:{self.port}/health"
                with urllib.request.urlopen(address, timeout=5):  # loopback
                    return
            except OSError:
                time.sleep(0.1)
        pytest.fail("MLflow's server does not answer")

    def close(self) -> None:
        self.front.shutdown()
        self.thread.join()
        self.front.server_close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Between(BaseHTTPRequestHandler):
    server_before: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        failing, path = self.server_before.failing, urlsplit(self.path).path
        end = next((end for end in failing if path.endswith(end) and failing[end][0]), None)
        if end is not None:
            left, status, text = failing[end]
            failing[end] = (left - 1, status, text)
            self.reply(status, text.encode())
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server_before.port)
        headers = {k: v for k, v in self.headers.items() if k != "Host"}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        self.reply(response.status, response.read())
        connection.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815  # names of http.server

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(
    tmp_path: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A server that no stage has used yet."""
    folder = tmp_path / "server"
    folder.mkdir()
    shutil.copy(mlflow_tables, folder / "mlflow.db")
    started = Server(folder)
    try:
        started.wait()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", started.uri)
        yield started
    finally:
        started.close()


RACE = json.dumps({"error_code": "BAD_REQUEST", "message": "UNIQUE constraint failed"})


def test_two_stages_that_start_at_once_and_a_server_restart_lose_no_mlflow_row(server, tmp_path):
    """mlflow#6358: two stages begin at once, and one loses the race for a tag."""
    root = tmp_path / "project"
    server.failing = {
        "experiments/create": (1, 400, RACE),
        "experiments/get-by-name": (2, 503, "<html>restarting</html>"),
        "runs/create": (2, 503, "<html>restarting</html>"),
        "runs/log-batch": (2, 503, "<html>restarting</html>"),
    }
    # Another stage has made both already, which the server's error need not say.
    MlflowClient(f"http://127.0.0.1:{server.port}").create_registered_model("walk.Walker")
    MlflowClient(f"http://127.0.0.1:{server.port}").create_experiment("pipeline")
    (row,) = {ran(root, stage) for stage in ("train", "export")}
    assert server.failing.pop("experiments/create")[0] == 1, "it is there already"
    assert {left for left, _, _ in server.failing.values()} == {0}
    server.failing = {}
    assert ran(root, "evaluate") == row
    assert in_mlflow(server.uri) == in_results(root)


def test_mlflow_rows_on_a_server_agree_with_results_after_copies_and_moves(server, tmp_path):
    """Each step as users do it; after each one every current row is compared with `results/`."""

    def agrees(root: Path, uri: str, experiment: str = "pipeline") -> dict:
        rows, files = in_mlflow(uri, experiment), in_results(root)
        assert rows == files
        return rows

    # Four processes at once on an unused server.
    served = tmp_path / "served"
    more = {"MLFLOW_TRACKING_URI": server.uri}
    with ThreadPoolExecutor() as pool:
        for begun in [
            pool.submit(stages, served, *STAGES, more=more, seeds=[seed], score=seed)
            for seed in range(1, 5)
        ]:
            begun.result()
    assert len(agrees(served, server.uri)) == 4
    copy = shutil.copytree(served, tmp_path / "copy of served")
    stages(copy, "evaluate", more=more, score=8.0)
    rows = MlflowClient(server.uri).search_runs(["1"], "tags.`pipeline.current` = 'yes'")
    assert len(rows) == 5, "the copy has a row of its own beside the four"
    moved = served.rename(tmp_path / "moved")
    stages(moved, "evaluate", more=more, score=9.0)
    rows = MlflowClient(server.uri).search_runs(["1"], "tags.`pipeline.current` = 'yes'")
    assert len(rows) == 5, "the moved checkout keeps its rows"
