"""The present configuration format: keys, defaults, inheritance and derived settings."""

import itertools
import json
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.plugins import Group
from pipeline.settings import dump_yaml, load_run_settings, parse_yaml, to_mapping
from pipeline.settings.nodes import from_plain
from pipeline.settings.project.environments import SOURCES
from pipeline.settings.project.params import Params
from pipeline.settings.reader import read, setting_hints
from pipeline.settings.trainer.run_file import structure
from pipeline.settings.trainer.schema import (
    HYPERPARAMETERS,
    REWARD_SIGNALS,
    SAMPLERS,
    CompletionCriteria,
    ConstantSampler,
    CuriositySettings,
    DemoPath,
    DemoSource,
    EnvironmentParameter,
    GaussianSampler,
    Lesson,
    MemorySettings,
    MultiRangeUniformSampler,
    NetworkSettings,
    PPOSettings,
    RNDSettings,
    RunSettings,
    SACSettings,
    TrainerSettings,
    UniformSampler,
)


def load(text: str) -> RunSettings:
    return structure(parse_yaml(text, source="config.yaml"))


def behavior(text: str) -> TrainerSettings:
    return load(f"behaviors: {{Walker: {text}}}").behaviors["Walker"]


def classes(hint: Any, found: set[type]) -> set[type]:
    """Return all settings classes in a type hint, at any depth."""
    if isinstance(hint, type) and is_dataclass(hint) and hint not in found:
        found.add(hint)
        for inner in setting_hints(hint).values():
            classes(inner, found)
    for inner in get_args(hint):
        classes(inner, found)
    return found


