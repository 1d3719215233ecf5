"""Which results git keeps: small files of stages, and no files of single runs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from repositories import git

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "-q")
    shutil.copy(ROOT / ".gitignore", root)
    return root


def is_ignored(root: Path, path: str) -> bool:
    command = ["git", "-C", str(root), "check-ignore", "-q", path]
    return subprocess.run(command, check=False).returncode == 0  # noqa: S603  # git


def outputs() -> dict[str, bool]:
    """Return each output below results/ in dvc.yaml, and whether git should keep it."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    kept_by_git: dict[str, bool] = {}
    for stage in stages.values():
        definition = stage.get("do", stage)
        for group in ("outs", "metrics", "plots"):
            for entry in definition.get(group, ()):
                path, options = (
                    next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
                )
                path = re.sub(r"\$\{[^}]*\}", "1", path)
                if path.startswith("results/"):
                    kept_by_git[path] = (options or {}).get("cache") is False
    return kept_by_git


def test_outputs_that_dvc_does_not_cache_are_not_ignored_by_git(repository):
    small = [path for path, by_git in outputs().items() if by_git]
    assert len(small) > 8
    assert [path for path in small if is_ignored(repository, path)] == []


def test_large_outputs_that_dvc_caches_are_ignored_by_git(repository):
    by_dvc = [path for path, by_git in outputs().items() if not by_git]
    large = [path for path in by_dvc if not path.endswith((".json", ".csv"))]
    assert len(large) > 5
    assert [path for path in large if not is_ignored(repository, path)] == []
    assert is_ignored(repository, "results/report/figures/a.json")


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("results/cart/progress.csv", False),
        ("results/cart/run_logs/timers.json", False),
        ("results/cart/configuration.yaml", False),
        ("results/cart-0/CartPole.onnx", False),
        ("results/.work/train/a/seed1/stage.json", False),
        ("results/export/a/seed1/contract.json", False),
        ("results/.cart.lock", False),
        ("results/train/rates/001/seed1/metrics.json", True),  # a trial of a sweep
        ("results/train/rates/001/seed1/policy.pt", False),
    ],
)
def test_git_ignores_files_of_learn_runs_and_work_folders_but_keeps_metrics_of_sweep_trials(
    repository, path, is_kept
):
    assert is_ignored(repository, path) != is_kept
