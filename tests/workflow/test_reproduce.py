"""`pipeline archive` and `pipeline reproduce` of a small project, with its stages in full.

The environment of the reproduction is prepared, for its packages have 3 GB: it has the packages
that run the tests. tests/unit/cli/test_archive.py installs packages from locks.
"""

import sys
import venv
import zipfile
from pathlib import Path

import pytest
from project import copy_project, environment, run, set_params, tiny
from repositories import commit


def prepared(folder: Path) -> None:
    """Make an environment with the tests' packages and the code of the archive."""
    venv.create(folder / ".venv", symlinks=True)
    (packages,) = (folder / ".venv/lib").glob("python*/site-packages")
    paths = [str(folder / "project/src"), *(p for p in sys.path if p.endswith("site-packages"))]
    (packages / "a.pth").write_text("\n".join(paths))
    (folder / ".venv/.installed").touch()


@pytest.mark.slow
def test_project_is_archived_and_reproduced_and_a_changed_result_is_named(tmp_path: Path):
    root = copy_project(tmp_path / "project")
    set_params(root, tiny("plain", demonstrations={}))
    commit(root, "small")
    refused = run(root, "pipeline", "archive", "../a.zip", check=False)
    assert "not up to date: env@" in refused.stderr
    assert "`pipeline run`" in refused.stderr
    run(root, "pipeline", "run", "--cores", "2")
    for name in ("a.zip", "b.zip"):
        run(root, "pipeline", "archive", f"../{name}")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = archive.namelist()
    assert names == sorted(names)
    expected = {"archive.json", "README.md", "locks/torch.txt", "locks/train.txt"}
    expected |= {"project/params.yaml", "project/src/pipeline/__init__.py"}
    expected |= {"results/train/plain/seed1/progress.csv", "results/export/plain/seed1/3DBall.onnx"}
    assert expected <= set(names)
    assert not [name for name in names if name.startswith(("project/results", "code/"))]
    _reproduce(tmp_path, root)


def _reproduce(folder: Path, root: Path) -> None:
    empty = folder / "wheels"
    empty.mkdir()

    def reproduced(*words: str) -> tuple[int, str, str]:
        variables = environment(root)
        done = run(folder, "pipeline", "reproduce", "a.zip", *words, check=False, **variables)
        return done.returncode, done.stdout, done.stderr

    code, _, error = reproduced("--wheels", "wheels")
    assert (code, error.count("error: ")) == (2, 1)
    assert "No matching distribution found" in error
    prepared(folder / "a")
    code, output, error = reproduced("--cores", "2")
    assert code == 0, error
    n_results = len([path for path in (folder / "a/results").rglob("*") if path.is_file()])
    assert f"{n_results} of {n_results} results are identical." in output
    params = folder / "a/project/params.yaml"
    params.write_text(params.read_text().replace("max_steps: 4000", "max_steps: 5000"))
    code, output, error = reproduced("plain", "--engine", "dvc")
    assert code == 1, error
    assert "different: results/evaluate/plain/seed1/" in output
    assert "parameters of train" in output
    assert "settings.behaviors.3DBall.max_steps: 4000, 5000" in output
    assert error.endswith("error: a.zip: the results were not reproduced\n")