GROUPS = (HYPERPARAMETERS, REWARD_SIGNALS, SAMPLERS, SOURCES)
ROOTS = (RunSettings, Params, *itertools.chain.from_iterable(group.values() for group in GROUPS))
CLASSES = set[type]().union(*(classes(cls, set()) for cls in ROOTS))
SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def mistakes(hint: Any) -> list[tuple[Any, str]]:
    """Return wrong values for a type of the schema, each with a part of its error."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal or (origin is Annotated and isinstance(parts[1], Group)):
        first = next(iter(parts if origin is Literal else parts[1]), "module:Class")
        return [("?", f"'?' is not allowed. Allowed: {first}")]
    if origin is Annotated:
        limits = [
            ("must be at least", parts[1].at_least, -1),
            ("must be greater than", parts[1].above, 0),
            ("must be at most", parts[1].at_most, 1),
            ("must be divisible by", parts[1].multiple_of, 1),
        ]
        broken = [(a + step, f"{said} {a}, got") for said, a, step in limits if a is not None]
        return mistakes(parts[0]) + broken
    if origin in (Union, UnionType):
        if get_origin(parts[1]) is Literal:
            word = get_args(parts[1])[0]
            wrong = [(value, f"needs a number or {word}, got {value!r}") for value in ([], "?")]
            return wrong + mistakes(parts[0])[1:]
        if get_origin(parts[1]) is tuple:  # a value, or a list of values
            return mistakes(parts[0])[1:] + mistakes(parts[1])[1:]
        return [mistake for part in parts for mistake in mistakes(part)]
    if origin is tuple:
        items = mistakes(parts[0]) if parts[-1] is Ellipsis else []
        return [({}, "needs a list, got {}"), *(([value], said) for value, said in items)]
    if origin is None and hint in SIMPLE:
        fractions = [(1.5, "needs a whole number, got 1.5")] if hint is int else []
        return [([], f"needs {SIMPLE[hint]}, got []"), *fractions]
    return [([], "needs ")] if origin is dict or is_dataclass(hint) else []


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__))
def test_error_for_an_invalid_value_of_a_setting_names_the_setting(cls: type) -> None:
    for key, hint in setting_hints(cls).items():
        for value, said in mistakes(hint):
            message = refusal(SettingsError, read, hint, from_plain(value, "f"), key)
            assert message.startswith(f"f: {key}")
            assert said in message


def test_mistakes_generated_by_this_test_cover_every_kind_of_limit_of_a_setting() -> None:
    hints = [hint for cls in CLASSES for hint in setting_hints(cls).values()]
    said = " ".join(words for hint in hints for _, words in mistakes(hint))
    for words in ("at least 1", "greater than 0", "at most 65535", "divisible by 2", "a list"):
        assert words in said


@pytest.mark.parametrize("trainer", ["ppo", "poca", "sac"])
def test_hyperparameter_without_a_value_takes_the_value_of_the_hyperparameter_that_it_follows(
    trainer: str,
) -> None:
    given, value, other = "learning_rate_schedule", "constant", "linear"
    first, *others = "beta_schedule", "epsilon_schedule"
    if trainer == "sac":
        given, value, other = "steps_per_update", 10.0, 3.0
        first, others = "reward_signal_steps_per_update", []
    section = {"trainer_type": trainer, "hyperparameters": {given: value}}
    alone = behavior(json.dumps(section)).hyperparameters
    assert {getattr(alone, key) for key in (first, *others)} == {value}
    section["hyperparameters"] = {given: value, first: other}
    both = behavior(json.dumps(section)).hyperparameters
    assert getattr(both, first) == other
    assert {getattr(both, key) for key in others} <= {value}


def test_team_change_is_derived_from_save_steps_and_checkpoint_interval_from_max_steps():
    """5 x save_steps is team_change; even_checkpoints divides max_steps by keep_checkpoints."""
    assert behavior("{self_play: {save_steps: 300}}").self_play.team_change == 1500
    even = behavior("{even_checkpoints: true, max_steps: 1000, checkpoint_interval: 7}")
    assert even.checkpoint_interval == 200


@pytest.mark.parametrize("text", ["1e4", "1.0e4", "1.0e+4", "10000.0", "'1e4'", "010000"])
@pytest.mark.parametrize("key", ["max_steps", "summary_freq", "checkpoint_interval"])
def test_whole_number_may_be_written_in_any_notation(key: str, text: str) -> None:
    value = getattr(behavior(f"{{{key}: {text}}}"), key)
    assert value == 10000
    assert type(value) is int


@pytest.mark.parametrize(("words", "value"), [("yes Yes YES on On ON", 1), ("no No NO off OFF", 0)])
def test_values_yes_and_no_are_booleans_only_for_boolean_keys(words: str, value: bool) -> None:
    for word in words.split():
        settings = load(f"behaviors: {{on: {{network_settings: {{normalize: {word}}}}}}}")
        assert settings.behaviors["on"].network_settings.normalize is bool(value)
        assert behavior(f"{{init_path: {word}}}").init_path == word  # a name elsewhere


@pytest.mark.parametrize("hidden", [1, 10, 130])
def test_ppo_accepts_hidden_units_that_the_attention_heads_of_poca_cannot_divide(hidden: int):
    ppo = behavior(f"{{trainer_type: ppo, network_settings: {{hidden_units: {hidden}}}}}")
    assert ppo.network_settings.hidden_units == hidden


NARROW = CuriositySettings(network_settings=NetworkSettings(hidden_units=32))
MOVED = "encoding_size: 'encoding_size' was deprecated for RewardSignals. "
MOVED += "Please use network_settings"
IGNORED = f"{MOVED}. It is ignored, because network_settings is given"
RENAMED = "conditioning_type: is ignored; its new name is 'goal_condition"


@pytest.mark.parametrize(
    ("text", "signals", "told"),
    [
        ("{reward_signals: {curiosity: {encoding_size: 32}}}", {"curiosity": NARROW}, MOVED),
        (
            "{reward_signals: {rnd: {encoding_size: 32, network_settings: {}}}}",
            {"rnd": RNDSettings()},
            IGNORED,
        ),
        ("{network_settings: {conditioning_type: none}}", None, f".network_settings.{RENAMED}"),
        ("{framework: tensorflow}", None, ": Framework option was deprecated but was specified"),
    ],
)
def test_deprecated_keys_are_read_with_a_warning(text, signals, told, caplog):
    assert behavior(text) == TrainerSettings(**({"reward_signals": signals} if signals else {}))
    (line,) = caplog.messages
    section = f".reward_signals.{next(iter(signals))}." if signals else ""
    assert line.startswith(f"config.yaml:1: behaviors.Walker{section}{told}")


def test_unquoted_number_keeps_its_spelling_where_text_is_expected() -> None:
    settings = load("checkpoint_settings: {run_id: 007}\nenv_settings: {env_args: [--n, 1e3]}")
    assert settings.checkpoint_settings.run_id == "007"
    assert settings.env_settings.env_args == ("--n", "1e3")


# --- default_settings -------------------------------------------------------------------------


def test_behavior_inherits_default_settings_in_nested_sections() -> None:
    settings = load("""
default_settings:
  trainer_type: ppo
  network_settings: {memory: {memory_size: 6, sequence_length: 5}}
  reward_signals: {curiosity: {strength: 0.3}}
behaviors:
  A:
    network_settings: {memory: {sequence_length: 3}}
    reward_signals: {curiosity: {gamma: 0.5}, extrinsic: {}}
  B: {network_settings: {memory: null}}
