"""Every key of an older configuration is converted to its present place."""

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from pipeline.settings import dump_yaml, load_run_settings, to_mapping
from pipeline.settings.trainer.legacy.flat import FLAT_KEYS

HYPER, NETWORK, SIGNALS = "hyperparameters", "network_settings", "reward_signals"
DEMO, SIZE = {"demo_path": "a.demo"}, {"encoding_size": 9}
RATIO = {"play_against_current_self_ratio": 0.25}
RECURRENT, CURIOUS, SAC = {"use_recurrent": True}, {"use_curiosity": True}, {"trainer": "sac"}
# Keys with unchanged values: their place in a behavior, required keys of the section, values.
MOVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (HYPER, {}, {"batch_size": 9, "buffer_size": 9, "learning_rate": 0.5, "beta": 0.5}),
    (HYPER, {}, {"learning_rate_schedule": "constant", "epsilon": 0.5, "lambd": 0.5}),
    (HYPER, {}, {"num_epoch": 9}),
    (HYPER, SAC, {"buffer_init_steps": 9, "init_entcoef": 0.5, "tau": 0.5}),
    (HYPER, SAC, {"save_replay_buffer": True, "steps_per_update": 9.0}),
    (NETWORK, {}, {"hidden_units": 9, "num_layers": 9, "normalize": True}),
    (NETWORK, {}, {"vis_encode_type": "resnet"}),
    (f"{NETWORK}.memory", RECURRENT, {"sequence_length": 8, "memory_size": 8}),
    (f"{SIGNALS}.extrinsic", {}, {"gamma": 0.5}),
    ("", {}, {"time_horizon": 9, "summary_freq": 9, "keep_checkpoints": 9}),
    ("", {}, {"init_path": "models/run", "threaded": True}),
    ("behavioral_cloning", {"trainer": "offline_bc"}, DEMO),
    ("behavioral_cloning", {"trainer": "imitation"}, DEMO),
]
# Maps whose keys keep their names: old map, new map, required entries of the map, values.
MAPS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    *(
        (old, "behavioral_cloning", DEMO, {**DEMO, "strength": 0.5} | dict.fromkeys(whole, 9))
        for old in ("pretraining", "behavioral_cloning")
        for whole in [("steps", "batch_size", "num_epoch", "samples_per_update")]
    ),
    (
        "self_play",
        "self_play",
        {},
        {"window": 9, "play_against_latest_model_ratio": 0.25, "initial_elo": 9.0}
        | {"save_steps": 9, "swap_steps": 9, "team_change": 9},
    ),
]
GAIL = {"strength": 0.5, "gamma": 0.5, "learning_rate": 0.5, **DEMO}
GAIL |= {"use_actions": True, "use_vail": True}
# Key, value, required keys of the section, new place and value; None without an equivalent.
FLAT: list[tuple[str, Any, dict[str, Any], str | None, Any]] = [
    *(
        (key, value, more, f"{place}.{key}".lstrip("."), value)
        for place, more, keys in MOVED
        for key, value in keys.items()
    ),
    *(
        (old, more | {key: value}, {}, f"{new}.{key}", value)
        for old, new, more, keys in MAPS
        for key, value in keys.items()
    ),
    *(
        (SIGNALS, {"gail": DEMO | {key: value}}, {}, f"{SIGNALS}.gail.{key}", value)
        for key, value in GAIL.items()
    ),
    *(
        (SIGNALS, {name: keys | SIZE}, {}, f"{SIGNALS}.{name}.{NETWORK}.hidden_units", 9)
        for name, keys in (("curiosity", {}), ("gail", DEMO))
    ),
    ("trainer", "sac", {}, "trainer_type", "sac"),
    ("trainer", "online_bc", DEMO, "trainer_type", "ppo"),
    ("trainer", "offline_bc", DEMO, "trainer_type", "ppo"),
    ("max_steps", "5.0e4", {}, "max_steps", 50000),
    ("vis_encoder_type", "resnet", {}, f"{NETWORK}.vis_encode_type", "resnet"),
    ("use_recurrent", True, {}, f"{NETWORK}.memory.memory_size", 128),
    ("use_curiosity", True, {}, f"{SIGNALS}.curiosity.strength", 1.0),
    ("curiosity_strength", 0.5, CURIOUS, f"{SIGNALS}.curiosity.strength", 0.5),
    ("curiosity_enc_size", 9, CURIOUS, f"{SIGNALS}.curiosity.{NETWORK}.hidden_units", 9),
    *(
        (SIGNALS, {"extrinsic": {}, key: 4}, SAC, f"{HYPER}.reward_signal_steps_per_update", got)
        for key, got in (("reward_signal_num_update", 0.25), ("reward_signal_steps_per_update", 4))
    ),
    ("num_update", 4, SAC, f"{HYPER}.steps_per_update", 0.25),
    ("train_interval", 4, SAC, f"{HYPER}.steps_per_update", 4.0),
    ("self_play", RATIO, {}, "self_play.play_against_latest_model_ratio", 0.25),
    ("burn_in_ratio", 0.5, {}, None, None),
    ("brain_to_imitate", "T", {"trainer": "online_bc", **DEMO}, None, None),
    ("batches_per_epoch", 9, {"trainer": "offline_bc", **DEMO}, None, None),
    *((key, "x", {}, None, None) for key in ("summary_path", "model_path", "graph_scope")),
]


@pytest.mark.parametrize(
    ("key", "value", "more", "place", "got"), FLAT, ids=lambda part: str(part)[:60]
)
@pytest.mark.parametrize("from_default", [False, True], ids=["section", "default"])
def test_every_key_of_an_old_flat_configuration_is_converted(
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
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(flat))
    behavior = to_mapping(load_run_settings(path))["behaviors"]["B"]
    if place is not None:
        assert reduce(dict.__getitem__, place.split("."), behavior) == got
    assert not [text for text in caplog.messages if "unknown key" in text]


def test_table_of_old_keys_in_this_test_has_every_key_that_the_converter_knows() -> None:
    assert {key for key, *_ in FLAT} | {"curriculum"} == FLAT_KEYS
