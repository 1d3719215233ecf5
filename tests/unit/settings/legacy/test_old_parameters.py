"""Curricula and samplers that older releases had in separate files, folders or sections."""

import json
import logging
from textwrap import indent

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.trainer.schema import (
    CompletionCriteria,
    ConstantSampler,
    EnvironmentParameter,
    GaussianSampler,
    Lesson,
    MultiRangeUniformSampler,
    UniformSampler,
)

TRAINER = "behaviors: {Walker: {}, Jumper: {}}\n"
CURRICULUM = {
    "measure": "progress",
    "thresholds": [0.1, 0.3],
    "min_lesson_length": 100,
    "signal_smoothing": True,
    "parameters": {"height": [0.0, 4.0, 6.0], "gap": [1, 2, 3]},
}


def lessons(values: list[float], behavior: str = "Walker", **changed: object) -> object:
    fields = {"min_lesson_length": 100, "signal_smoothing": True, "require_reset": True}
    fields |= {"measure": "progress", "behavior": behavior} | changed
    criteria = [CompletionCriteria(threshold=n, **fields) for n in CURRICULUM["thresholds"]]
    lessons = [
        Lesson(name=f"Lesson{i}", value=ConstantSampler(value=value), completion_criteria=ends)
        for i, (value, ends) in enumerate(zip(values, [*criteria, None], strict=True))
    ]
    return EnvironmentParameter(curriculum=tuple(lessons))


EXPECTED = {"height": lessons([0.0, 4.0, 6.0]), "gap": lessons([1.0, 2.0, 3.0])}


@pytest.fixture
def single(written):
    return written(json.dumps(CURRICULUM, indent="\t"), "Walker.json")


def test_curricula_are_read_from_a_folder_with_a_json_file_for_each_behavior(loaded, written):
    written(json.dumps(CURRICULUM), "all/Walker.json")
    second = CURRICULUM | {"parameters": {"speed": [1, 2, 3]}}
    folder = written(json.dumps(second), "all/Jumper.json").parent
    written("", "all/Jumper.json.meta")
    written("", "all/.hidden")
    parameters = loaded(TRAINER, curriculum=folder).environment_parameters
    assert parameters == EXPECTED | {"speed": lessons([1.0, 2.0, 3.0], "Jumper")}


ONE = json.dumps(CURRICULUM)


OLD_FORMATS = {
    "JSON with tabs": (TRAINER, ("Walker.json", json.dumps(CURRICULUM, indent="\t"))),
    "YAML by behavior": (TRAINER, ("walk.yaml", f'{{"Walker": {ONE}}}')),
    "a section of 0.17": (TRAINER + f'curriculum: {{"Walker": {ONE}}}\n', None),
    "in a flat behavior": (f"behaviors: {{Walker: {{trainer: ppo, curriculum: {ONE}}}}}\n", None),
    "one for all": ("behaviors: {Walker: {}}\n", ("lesson-plan.json", ONE)),
}


@pytest.mark.parametrize(("text", "file"), OLD_FORMATS.values(), ids=OLD_FORMATS)
def test_curriculum_gives_equal_lessons_in_every_old_format(loaded, written, caplog, text, file):
    caplog.set_level(logging.INFO)
    paths = {"curriculum": written(*file[::-1])} if file else {}
    assert loaded(text, **paths).environment_parameters == EXPECTED
    if text.startswith(TRAINER + "curriculum"):
        assert "has the format of ML-Agents 0.17" in caplog.messages[0]


def test_curriculum_without_a_behavior_name_is_refused_if_there_are_several_behaviors(
    loaded, written
):
    with pytest.raises(SettingsError, match=r"after it: Walker.json or Jumper.json"):
        loaded(TRAINER, curriculum=written(ONE, "lesson-plan.json"))


def test_missing_curriculum_keys_get_the_defaults_of_the_old_release(loaded, written):
    short = {key: CURRICULUM[key] for key in ("measure", "thresholds", "parameters")}
    path = written(json.dumps(short), "Walker.json")
    height = loaded(TRAINER, curriculum=path).environment_parameters["height"]
    assert height == lessons([0.0, 4.0, 6.0], min_lesson_length=1, signal_smoothing=False)


