"""An entry in params.yaml is all that an environment of Gymnasium needs, with DVC."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from project import commit, run, set_params

pytestmark = pytest.mark.slow


def test_an_environment_of_gymnasium_is_trained_in_and_evaluated(project: Path):
    set_params(project, Path(__file__).with_name("bridged.yaml").read_text())
    commit(project, "bridged")
    run(project, "dvc", "repro")
    described = json.loads((project / "build/env/cart/environment.json").read_text())
    assert (described["source"], described["simulator"]) == ("gymnasium", None)
    place = project / "results"
    trained = json.loads((place / "train/cart_ppo/seed1/metrics.json").read_text())
    assert trained["CartPole-v1"]["steps"] >= 2000
    with (place / "evaluate/cart_ppo/seed1/episodes.csv").open(newline="") as file:
        episodes = list(csv.DictReader(file))
    assert len(episodes) == 4
    for episode in episodes:
        # sutton_barto_reward: nothing for each step, -1 for falling
        assert float(episode["episode_return"]) == (0 if episode["interrupted"] == "True" else -1)