""")
    a, b = settings.behaviors["A"], settings.behaviors["B"]
    assert a.network_settings.memory == MemorySettings(memory_size=6, sequence_length=3)
    assert a.reward_signals["curiosity"] == CuriositySettings(strength=0.3, gamma=0.5)
    assert list(a.reward_signals) == ["curiosity", "extrinsic"]
    assert b.network_settings.memory is None


def test_default_settings_get_default_values_before_behaviors_inherit_from_default_settings():
    settings = load("""
default_settings: {trainer_type: ppo}
behaviors: {A: {hyperparameters: {learning_rate_schedule: constant}, reward_signals: {rnd: {}}}}
""").behaviors["A"]
    assert isinstance(settings.hyperparameters, PPOSettings)
    assert settings.hyperparameters.learning_rate_schedule == "constant"
    assert settings.hyperparameters.beta_schedule == "linear"
    assert list(settings.reward_signals) == ["extrinsic", "rnd"]


def test_inherited_mistake_is_reported_at_its_line_in_default_settings() -> None:
    text = """default_settings:
  trainer_type: ppo
  network_settings:
    memory: {sequence_length: 64}
behaviors: {A: {hyperparameters: {batch_size: 32}}}
"""
    place = "config.yaml:4: behaviors.A.network_settings.memory.sequence_length"
    said = f"{place}: must be less than or equal to batch_size"
    assert refusal(SettingsError, load, text).startswith(said)


RENAME = " ({file}). The environment gives this name: rename 'Walker' there to 'Waler'."
ADD = ". Add an entry for Hopper there, or set default_settings."


@pytest.mark.parametrize(("name", "remedy"), [("Waler?team=0", RENAME), ("Hopper", ADD)])
def test_behavior_missing_in_the_configuration_file_is_an_error_without_default_settings(
    name, remedy, tmp_path
):
    file = tmp_path / "c.yaml"
    file.write_text("behaviors: {Walker: {}}")
    message = refusal(SettingsError, load_run_settings(file).for_behavior, name)
    start = f"The behavior name {name.partition('?')[0]} has not been specified in the trainer "
    assert message == f"{start}configuration{remedy.format(file=file)}"


def test_without_a_configuration_file_every_behavior_gets_ppo():
    assert load_run_settings(None).for_behavior("Any") == TrainerSettings()


# --- environment parameters -------------------------------------------------------------------

EXAMPLE = """
default_settings:
  trainer_type: ppo
  max_steps: 200000
behaviors:
  Rover:
    hyperparameters: {batch_size: 256, learning_rate_schedule: constant, beta_schedule: constant}
environment_parameters:
  slope: 0.1
  mass: {sampler_type: uniform, sampler_parameters: {min_value: 0.5, max_value: 2.0, seed: 11}}
  gap:
    curriculum:
      - name: narrow
        completion_criteria: {measure: reward, behavior: Rover, threshold: 0.6}
        value: 0.5
      - name: wide
        value: {sampler_type: gaussian, sampler_parameters: {mean: 2.0, st_dev: 0.3}}
env_settings: {num_envs: 1, seed: 7}
"""


def test_sampler_seeds_count_up_from_the_seed_of_the_run() -> None:
    settings = load(EXAMPLE)
    decided = settings.with_seed(20)
    assert decided.env_settings.seed == 20
    seeds = [
        [[lesson.value.seed for lesson in item.curriculum] for item in parameters.values()]
        for parameters in (decided.environment_parameters, settings.environment_parameters)
    ]
    assert seeds == [[[20], [11], [21, 22]], [[-1], [11], [-1, -1]]]


RATED = """behaviors: {Pong: {self_play: {save_steps: 100}}, Solo: {}}
environment_parameters:
  speed:
    curriculum:
      - name: slow
        completion_criteria:
          behavior: Pong
          measure: elo
          threshold: 1250
        value: 1
      - {name: fast, value: 2}