def test_invalid_json_in_a_curriculum_file_is_reported_with_its_line(loaded, written):
    path = written('{\n "measure": "reward"\n "thresholds": []}', "Walker.json")
    message = refusal(SettingsError, loaded, TRAINER, curriculum=path)
    assert message.startswith(f"{path}:3: cannot be read as JSON: ")
    with pytest.raises(SettingsError, match="JSON has no NaN"):
        loaded(TRAINER, curriculum=written('{"measure": NaN}', "Walker.json"))


@pytest.mark.parametrize("name", ["Walker.json", "curricula/Walker.json", "Walker.yaml"])
def test_repeated_key_of_a_curriculum_takes_its_last_value(loaded, written, caplog, name):
    text = json.dumps(CURRICULUM)[1:-1]
    path = written('{\n"measure": "nothing",\n' + text + "}", name)
    curriculum_path = path.parent if "/" in name else path
    with caplog.at_level(logging.WARNING):
        repeated = loaded(TRAINER, curriculum=curriculum_path).environment_parameters
    assert f"{path}:3: measure: written twice, first in line 2; the last value" in caplog.text
    without_repeat = loaded(TRAINER, curriculum=written(json.dumps(CURRICULUM), "Walker.json"))
    assert repeated == without_repeat.environment_parameters


def test_repeated_parameter_of_a_sampler_file_takes_its_last_value(loaded, written, caplog):
    low, high = (f"mass: {{sampler-type: uniform, min_value: {n}, max_value: 9}}\n" for n in "12")
    path = written(f"resampling-interval: 5\n{low}{high}", "samplers.yaml")
    with caplog.at_level(logging.WARNING):
        repeated = loaded(TRAINER, sampler=path)
    assert f"{path}:3: mass: written twice, first in line 2; the last value is used" in caplog.text
    path = written(f"resampling-interval: 5\n{high}", "samplers.yaml")
    assert repeated == loaded(TRAINER, sampler=path)


