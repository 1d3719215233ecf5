"""A checkout with its MLflow store, copied and moved; each step a process of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from forked import forking
from interpreter import variables

from pipeline.tracking.mlflow_database import follow

pytestmark = pytest.mark.slow

STAGES = """
import json, sys
from pathlib import Path
from mlflow_runs import exported, finished, key
from pipeline.tracking.mlflow_run import MlflowRun

root, fingerprint = Path(sys.argv[1]), sys.argv[2]
path = exported(root, 1.0)
runs = []
for stage in sys.argv[3:]:
    run = MlflowRun(key(root, stage, fingerprint))
    if stage == "export":
        run.model(path, environment="walk")
    run.artifacts([path])
    if stage == "evaluate":
        run.score({"Walker": 5.0}, environment="walk", build=path.parent, params={})
    runs.append(finished(run))
print(json.dumps(runs))
"""

LOAD = """
import json, os, sys
from pathlib import Path
import mlflow
from pipeline.tracking.mlflow_store import Store

store = Store.existing(Path(sys.argv[1]))
mlflow.set_tracking_uri(store.uri)
loaded = mlflow.onnx.load_model("models:/walk.Walker@best")
info = mlflow.models.get_model_info("models:/walk.Walker@best")
whole = mlflow.pyfunc.load_model(info.model_uri)
rows = {}
for run in store.client.search_runs([store.experiment_id], "tags.`pipeline.current` = 'yes'"):
    rows[run.info.run_id] = [one.path for one in store.client.list_artifacts(run.info.run_id)]
print(json.dumps({"output": loaded.graph.output[0].name, "rows": rows}))
"""


LIBRARIES = (
    *("mlflow.onnx", "mlflow.pyfunc", "mlflow.tracing.client", "onnx"),
    *("mlflow.store.model_registry.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_store"),
    "pipeline.tracking.mlflow_run",
)


def python(script: str, *arguments: str | Path) -> object:
    env = {k: v for k, v in variables().items() if not k.startswith(("MLFLOW_", "DVC_"))}
    done = forking(*LIBRARIES).run("-c", script, *map(str, arguments), timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files_in(root: Path) -> dict[str, str]:
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which one run was trained, exported and evaluated; and the run."""
    root = tmp_path_factory.mktemp("made") / "my 100% chéckout"
    root.mkdir()
    runs = python(STAGES, root, "a", "train", "export", "evaluate")
    assert isinstance(runs, list)
    assert len(set(runs)) == 1
    shutil.copytree(root, root.with_name("kept"))
    return root, runs[0]


@pytest.fixture
def checkout(made: tuple[Path, str]) -> tuple[Path, str]:
    """The folder of `made`, restored in its place so that a test may change it."""
    root = made[0]
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(root.with_name("kept"), root)
    return made


def test_a_copied_checkout_leaves_the_original_as_it_is(checkout: tuple[Path, str]):
    root, run = checkout
    copy = root / "copy"  # below the original, so that their paths begin alike
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("copy"))
    before = files_in(root)
    assert python(STAGES, copy, "a", "evaluate") == [run], "the copy's own row goes on"
    (new,) = python(STAGES, copy, "b", "train")
    loaded = python(LOAD, copy)
    after = {name: digest for name, digest in files_in(root).items() if "copy/" not in name}
    assert after == {name: digest for name, digest in before.items() if "copy/" not in name}
    assert loaded == {"output": "continuous_actions", "rows": {new: ["train"]}}
    assert (copy / "mlartifacts" / new).is_dir()
    assert python(LOAD, root)["rows"] == {run: ["evaluate", "export", "train"]}


def test_a_moved_checkout_keeps_its_models_and_rows(checkout: tuple[Path, str], tmp_path: Path):
    root, run = checkout
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    loaded = python(LOAD, moved)
    assert loaded == {
        "output": "continuous_actions",
        "rows": {run: ["evaluate", "export", "train"]},
    }
    (retrained,) = python(STAGES, moved, "b", "train")
    assert python(LOAD, moved)["rows"] == {retrained: ["train"]}
    assert not root.exists(), "nothing was written where the checkout was"


def test_the_artifacts_that_a_user_keeps_elsewhere_stay_there(tmp_path: Path):
    for place in ("s3://bucket/mlartifacts", str(tmp_path / "shared"), f"{tmp_path}/mlartifacts"):
        follow("sqlite:///nowhere/mlflow.db", place, tmp_path / "mlartifacts")
