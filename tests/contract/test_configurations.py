"""The configurations that ML-Agents publishes load unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.settings import dump_yaml, load_run_settings, parse_yaml, read_yaml, to_mapping
from pipeline.settings.nodes import to_plain
from pipeline.settings.run_file import structure
from pipeline.settings.schema import HYPERPARAMETERS, MemorySettings, UniformSampler

ROOT = Path(__file__).parents[2]
FIXTURES = Path(os.environ.get("PIPELINE_FIXTURES", ROOT.parent / "shared" / "fixtures"))
PRESENT = sorted((FIXTURES / "configs" / "v2.0").rglob("*.yaml"))
FLAT = sorted((FIXTURES / "configs" / "v1.0").rglob("*.yaml"))
OWN = sorted((ROOT / "config").rglob("*.yaml"))

here = pytest.mark.skipif(not PRESENT, reason="fixtures are not here")


def name_of(path: Path) -> str:
    return "/".join(path.parts[-3:])


def published(name: str) -> Path:
    return FIXTURES / "configs" / "v2.0" / name


@pytest.mark.fixtures
@pytest.mark.parametrize("path", PRESENT, ids=name_of)
def test_a_published_configuration_keeps_every_value_it_states(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = to_plain(read_yaml(path))
    read = to_mapping(load_run_settings(path))

    def check(stated: object, got: object, at: str) -> None:
        if isinstance(stated, dict):
            assert isinstance(got, dict), at
            if "curriculum" in got and "curriculum" not in stated:
                got = got["curriculum"][0]["value"]
            for key, item in stated.items():
                check(item, got[key], f"{at}.{key}")
        elif isinstance(stated, list):
            assert isinstance(got, list), at
            for index, item in enumerate(stated):
                check(item, got[index], f"{at}[{index}]")
        elif isinstance(got, dict):  # a plain value became a constant sampler
            assert got["sampler_parameters"]["value"] == stated, at
        else:
            assert got == stated, at

    check(written, read, name_of(path))
    assert caplog.records == []


@pytest.mark.fixtures
@pytest.mark.parametrize("path", PRESENT, ids=name_of)
def test_a_published_configuration_survives_writing(path: Path) -> None:
    settings = load_run_settings(path)
    assert structure(parse_yaml(dump_yaml(to_mapping(settings)), source="again")) == settings


@here
@pytest.mark.fixtures
def test_published_values_arrive_typed() -> None:
    hallway = load_run_settings(published("ppo/Hallway.yaml")).behaviors["Hallway"]
    assert hallway.network_settings.memory == MemorySettings(sequence_length=64, memory_size=128)
    pyramids = load_run_settings(published("imitation/Pyramids.yaml")).behaviors["Pyramids"]
    assert pyramids.max_steps == 10_000_000
    assert list(pyramids.reward_signals) == ["extrinsic", "curiosity", "gail"]
    wall = load_run_settings(published("ppo/WallJump_curriculum.yaml")).environment_parameters
    assert wall is not None
    lessons = wall["big_wall_height"].curriculum
    assert [lesson.name for lesson in lessons] == ["Lesson0", "Lesson1", "Lesson2", "Lesson3"]
    assert lessons[1].value == UniformSampler(min_value=4.0, max_value=7.0)


@pytest.mark.fixtures
@pytest.mark.parametrize("path", FLAT, ids=name_of)
def test_a_flat_configuration_is_refused_at_its_first_old_key(path: Path) -> None:
    with pytest.raises(SettingsError, match=r":3: .*'trainer' .*did you mean 'trainer_type'\?"):
        load_run_settings(path)


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_our_own_configurations_load_without_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_run_settings(path)
    assert settings.behaviors
    assert all(item.trainer_type in HYPERPARAMETERS for item in settings.behaviors.values())
    assert caplog.records == []


@here
@pytest.mark.fixtures
def test_our_ball_configuration_has_the_published_values() -> None:
    ours = load_run_settings(ROOT / "config/ppo/3DBall.yaml")
    assert ours == load_run_settings(published("ppo/3DBall.yaml"))


@pytest.mark.parametrize(
    "path", [ROOT / "params.yaml", ROOT / "workflow/runs.yaml", *OWN], ids=name_of
)
def test_dvc_reads_our_files_as_we_do(path: Path) -> None:
    reader = YAML(typ="safe", pure=True)
    assert to_plain(read_yaml(path)) == reader.load(path.read_text(encoding="utf-8"))