def test_curriculum_folder_with_other_files_or_without_files_is_refused(loaded, written, tmp_path):
    folder = written("x", "some/notes.txt").parent
    with pytest.raises(SettingsError, match=r"notes.txt: a folder of curricula may only have"):
        loaded(TRAINER, curriculum=folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(SettingsError, match=r"has no <Behavior>.json file"):
        loaded(TRAINER, curriculum=tmp_path / "none")


SAMPLERS = """\
resampling-interval: 5000
mass: {sampler-type: "uniform", min_value: 0.5, max_value: 10}
gravity: {sampler-type: "multirange_uniform", intervals: [[7, 10], [15, 20]]}
scale: {sampler-type: "gaussian", mean: 2, st_dev: 0.3}
"""
DRAWN = {
    "mass": UniformSampler(min_value=0.5, max_value=10.0),
    "gravity": MultiRangeUniformSampler(intervals=((7.0, 10.0), (15.0, 20.0))),
    "scale": GaussianSampler(mean=2.0, st_dev=0.3),
}


def drawn(settings) -> dict[str, object]:
    parameters = settings.environment_parameters.items()
    return {name: item.curriculum[0].value for name, item in parameters}


def test_old_sampler_file_is_converted_to_environment_parameters(loaded, written):
    assert drawn(loaded(TRAINER, sampler=written(SAMPLERS, "s.yaml"))) == DRAWN


def test_parameter_randomization_section_gives_the_same_settings_as_a_sampler_file(loaded):
    section = TRAINER + "parameter_randomization:\n"
    assert drawn(loaded(section + indent(SAMPLERS, "  "))) == DRAWN
    later = "  mass: {sampler_type: uniform, sampler_parameters: {min_value: 0.5, max_value: 10}}\n"
    assert drawn(loaded(section + later)) == {"mass": DRAWN["mass"]}


def test_sampler_file_overrides_curriculum_and_both_override_the_trainer_file(
    loaded, written, caplog, single
):
    text = TRAINER + "environment_parameters: {height: 1.0, gap: 2.0, mass: 3.0, other: 4.0}\n"
    path = written("height: {sampler-type: uniform, min_value: 5, max_value: 6}\n", "s.yaml")
    parameters = loaded(text, curriculum=single, sampler=path).environment_parameters
    assert parameters["gap"] == EXPECTED["gap"]
    assert parameters["height"].curriculum[0].value == UniformSampler(min_value=5.0, max_value=6.0)
    assert parameters["mass"].curriculum[0].value == ConstantSampler(value=3.0)
    assert list(parameters) == ["height", "gap", "mass", "other"]
    assert len(caplog.messages) == 3
    assert all("is also defined in" in message for message in caplog.messages)


IN_CURRICULA = [
    ({"measure": "luck"}, ":2: Walker.measure: 'luck' is not allowed"),
    ({"thresholds": 0.5}, ":3: Walker.thresholds: needs a list of numbers, got 0.5"),
    ({"thresholds": [0.1]}, "height: needs 2 values, one more than there are thresholds"),
    ({"thresholds": [0.1, "high"]}, "Walker.thresholds[1]: needs a number, got 'high'"),
    ({"thresholds": [0.1, 3]}, "threshold: must be in [0, 1] for the measure progress"),
    ({"min_lesson_length": -1}, "min_lesson_length: must be at least 0, got -1"),
    ({"signal_smoothing": "maybe"}, "signal_smoothing: needs true or false, got 'maybe'"),
    ({"parameters": [1, 2]}, "Walker.parameters: needs a map of keys to values"),
    ({"parameters": {"p": [1, "a", 2]}}, "Walker.parameters.p[1]: needs a number, got 'a'"),
]
IN_SAMPLERS = [
    ("5000", "0", ":1: resampling-interval: must be at least 1, got 0"),
    ("5000", "often", ":1: resampling-interval: needs a whole number, got 'often'"),
    ('"uniform"', '"normal"', ":2: mass.sampler-type: 'normal' is not allowed"),
    ('sampler-type: "uniform", ', "", ":2: mass: does not contain sampler-type"),
    (", max_value: 10", "", ":2: mass: the sampler uniform needs the key 'max_value'"),
    ("max_value", "max", ":2: mass: unknown key 'max' (value 10); did you mean 'max_value'?"),
    ("10}", "0.1}", "mass.sampler_parameters.min_value: must not exceed max_value (0.1)"),
    ("[7, 10]", "[7]", "intervals[0]: needs 2 values, got 1"),
    ("mean: 2", "mean: high", "scale.sampler_parameters.mean: needs a number, got 'high'"),
]
CASES = [
    *((json.dumps(CURRICULUM | change, indent=1), said) for change, said in IN_CURRICULA),
    *(
        (ONE.replace(f'"{key}"', f'"{key}x"'), f"needs the key {key!r}, but has '{key}x'")
        for key in ("measure", "thresholds", "parameters")
    ),
    *((SAMPLERS.replace(old, new, 1), said) for old, new, said in IN_SAMPLERS),
]


@pytest.mark.parametrize(("text", "said"), CASES)
def test_mistake_in_a_curriculum_or_sampler_is_reported_with_file_and_key(
    loaded, written, text, said
):
    assert text not in (ONE, SAMPLERS)
    option, name = ("curriculum", "Walker.json") if text[0] == "{" else ("sampler", "s.yaml")
    path = written(text, name)
    error = refusal(SettingsError, loaded, TRAINER, **{option: path})
    assert error.startswith(f"{path}:")
    assert said in error


def test_curriculum_sampler_or_trainer_file_is_refused_where_another_kind_of_file_is_expected(
    written, single
):
    samplers, trainer = written(SAMPLERS, "s.yaml"), written(TRAINER, "t.yaml")
    for files, said in (
        ((trainer, samplers, None), "a sampler file, and not a curriculum file"),
        ((trainer, None, single), "a curriculum, and not a sampler file"),
        ((trainer, None, trainer), "a trainer configuration, and not a sampler file"),
        ((samplers, None, None), "this is a sampler file, and not a trainer"),
        ((single, None, None), "give it as --curriculum"),
    ):
        path, curriculum, sampler = files
        with pytest.raises(SettingsError, match=said):
            load_run_settings(path, curriculum=curriculum, sampler=sampler)
