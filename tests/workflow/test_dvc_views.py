"""What a second clone gets from DVC's remote."""

from __future__ import annotations

from pathlib import Path

import pytest
from project import commit, copy_project, fast_stages, git, init_dvc, run, set_params

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_second_clone_pulls_and_only_evaluates(tmp_path: Path):
    root, clone = copy_project(tmp_path / "project"), tmp_path / "clone"
    text = (HERE / "swept.yaml").read_text()
    set_params(root, text[: text.index("sweeps:")])
    init_dvc(fast_stages(root))
    run(root, "dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    run(root, "dvc", "repro")
    commit(root, "built")
    run(root, "dvc", "push")
    git(root, "clone", "-q", str(root), str(clone))
    assert not (clone / "build").exists()
    run(clone, "dvc", "pull")
    run(clone, "dvc", "repro")
    assert not (clone / "ran.log").exists()
    path = clone / "params.yaml"
    path.write_text(path.read_text().replace("episodes: 8", "episodes: 9"))
    run(clone, "dvc", "repro")
    assert (clone / "ran.log").read_text().splitlines() == ["evaluate ball --seed 1", "report"]
