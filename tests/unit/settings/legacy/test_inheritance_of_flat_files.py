"""A section over a default section equals a section with all its settings written out."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.settings import dump_yaml, parse_yaml, to_mapping
from pipeline.settings.nodes import Node, find, to_plain
from pipeline.settings.trainer.legacy.convert import to_present
from pipeline.settings.trainer.run_file import as_written, structure

SIGNAL = st.fixed_dictionaries(
    {}, optional={"strength": st.sampled_from([0.5, 1.0]), "gamma": st.sampled_from([0.9, 0.99])}
)
GAIL = st.fixed_dictionaries(
    {"demo_path": st.sampled_from(["a.demo", "b.demo"])},
    optional={"encoding_size": st.sampled_from([32, 64]), "use_actions": st.booleans()},
)
SIGNALS = st.fixed_dictionaries(
    {}, optional={"extrinsic": SIGNAL, "curiosity": SIGNAL, "gail": GAIL}
).filter(bool)
CLONING = st.fixed_dictionaries(
    {"demo_path": st.just("a.demo")},
    optional={"strength": st.sampled_from([0.5, 1.0]), "batch_size": st.sampled_from([16, 32])},
)
SELF_PLAY = st.fixed_dictionaries(
    {}, optional={"save_steps": st.sampled_from([10, 20000]), "window": st.sampled_from([5, 10])}
)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": st.sampled_from([64, 128, 1024]),
    "learning_rate_schedule": st.sampled_from(["linear", "constant"]),
    "beta": st.sampled_from([0.005, 0.01]),
    "tau": st.sampled_from([0.005, 0.01]),
    "num_update": st.sampled_from([1, 2]),
    "train_interval": st.sampled_from([1, 4]),
    "hidden_units": st.sampled_from([128, 256]),
    "normalize": st.booleans(),
    "max_steps": st.sampled_from([500, 500000]),
    "use_recurrent": st.booleans(),
    "memory_size": st.sampled_from([128, 256]),
    "sequence_length": st.sampled_from([32, 64]),
    "gamma": st.sampled_from([0.9, 0.99]),
    "use_curiosity": st.booleans(),
    "curiosity_strength": st.sampled_from([0.5, 1.0]),
    "reward_signals": SIGNALS,
    "behavioral_cloning": CLONING,
    "pretraining": CLONING,
    "self_play": SELF_PLAY,
}
TRAINER = st.sampled_from(["ppo", "sac"])
SECTION = st.fixed_dictionaries({}, optional={"trainer": TRAINER, **KEYS})
DEFAULT = st.fixed_dictionaries({"trainer": TRAINER}, optional=KEYS)


def read(document: dict[str, Any]) -> Node:
    return parse_yaml(dump_yaml(document), source="flat")


@given(default=DEFAULT, section=SECTION)
@example(
    default={"trainer": "ppo", "reward_signals": {"extrinsic": {"strength": 0.5, "gamma": 0.9}}},
    section={"reward_signals": {"extrinsic": {"gamma": 0.99}}},
)
@example(
    default={"trainer": "ppo", "behavioral_cloning": {"demo_path": "a.demo", "strength": 0.5}},
    section={"behavioral_cloning": {"demo_path": "b.demo"}},
)
@settings(max_examples=75)
def test_section_that_inherits_default_values_equals_a_section_with_all_values_written_out(
    default: dict[str, Any], section: dict[str, Any]
) -> None:
    together = to_present(read({"default": default, "B": section}))
    merged = to_present(read({"B": default | section}))
    run_settings = structure(together.document)
    assert run_settings.behaviors == structure(merged.document).behaviors
    assert run_settings.default_settings == structure(together.document).default_settings
    written_out = structure(parse_yaml(dump_yaml(to_mapping(run_settings)), source="again"))
    assert written_out == run_settings


@given(default=DEFAULT, section=SECTION)
@settings(max_examples=75)
def test_old_file_converted_for_mlagents_keeps_its_settings_and_uses_only_mlagents_features(
    default: dict[str, Any], section: dict[str, Any]
) -> None:
    present = to_present(read({"default": default, "B": section}))
    run_settings = structure(present.portable)
    assert run_settings.behaviors == structure(present.document).behaviors
    body = as_written(present.portable, to_mapping(run_settings))
    assert structure(parse_yaml(dump_yaml(body), source="again")) == run_settings
    signals = body["behaviors"]["B"].get("reward_signals", {})
    assert None not in signals.values()
    if "default_settings" in body:
        default_trainer = to_plain(find(present.portable, "default_settings.trainer_type"))
        assert body["behaviors"]["B"].get("trainer_type", default_trainer) == default_trainer
