"""Every key that any older configuration had arrives where it belongs, and parameters of today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeline.settings import dump_yaml, load_run_settings, to_mapping
from pipeline.settings.legacy.formats import FLAT_KEYS

if TYPE_CHECKING:
    from pathlib import Path

SAMPLERS = {
    "uniform": {"min_value": 0.25, "max_value": 0.5},
    "gaussian": {"mean": 0.25, "st_dev": 0.5},
    "multirangeuniform": {"intervals": [[0.25, 0.5]]},
    "constant": {"value": 0.25},
}
CRITERIA = {
    "behavior": "B",
    "measure": "progress",
    "threshold": 0.25,
    "min_lesson_length": 9,
    "signal_smoothing": False,
    "require_reset": True,
}
HYPER, NETWORK, SIGNALS = "hyperparameters", "network_settings", "reward_signals"
# Key, value, what else the section needs, where it arrives, and as what; None: has no equal.
FLAT: list[tuple[str, Any, dict[str, Any], str | None, Any]] = [
    ("trainer", "sac", {}, "trainer_type", "sac"),
    ("trainer", "imitation", {"demo_path": "a.demo"}, "behavioral_cloning.demo_path", "a.demo"),
    ("trainer", "online_bc", {"demo_path": "a.demo"}, "trainer_type", "ppo"),
    ("trainer", "offline_bc", {"demo_path": "a.demo"}, "trainer_type", "ppo"),
    *(
        (key, value, {}, f"{HYPER}.{key}", value)
        for key, value in {
            "batch_size": 9,
            "buffer_size": 9,
            "learning_rate": 0.5,
            "learning_rate_schedule": "constant",
            "beta": 0.5,
            "epsilon": 0.5,
            "lambd": 0.5,
            "num_epoch": 9,
        }.items()
    ),
    ("gamma", 0.5, {}, f"{SIGNALS}.extrinsic.gamma", 0.5),
    ("hidden_units", 9, {}, f"{NETWORK}.hidden_units", 9),
    ("num_layers", 9, {}, f"{NETWORK}.num_layers", 9),
    ("normalize", True, {}, f"{NETWORK}.normalize", True),
    ("vis_encode_type", "resnet", {}, f"{NETWORK}.vis_encode_type", "resnet"),
    ("vis_encoder_type", "resnet", {}, f"{NETWORK}.vis_encode_type", "resnet"),
    ("use_recurrent", True, {}, f"{NETWORK}.memory.memory_size", 128),
    ("sequence_length", 8, {"use_recurrent": True}, f"{NETWORK}.memory.sequence_length", 8),
    ("memory_size", 8, {"use_recurrent": True}, f"{NETWORK}.memory.memory_size", 8),
    ("max_steps", "5.0e4", {}, "max_steps", 50000),
    ("time_horizon", 9, {}, "time_horizon", 9),
    ("summary_freq", 9, {}, "summary_freq", 9),
    ("use_curiosity", True, {}, f"{SIGNALS}.curiosity.strength", 1.0),
    ("curiosity_strength", 0.5, {"use_curiosity": True}, f"{SIGNALS}.curiosity.strength", 0.5),
    (
        "curiosity_enc_size",
        9,
        {"use_curiosity": True},
        f"{SIGNALS}.curiosity.{NETWORK}.hidden_units",
        9,
    ),
    *(
        (SIGNALS, {"gail": {"demo_path": "a.demo", key: value}}, {}, f"{SIGNALS}.gail.{key}", value)
        for key, value in {
            "strength": 0.5,
            "gamma": 0.5,
            "learning_rate": 0.5,
            "demo_path": "a.demo",
            "use_actions": True,
            "use_vail": True,
        }.items()
    ),
    *(
        (SIGNALS, {name: {"encoding_size": 9, **more}}, {}, place, 9)
        for name, more in (("curiosity", {}), ("gail", {"demo_path": "a.demo"}))
        for place in [f"{SIGNALS}.{name}.{NETWORK}.hidden_units"]
    ),
    (
        SIGNALS,
        {"extrinsic": {}, "reward_signal_num_update": 4},
        {"trainer": "sac"},
        f"{HYPER}.reward_signal_steps_per_update",
        0.25,
    ),
    (
        SIGNALS,
        {"extrinsic": {}, "reward_signal_steps_per_update": 4},
        {"trainer": "sac"},
        f"{HYPER}.reward_signal_steps_per_update",
        4.0,
    ),
    *(
        (key, value, {"trainer": "sac"}, f"{HYPER}.{key}", value)
        for key, value in {
            "buffer_init_steps": 9,
            "init_entcoef": 0.5,
            "tau": 0.5,
            "save_replay_buffer": True,
            "steps_per_update": 9.0,
        }.items()
    ),
    ("num_update", 4, {"trainer": "sac"}, f"{HYPER}.steps_per_update", 0.25),
    ("train_interval", 4, {"trainer": "sac"}, f"{HYPER}.steps_per_update", 4.0),
    *(
        (name, {"demo_path": "a.demo", key: value}, {}, f"behavioral_cloning.{key}", value)
        for name in ("pretraining", "behavioral_cloning")
        for key, value in {
            "demo_path": "a.demo",
            "strength": 0.5,
            "steps": 9,
            "batch_size": 9,
            "num_epoch": 9,
            "samples_per_update": 9,
        }.items()
    ),
    *(
        ("self_play", {key: value}, {}, f"self_play.{key}", value)
        for key, value in {
            "window": 9,
            "play_against_latest_model_ratio": 0.25,
            "save_steps": 9,
            "swap_steps": 9,
            "team_change": 9,
            "initial_elo": 9.0,
        }.items()
    ),
    (
        "self_play",
        {"play_against_current_self_ratio": 0.25},
        {},
        "self_play.play_against_latest_model_ratio",
        0.25,
    ),
    ("init_path", "models/run", {}, "init_path", "models/run"),
    ("threaded", True, {}, "threaded", True),
    ("keep_checkpoints", 9, {}, "keep_checkpoints", 9),
    ("demo_path", "a.demo", {"trainer": "offline_bc"}, "behavioral_cloning.demo_path", "a.demo"),
    ("burn_in_ratio", 0.5, {}, None, None),
    ("brain_to_imitate", "T", {"trainer": "online_bc", "demo_path": "a"}, None, None),
    ("batches_per_epoch", 9, {"trainer": "offline_bc", "demo_path": "a"}, None, None),
    ("summary_path", "s", {}, None, None),
    ("model_path", "m", {}, None, None),
    ("graph_scope", "g", {}, None, None),
]


def at(path: str, mapping: Any) -> Any:
    for key in path.split("."):
        mapping = mapping[key]
    return mapping


def mapping_of(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    path.write_text(dump_yaml(document))
    return to_mapping(load_run_settings(path))


def holds(got: Any, stated: Any) -> bool:
    if isinstance(stated, dict):
        return all(holds(got[key], value) for key, value in stated.items())
    return bool(got == stated)


@pytest.mark.parametrize(
    ("key", "value", "more", "place", "got"), FLAT, ids=lambda part: str(part)[:60]
)
@pytest.mark.parametrize("from_default", [False, True], ids=["section", "default"])
def test_a_key_of_a_flat_section_arrives(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    key: str,
    value: Any,
    more: dict[str, Any],
    place: str | None,
    got: Any,
    from_default: bool,
) -> None:
    section = {"trainer": "ppo", **more, key: value}
    flat = {"default": section, "B": {}} if from_default else {"B": section}
    behavior = mapping_of(flat, tmp_path)["behaviors"]["B"]
    if place is not None:
        assert at(place, behavior) == got
    assert not [text for text in caplog.messages if "unknown key" in text]


def test_the_table_of_flat_keys_is_complete() -> None:
    assert {key for key, *_ in FLAT} | {"curriculum"} == FLAT_KEYS


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
