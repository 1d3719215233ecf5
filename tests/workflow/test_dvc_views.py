"""What DVC shows of our files, and what a second clone gets from a remote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from project import commit, copy_project, fast_stages, git, init_dvc, run

from pipeline.settings.params import load_params
from pipeline.settings.plan import write_plan

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> Path:
    """A project that DVC has built with fast stages, committed, and pushed to a local remote."""
    folder = tmp_path_factory.mktemp("views")
    root = copy_project(folder / "project")
    text = (HERE / "swept.yaml").read_text()
    (root / "params.yaml").write_text(text[: text.index("sweeps:")])
    write_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    init_dvc(fast_stages(root))
    run(root, "dvc", "remote", "add", "--default", "store", str(folder / "store"))
    run(root, "dvc", "repro")
    commit(root, "built")
    run(root, "dvc", "push")
    return root


def test_a_second_clone_pulls_and_only_evaluates(pushed: Path, tmp_path: Path):
    clone = tmp_path / "clone"
    git(pushed, "clone", "-q", str(pushed), str(clone))
    assert not (clone / "build").exists()
    run(clone, "dvc", "pull")
    run(clone, "dvc", "repro")
    assert not (clone / "ran.log").exists()
    path = clone / "params.yaml"
    path.write_text(path.read_text().replace("episodes: 8", "episodes: 9"))
    run(clone, "dvc", "repro")
    assert (clone / "ran.log").read_text().splitlines() == ["evaluate ball --seed 1", "report"]


def test_an_experiment_is_run_from_the_command_line_and_shown_with_what_it_changed(pushed: Path):
    run(
        pushed, "dvc", "exp", "run", "-S", "experiments.ball.evaluation.episodes=20", "-n", "longer"
    )
    shown = run(pushed, "dvc", "exp", "show", "--csv", "--only-changed").stdout
    assert "experiments.ball.evaluation.episodes" in shown.splitlines()[0]
    assert "longer" in shown
    changed = json.loads(run(pushed, "dvc", "params", "diff", "--json").stdout)
    assert changed["params.yaml"]["experiments.ball.evaluation.episodes"] == {
        "old": 8,
        "new": 20,
        "diff": 12,
    }
    measured = json.loads(run(pushed, "dvc", "metrics", "diff", "--json").stdout)
    assert "results/evaluate/ball/seed1/metrics.json" in measured
    git(pushed, "checkout", "-q", "--", ".")
    run(pushed, "dvc", "checkout")
