"""What a whole configuration says of one behavior, file or experiment, and not of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.plugins import Group
from pipeline.settings import load_run_settings, to_mapping
from pipeline.settings.params import Params, load_params
from pipeline.settings.schema import RunSettings, TrainerSettings
from pipeline.settings.schema.reward_signals import (
    CuriositySettings,
    ExtrinsicSettings,
    NetworkSettings,
    RNDSettings,
)
from pipeline.settings.schema.trainer import POCASettings, SACSettings


def network(encoder: str) -> NetworkSettings:
    return NetworkSettings(vis_encode_type=encoder)


def test_packages_are_those_of_every_behavior_signal_network_and_of_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def versions(group: Group, *names: str) -> dict[str, str]:
        return {f"{name} of {group.name.partition('.')[2]}": "1" for name in names}

    monkeypatch.setattr(Group, "versions", versions)
    settings = RunSettings(
        behaviors={
            "A": TrainerSettings(
                network_settings=network("resnet"),
                reward_signals={
                    "extrinsic": ExtrinsicSettings(),
                    "rnd": RNDSettings(network_settings=network("nature_cnn")),
                },
            ),
            "B": TrainerSettings(
                trainer_type="sac",
                hyperparameters=SACSettings(),
                reward_signals={"curiosity": CuriositySettings()},
            ),
        },
        default_settings=TrainerSettings(
            trainer_type="poca",
            hyperparameters=POCASettings(),
            network_settings=network("match3"),
        ),
    )
    assert list(settings.plugins()) == [
        "curiosity of reward_signals",
        "extrinsic of reward_signals",
        "match3 of encoders",
        "nature_cnn of encoders",
        "poca of algorithms",
        "ppo of algorithms",
        "resnet of encoders",
        "rnd of reward_signals",
        "sac of algorithms",
        "simple of encoders",
    ]


def test_a_path_is_where_the_behavior_has_it_and_else_where_the_defaults_have_it() -> None:
    settings = RunSettings(
        places={
            "default_settings.init_path": "f:1",
            "behaviors.A.init_path": "f:2",
            "env_settings.env_path": "f:3",
            "default_settings.env_path": "f:4",
        }
    )
    places = {
        key: settings.place_of(key)
        for key in (
            "behaviors.A.init_path",
            "behaviors.B.init_path",
            "behaviors.B.demo_path",
            "env_settings.env_path",
            "torch_settings.B.init_path",
        )
    }
    assert list(places.values()) == ["f:2", "f:1", None, "f:3", None]


def test_a_behavior_that_took_the_defaults_is_not_listed_afterwards() -> None:
    settings = load_run_settings(
        None,
        overrides={
            "default_settings": {"trainer_type": "sac"},
            "behaviors": {"A": {"trainer_type": "ppo"}},
        },
    )
    before = to_mapping(settings)
    taken = {name: settings.for_behavior(name) for name in ("B?team=1", "A?team=0", "C", "B")}
    assert {name: taken[name].trainer_type for name in taken} == {
        "B?team=1": "sac",
        "A?team=0": "ppo",
        "C": "sac",
        "B": "sac",
    }
    assert to_mapping(settings) == before


FILE = """
environments: {ball: {source: builtin, name: balance_ball}}
experiments:
  first:
    environment: ball
    trainer: t.yaml
    overrides: OVERRIDES
    seeds: [3]
    stages: [train]
  base:
    environment: ball
    trainer: u.yaml
    overrides: {behaviors.Ball.max_steps: 800}
    seeds: [1, 2]
    stages: [train, export, evaluate]
    evaluation: {episodes: 2, seed: 9}
sweeps:
  grid:
    experiment: base
    method: grid
    parameters: {behaviors.Ball.hyperparameters.learning_rate: [0.1, 0.2]}
    seeds: [5]
    best: {seeds: [7]}
"""


def project(folder: Path, overrides: str) -> Params:
    for name, trainer in (("t", "sac"), ("u", "ppo")):
        behaviors = {"behaviors": {"Ball": {"trainer_type": trainer}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(behaviors))
    (folder / "params.yaml").write_text(FILE.replace("OVERRIDES", overrides))
    return load_params(folder / "params.yaml")


def test_equal_overrides_are_one_text_however_they_are_written_and_each_experiment_has_its_own(
    tmp_path: Path,
) -> None:
    """The best of a sweep, whose values are not known yet, is not among the experiments."""
    dotted = project(tmp_path, "{behaviors.Ball.max_steps: 7e2}").in_one_spelling()
    nested = project(tmp_path, "{behaviors: {Ball: {max_steps: '700'}}}").in_one_spelling()
    assert dotted == nested
    overrides = {name: values["overrides"] for name, values in dotted["experiments"].items()}
    assert overrides == {
        "base": {"behaviors": {"Ball": {"max_steps": 800}}},
        "first": {"behaviors": {"Ball": {"max_steps": 700}}},
    }
    assert type(overrides["first"]["behaviors"]["Ball"]["max_steps"]) is int


def test_a_trial_is_checked_over_the_experiment_of_its_own_sweep(tmp_path: Path) -> None:
    params = project(tmp_path, "{}")
    rate = "behaviors.Ball.hyperparameters.learning_rate"
    for value in (0.5, 0.25):
        ball = params.trial_settings("grid", {rate: value}).behaviors["Ball"]
        assert (ball.trainer_type, ball.max_steps) == ("ppo", 800)
        assert ball.hyperparameters.learning_rate == value
