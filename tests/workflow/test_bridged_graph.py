"""An entry in params.yaml is all that an environment of Gymnasium needs, with either engine."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from project import commit, copy_project, run

pytestmark = pytest.mark.slow


def made_by(root: Path, *command: str) -> dict[str, bytes]:
    """Everything that the engine made, by path."""
    copy_project(root)
    shutil.copy(Path(__file__).with_name("bridged.yaml"), root / "params.yaml")
    run(root, "python", "-m", "pipeline.cli", "plan")
    commit(root, "bridged")
    run(root, *command)
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for place in ("results", "build")
        for file in sorted((root / place).rglob("*"))
        if file.is_file() and ".work" not in file.parts and not file.name.startswith(".")
    }


def test_both_engines_train_and_evaluate_an_environment_of_gymnasium(tmp_path: Path):
    by_dvc = made_by(tmp_path / "dvc", "dvc", "repro")
    by_snakemake = made_by(tmp_path / "snakemake", "snakemake", "--cores", "1")
    assert by_dvc.keys() == by_snakemake.keys()
    assert [name for name in by_dvc if by_dvc[name] != by_snakemake[name]] == []
    described = json.loads(by_dvc["build/env/cart/environment.json"])
    assert (described["source"], described["simulator"]) == ("gymnasium", None)
    place = tmp_path / "dvc/results"
    trained = json.loads((place / "train/cart_ppo/seed1/metrics.json").read_text())
    assert trained["CartPole-v1"]["steps"] >= 2000
    with (place / "evaluate/cart_ppo/seed1/episodes.csv").open(newline="") as file:
        episodes = list(csv.DictReader(file))
    assert len(episodes) == 4
    for episode in episodes:
        # sutton_barto_reward: nothing for each step, -1 for falling
        assert float(episode["episode_return"]) == (0 if episode["interrupted"] == "True" else -1)