"""
RANGES = "{sampler_type: multirange_uniform, sampler_parameters: {intervals: [[7, 10], [15, 20]]}}"
ENDLESS = "{curriculum: [{name: a, value: 1, completion_criteria: {behavior: B}}]}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"environment_parameters: {{g: {RANGES}}}", "is read as 'multirangeuniform'"),
        (f"environment_parameters: {{g: {ENDLESS}}}", "the last lesson never ends"),
        (RATED.replace("r: Pong", "r: Png"), "no behavior is called 'Png'; did you mean 'Pong'?"),
    ],
    ids=["the documented spelling", "criteria of the last lesson", "an unknown behavior"],
)
def test_probable_mistakes_in_environment_parameters_cause_a_warning(text, told, caplog):
    parameters = load(text).environment_parameters
    assert told in caplog.text
    if "multirange" in text:
        ranges = MultiRangeUniformSampler(intervals=((7.0, 10.0), (15.0, 20.0)))
        assert parameters["g"].curriculum[0].value == ranges


@pytest.mark.parametrize("written", ["elo", "Elo"])
def test_lesson_may_measure_elo_of_a_behavior_with_self_play(written: str) -> None:
    settings = load(RATED.replace("measure: elo", f"measure: {written}"))
    first = settings.environment_parameters["speed"].curriculum[0]
    assert first.completion_criteria.measure == "elo"


@pytest.mark.parametrize("behavior", ["Solo", "Absent"])
def test_lesson_that_measures_elo_without_self_play_is_refused(behavior: str) -> None:
    text = RATED.replace("behavior: Pong", f"behavior: {behavior}")
    text += "default_settings: {trainer_type: ppo}\n"
    assert refusal(SettingsError, load, text).endswith(
        ".yaml:8: environment_parameters.speed.curriculum[0].completion_criteria.measure: only "
        f"self-play rates a policy, and '{behavior}' has none; give behaviors.{behavior} the "
        "section self_play, or measure reward"
    )


# --- overrides --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"behaviors.A.hyperparameters.batch_size": 5},
        {"behaviors": {"A": {"hyperparameters": {"batch_size": "5"}}}},
        {"behaviors.A": {"hyperparameters": {"batch_size": 5.0}}},
    ],
)
def test_overrides_replace_values_of_the_configuration_file(tmp_path, overrides):
    file = tmp_path / "c.yaml"
    numbers = "{batch_size: 9, tau: 0.5}"
    file.write_text(f"behaviors: {{A: {{trainer_type: sac, hyperparameters: {numbers}}}}}")
    settings = load_run_settings(file, overrides=overrides).behaviors["A"].hyperparameters
    assert settings == SACSettings(batch_size=5, tau=0.5)


MISSPELT = "overrides: behaviors.A: unknown key 'max_step' (value 5); did you mean 'max_steps'?"
TWICE = {"env_settings.seed": 1, "env_settings": {"seed": 2}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"behaviors.B.max_steps": 5}, "overrides: behaviors.B: {file} has no behavior 'B'"),
        ({"behaviors.A.max_step": 5}, MISSPELT),
        ({"debug": "maybe"}, "overrides: debug: needs true or false, got 'maybe'"),
        ({"a..b": 1}, "overrides: a..b: a part of this dotted key is empty"),
        (TWICE, "overrides: env_settings.seed: is written twice, once with a dotted key"),
    ],
)
def test_error_about_a_setting_in_the_overrides_names_overrides_as_its_source(
    tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("behaviors: {A: {}}")
    error = refusal(SettingsError, load_run_settings, file, overrides=overrides)
    assert error.startswith(message.format(file=file))


# --- round trip -------------------------------------------------------------------------------


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a type hint of the schema allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(parts[1], Group):
        return st.sampled_from(sorted(parts[1]) or ["own_parts:Residual"])
    if origin is Annotated:
        limits = parts[1]
        low = limits.above if limits.at_least is None else limits.at_least
        finite = {"allow_nan": False, "allow_infinity": False}
        numbers = (
            st.integers(low, limits.at_most or 2**62)
            if parts[0] is int
            else st.floats(low, limits.at_most, **finite)
        )
        return numbers.filter(lambda value: not limits.broken_by(value))
    if origin in (Union, UnionType):
        return st.one_of(*(st.none() if part is NoneType else strategy(part) for part in parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        return st.lists(strategy(parts[0]), max_size=2).map(tuple)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-1, 2000) | st.just(2**62),
        float: st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
        | st.sampled_from(["1e4", "null", "yes", "~"]),
    }
    if hint is DemoPath:
        return st.lists(settings_of(DemoSource), min_size=1, max_size=2).map(tuple).map(DemoPath)
    return simple[hint] if hint in simple else settings_of(hint)


def settings_of(cls: Any, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = {name: hint for name, hint in setting_hints(cls).items() if name not in strategies}
    return st.builds(cls, **{name: strategy(hint) for name, hint in hints.items()}, **strategies)


def trainers() -> st.SearchStrategy[TrainerSettings]:
    quarters = st.integers(1, 500).map(lambda quarter: 4 * quarter)
    widths = quarters | st.lists(quarters, min_size=1, max_size=2).map(tuple)
    signals = {
        name: settings_of(cls, network_settings=settings_of(NetworkSettings, hidden_units=widths))
        for name, cls in REWARD_SIGNALS.items()
    }

    def of_kind(kind: str, *, memory: Any = None, **options: Any) -> st.SearchStrategy[Any]:
        network = {} if memory is None else {"memory": memory}
        batch_size = st.integers(2**62, 2**62 + 9)
        return settings_of(
            TrainerSettings,
            trainer_type=st.just(kind),
            hyperparameters=settings_of(HYPERPARAMETERS[kind], batch_size=batch_size, **options),
            keep_checkpoints=st.just(1),
            network_settings=settings_of(NetworkSettings, hidden_units=widths, **network),
            reward_signals=st.fixed_dictionaries(
                {"extrinsic": signals["extrinsic"]},
                optional={k: v for k, v in signals.items() if k != "extrinsic"},
            ),
        )

    one, constant = st.just(1), st.just("constant")
    return st.one_of(
        trainer
        for kind in sorted(HYPERPARAMETERS)
        for trainer in (
            (of_kind(kind, memory=st.none()), of_kind(kind, n_steps=one, held_noise=one))
            if kind in ("sac", "xqc")
            else (
                of_kind(kind, desired_kl=st.none()),
                of_kind(kind, learning_rate_schedule=constant),
            )
        )
    )


SAMPLED = st.one_of(
    settings_of(ConstantSampler),
    settings_of(GaussianSampler),
    settings_of(UniformSampler, min_value=st.floats(-9, 0), max_value=st.floats(0, 9)),
    settings_of(
        MultiRangeUniformSampler,
        intervals=st.lists(st.tuples(st.floats(-9, 0), st.floats(0, 9)), min_size=1).map(tuple),
    ),
)
CRITERIA = settings_of(
    CompletionCriteria, measure=st.sampled_from(["reward", "progress"]), threshold=st.floats(0, 1)
)
PARAMETERS = st.builds(
    lambda *lessons: EnvironmentParameter(curriculum=lessons),
    settings_of(Lesson, value=SAMPLED, completion_criteria=CRITERIA),
    settings_of(Lesson, value=SAMPLED, completion_criteria=st.none() | CRITERIA),
)


@settings(max_examples=50)
@given(
    settings_of(
        RunSettings,
        default_settings=st.none() | trainers(),
        behaviors=st.dictionaries(st.text("AB.", min_size=1), trainers(), max_size=1),
        environment_parameters=st.none() | st.dictionaries(st.text("p.", min_size=1), PARAMETERS),
    )
)
def test_settings_that_are_written_to_a_file_are_read_back_as_equal_settings(settings):
    assert load(dump_yaml(to_mapping(settings))) == settings


def test_written_configuration_has_the_keys_in_the_order_of_mlagents():
    mapping = to_mapping(load(EXAMPLE))
    assert " ".join(mapping) == (
        "default_settings behaviors env_settings engine_settings environment_parameters "
        "checkpoint_settings torch_settings debug"
    )
    assert " ".join(mapping["behaviors"]["Rover"]) == (
        "trainer_type hyperparameters checkpoint_interval network_settings reward_signals "
        "init_path keep_checkpoints even_checkpoints max_steps time_horizon summary_freq threaded "
        "self_play behavioral_cloning"
    )
    constant = {"sampler_type": "constant", "sampler_parameters": {"seed": -1, "value": 0.1}}
    assert mapping["environment_parameters"]["slope"] == {
        "curriculum": [{"name": "slope", "completion_criteria": None, "value": constant}]
    }


def test_keys_that_mlagents_does_not_have_are_written_only_where_they_are_used():
    plain = to_mapping(load("behaviors: {A: {}}"))["behaviors"]["A"]
    assert "max_grad_norm" not in plain["hyperparameters"]
    settings = load("""
default_settings: {trainer_type: ppo, hyperparameters: {max_grad_norm: 0.5}}
behaviors: {A: {hyperparameters: {max_grad_norm: null}}, B: {}}
""")
    reloaded = load(dump_yaml(to_mapping(settings)))
    assert reloaded.behaviors["A"].hyperparameters.max_grad_norm is None
    assert reloaded.behaviors["B"].hyperparameters.max_grad_norm == 0.5


def test_trainer_type_without_hyperparameters_gets_the_defaults_of_this_trainer():
    run = load_run_settings(None, overrides={"behaviors": {"A": {"trainer_type": "sac"}}})
    assert run.behaviors["A"].hyperparameters == SACSettings()
