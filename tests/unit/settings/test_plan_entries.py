"""Entries of the plan: a stage's entry has what that stage depends on, and nothing of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

from test_params import FILE as PARAMS
from test_sweep_settings import FILE as SWEPT
from test_sweep_settings import RATE

from pipeline.settings.params import Params, load_params
from pipeline.settings.plan import plan


def test_threads_packages_and_learners_are_of_the_stages_that_learn(tmp_path: Path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/t.yaml").write_text("behaviors: {Ball: {max_steps: 5}}")
    (tmp_path / "params.yaml").write_text(PARAMS)
    monkeypatch.setattr(
        Params, "plugins", lambda _, name: {"extra": "1.2"} if name == "cloned" else {}
    )
    params = load_params(tmp_path / "params.yaml")
    cloned = params.experiments["cloned"]
    cloned = replace(cloned, resources=replace(cloned.resources, threads=3), learners=2)
    params = replace(params, experiments=params.experiments | {"cloned": cloned})
    tables = plan(params)["runs"]
    common = {
        "experiment": "cloned",
        "base": "cloned",
        "seed": 1,
        "environment": "ball",
        "trainer": "config/t.yaml",
        "demonstrations": "expert",
    }
    learning = common | {"plugins": {"extra": "1.2"}, "threads": 3}
    assert tables["pretrain"] == {"cloned-1": learning | {"network": ANY}}
    assert tables["train_pretrained"] == {"cloned-1": learning | {"learners": 2}}
    assert tables["export"] == tables["evaluate"] == {"cloned-1": common}
    # the experiment beside it has none of this
    assert tables["train_from_scratch"]["scratch-3"].keys() == common.keys() - {"demonstrations"}


def test_values_of_a_trial_are_of_its_training_alone(tmp_path: Path):
    (tmp_path / "t.yaml").write_text("behaviors: {Ball: {trainer_type: ppo}}\n")
    (tmp_path / "params.yaml").write_text(SWEPT)
    params = load_params(tmp_path / "params.yaml")
    tables = plan(params)["runs"]
    trials = params.sweeps["rates"].trials()
    for number, values in trials.items():
        common = {
            "experiment": f"rates/{number}",
            "base": "base",
            "seed": 1,
            "environment": "ball",
            "trainer": "t.yaml",
        }
        key = f"rates-{number}-1"
        assert tables["train_from_scratch"][key] == common | {"values": values}
        assert tables["export"][key] == tables["evaluate"][key] == common
    assert len({trial[RATE] for trial in trials.values()}) == 2
    assert "values" not in tables["train_from_scratch"]["base-2"]
    best = tables["train_chosen"]["rates_best-8"]
    assert best["seed"] == 8
    assert best["chosen"] == "results/sweep/rates/best.json"
    assert "chosen" not in tables["export"]["rates_best-8"]
