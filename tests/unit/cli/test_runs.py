import argparse
import contextlib
from pathlib import Path

import pytest
from repositories import git

from pipeline.cli.runs import run
from pipeline.errors import PipelineError
from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import RunKey, dvc_digest

pytestmark = pytest.mark.slow

POLICY = Path("results/train/walk/seed1/policy.pt")
LOCK = """\
schema: '2.0'
stages:
  train@walk-1:
    cmd: python workflow/scripts/train.py walk --seed 1
    outs:
    - path: {path}
      hash: md5
      md5: {digest}
"""


def tell(root: Path, name: str | None, revision: str | None = None) -> str:
    with contextlib.chdir(root):
        return run(argparse.Namespace(run=name, at=revision, exact=False, rebuild=False))


def commit_lock(root: Path, message: str) -> None:
    git(root, "add", "dvc.lock")
    git(root, "commit", "-qm", message)


def trained(root: Path, weights: bytes) -> tuple[str, str]:
    """Write a training's MLflow row, and commit its dvc.lock; return run id and revision."""
    tags = {"mlflow.source.git.commit": "c0de"}
    names = {"experiment": "walk", "seed": 1, "stage": "train"}
    key = RunKey(**names, fingerprint=str(weights), root=root, tags=tags)
    (root / POLICY).parent.mkdir(parents=True, exist_ok=True)
    (root / POLICY).write_bytes(weights)
    with_row = MlflowRun(key)
    with_row.made(root / POLICY)
    with_row.end()
    assert with_row.run_id is not None
    digest = dvc_digest(root / POLICY)
    (root / "dvc.lock").write_text(LOCK.format(path=POLICY.as_posix(), digest=digest))
    commit_lock(root, f"with {weights.decode()}")
    return with_row.run_id, git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module", autouse=True)
def _no_server():
    """Unset a variable that MLflow itself sets when other tests of this process use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


@pytest.fixture(scope="module")
def project(_no_server, tmp_path_factory) -> tuple[Path, list[tuple[str, str]]]:
    root = tmp_path_factory.mktemp("project")
    git(root, "init", "-q")
    return root, [trained(root, b"first"), trained(root, b"second")]


def test_command_runs_prints_the_git_revision_that_has_the_outputs_of_an_mlflow_row(project):
    root, [(old, before), (new, after)] = project
    output = tell(root, "walk-1")
    assert f"{new} (current)" in output
    assert "as in results/" in output
    assert f"git checkout {after[:12]} && dvc checkout" in output
    output = tell(root, old)
    assert f"{old} (superseded)" in output
    assert "not as in results/" in output
    assert f"git checkout {before[:12]} && dvc checkout" in output


def test_command_runs_prints_the_mlflow_rows_of_the_outputs_in_a_git_revision(project):
    root, [(old, before), (new, after)] = project
    assert old in tell(root, None, revision=before)
    assert new in tell(root, None, revision=after)
    assert new not in tell(root, None, revision=before)


def test_dvc_lock_may_exceed_the_size_limit_of_settings_files(tmp_path: Path):
    root, stage = tmp_path, LOCK.partition("stages:\n")[2].format(path="other", digest="f00d")
    git(root, "init", "-q")
    row, _ = trained(root, b"first")
    with (root / "dvc.lock").open("a") as lock:
        lock.write(stage.replace("train@walk-1", "other").replace("python", "x" * 4_000_000))
    commit_lock(root, "long")
    assert row in tell(root, None, revision="HEAD")
    (root / "dvc.lock").write_text("stages: {")
    commit_lock(root, "broken")
    with pytest.raises(PipelineError, match=r"dvc\.lock of git revision 'HEAD' cannot be read"):
        tell(root, None, revision="HEAD")


def test_table_lists_runs_and_says_whether_their_files_equal_the_files_in_results(project):
    root, [_, (new, _after)] = project
    header, line = tell(root, None).splitlines()
    assert header.split()[0] == "run"
    assert line.split()[:2] == ["walk-1", new]
    assert line.endswith("as in results/")
    before = (root / POLICY).read_bytes()
    (root / POLICY).write_bytes(b"edited")
    assert tell(root, None).endswith("not as in results/")
    (root / POLICY).write_bytes(before)


def test_command_runs_refuses_an_unknown_run_or_git_revision(project):
    root, _ = project
    with pytest.raises(PipelineError, match=r"no run 'walk-7'; it has walk-1"):
        tell(root, "walk-7")
    with pytest.raises(PipelineError, match=r"'nowhere' does not exist, or has no dvc\.lock"):
        tell(root, None, revision="nowhere")


def test_command_runs_without_an_mlflow_store_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(PipelineError, match="there are no runs yet: run `pipeline run`"):
        tell(tmp_path, None)
    assert not (tmp_path / "mlflow.db").exists()
