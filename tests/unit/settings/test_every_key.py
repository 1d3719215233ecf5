"""Every key of the present format is read, and arrives where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from single_keys import CRITERIA, SAMPLERS, at, holds, mapping_of, nested

if TYPE_CHECKING:
    from pathlib import Path

BEHAVIOR = "behaviors.B"
PPO = {"trainer_type": "ppo"}
SAC = {"trainer_type": "sac"}
POCA = {"trainer_type": "poca"}

# Key path, value, and what else the behavior needs.
TODAY: list[tuple[str, Any, dict[str, Any]]] = [
    ("default_settings.max_steps", 7, {}),
    ("behaviors.B.max_steps", 7, {}),
    ("env_settings.seed", 7, {}),
    ("engine_settings.width", 7, {}),
    ("checkpoint_settings.run_id", "run", {}),
    ("torch_settings.device", "cpu", {}),
    ("debug", True, {}),
    *(
        (f"{BEHAVIOR}.{key}", value, {})
        for key, value in {
            "trainer_type": "poca",
            "max_steps": 9,
            "time_horizon": 9,
            "summary_freq": 9,
            "checkpoint_interval": 9,
            "keep_checkpoints": 9,
            "even_checkpoints": True,
            "init_path": "a.pt",
            "threaded": True,
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.hyperparameters.{key}", value, kind)
        for kind in (PPO, POCA, SAC)
        for key, value in {
            "batch_size": 9,
            "buffer_size": 9,
            "learning_rate": 0.5,
            "learning_rate_schedule": "constant",
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.hyperparameters.{key}", value, kind)
        for kind in (PPO, POCA)
        for key, value in {
            "beta": 0.5,
            "beta_schedule": "constant",
            "epsilon": 0.5,
            "epsilon_schedule": "constant",
            "lambd": 0.5,
            "num_epoch": 9,
        }.items()
    ),
    (f"{BEHAVIOR}.hyperparameters.shared_critic", True, PPO),
    *(
        (f"{BEHAVIOR}.hyperparameters.{key}", value, SAC)
        for key, value in {
            "buffer_init_steps": 9,
            "init_entcoef": 0.5,
            "save_replay_buffer": True,
            "tau": 0.5,
            "steps_per_update": 9.0,
            "reward_signal_steps_per_update": 9.0,
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.network_settings.{key}", value, {})
        for key, value in {
            "normalize": True,
            "hidden_units": 9,
            "num_layers": 9,
            "vis_encode_type": "nature_cnn",
            "goal_conditioning_type": "none",
            "deterministic": True,
            "memory": {"sequence_length": 8, "memory_size": 10},
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.network_settings.vis_encode_type", kind, {})
        for kind in ("simple", "resnet", "match3", "fully_connected")
    ),
    *(
        (f"{BEHAVIOR}.reward_signals.{name}.{key}", value, {})
        for name in ("extrinsic", "curiosity", "rnd")
        for key, value in {
            "gamma": 0.5,
            "strength": 0.5,
            "network_settings": {"hidden_units": 9},
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.reward_signals.{name}.learning_rate", 0.5, {})
        for name in ("curiosity", "rnd")
    ),
    *(
        (f"{BEHAVIOR}.reward_signals.gail", {"demo_path": "a.demo", key: value}, {})
        for key, value in {
            "gamma": 0.5,
            "strength": 0.5,
            "network_settings": {"hidden_units": 9},
            "learning_rate": 0.5,
            "use_actions": True,
            "use_vail": True,
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.{section}", {"demo_path": demos}, {})
        for section in ("reward_signals.gail", "behavioral_cloning")
        for demos in (
            ["a.demo", "folder"],
            ["a.demo", {"path": "folder", "weight": 2.5}],
            [{"path": "a.demo", "weight": 2.5}],
        )
    ),
    *(
        (f"{BEHAVIOR}.behavioral_cloning", {"demo_path": "a.demo", key: value}, {})
        for key, value in {
            "strength": 0.5,
            "steps": 9,
            "samples_per_update": 9,
            "num_epoch": 9,
            "batch_size": 9,
        }.items()
    ),
    *(
        (f"{BEHAVIOR}.self_play.{key}", value, {})
        for key, value in {
            "save_steps": 9,
            "team_change": 9,
            "swap_steps": 9,
            "window": 9,
            "play_against_latest_model_ratio": 0.25,
            "initial_elo": 9.0,
        }.items()
    ),
    *(
        (f"env_settings.{key}", value, {})
        for key, value in {
            "env_path": "game",
            "env_args": ["--fast"],
            "base_port": 9,
            "num_areas": 9,
            "timeout_wait": 9,
            "seed": 9,
            "max_lifetime_restarts": 9,
            "restarts_rate_limit_n": 9,
            "restarts_rate_limit_period_s": 9,
        }.items()
    ),
    ("env_settings", {"num_envs": 9, "env_path": "game"}, {}),
    *(
        (f"engine_settings.{key}", value, {})
        for key, value in {
            "width": 9,
            "height": 9,
            "quality_level": 9,
            "time_scale": 9.0,
            "target_frame_rate": 9,
            "capture_frame_rate": 9,
            "no_graphics": True,
            "no_graphics_monitor": True,
        }.items()
    ),
    *(
        (f"checkpoint_settings.{key}", value, {})
        for key, value in {
            "run_id": "other",
            "initialize_from": "run",
            "load_model": True,
            "resume": True,
            "force": True,
            "train_model": True,
            "inference": True,
            "results_dir": "runs",
        }.items()
    ),
]

# Keys that are read and take effect under another name.
RENAMED: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    (
        f"{BEHAVIOR}.reward_signals.{name}",
        {"encoding_size": 9, **more},
        {},
        f"{BEHAVIOR}.reward_signals.{name}.network_settings.hidden_units",
        9,
    )
    for name, more in (("curiosity", {}), ("rnd", {}), ("gail", {"demo_path": "a.demo"}))
] + [
    (f"{BEHAVIOR}.framework", "pytorch", {}, f"{BEHAVIOR}.trainer_type", "ppo"),
    (
        f"{BEHAVIOR}.network_settings.conditioning_type",
        "none",
        {},
        f"{BEHAVIOR}.network_settings.goal_conditioning_type",
        "hyper",
    ),
]


@pytest.mark.parametrize(("path", "value", "more"), TODAY, ids=lambda part: str(part)[:60])
def test_a_key_of_today_arrives(
    tmp_path: Path, path: str, value: Any, more: dict[str, Any]
) -> None:
    document = nested(path, value)
    if more:
        document["behaviors"]["B"] = {**more, **document["behaviors"]["B"]}
    assert holds(at(path, mapping_of(document, tmp_path)), value)


@pytest.mark.parametrize(("path", "value", "more", "place", "got"), RENAMED)
def test_a_key_with_another_name_today_arrives_there(
    tmp_path: Path, path: str, value: Any, more: dict[str, Any], place: str, got: Any
) -> None:
    assert at(place, mapping_of(nested(path, value), tmp_path)) == got


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_of_today_arrives(tmp_path: Path, kind: str) -> None:
    sampler = {"sampler_type": kind, "sampler_parameters": {"seed": 9, **SAMPLERS[kind]}}
    parameters = mapping_of({"environment_parameters": {"p": sampler}}, tmp_path)
    assert holds(parameters["environment_parameters"]["p"]["curriculum"][0]["value"], sampler)


def test_a_lesson_of_today_arrives(tmp_path: Path) -> None:
    lessons = [
        {"name": "first", "value": 0.5, "completion_criteria": CRITERIA},
        {"name": "last", "value": 0.75},
    ]
    document = {"environment_parameters": {"p": {"curriculum": lessons}}, "behaviors": {"B": {}}}
    first, last = mapping_of(document, tmp_path)["environment_parameters"]["p"]["curriculum"]
    assert (first["name"], first["completion_criteria"]) == ("first", CRITERIA)
    assert last["completion_criteria"] is None
    assert at("value.sampler_parameters.value", last) == 0.75
