"""Configurations that ML-Agents publishes load unchanged."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline.cli.main import main
from pipeline.settings import RunSettings, load_run_settings, parse_yaml, read_yaml, to_mapping
from pipeline.settings.nodes import to_plain
from pipeline.settings.trainer.run_file import structure
from pipeline.settings.trainer.schema import HYPERPARAMETERS

ROOT = Path(__file__).parents[2]
FIXTURES = Path(os.environ.get("PIPELINE_FIXTURES", ROOT.parent / "shared" / "fixtures"))
PRESENT = sorted((FIXTURES / "configs" / "v2.0").rglob("*.yaml"))
FLAT = sorted((FIXTURES / "configs" / "v1.0").rglob("*.yaml"))
OWN = sorted((ROOT / "config").rglob("*.yaml"))

needs_fixtures = pytest.mark.skipif(
    not PRESENT, reason="files of Unity and ML-Agents: PIPELINE_FIXTURES names no folder of them"
)


def name_of(path: Path) -> str:
    return "/".join(path.parts[-3:])


def published(name: str) -> Path:
    return FIXTURES / "configs" / "v2.0" / name


@pytest.mark.fixtures
@pytest.mark.parametrize("path", PRESENT, ids=name_of)
def test_published_configuration_keeps_every_written_value(path, caplog):
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


OLD = FIXTURES / "configs" / "v0.13"
PARTS = [
    *([path] for path in (*PRESENT, *FLAT)),
    *([path] for suffix in ("yaml", "json") for path in sorted(OLD.rglob(f"*.{suffix}"))),
]
if PRESENT:
    JUMP, JUMP_FILE = OLD / "curricula/wall-jump", OLD / "curricula/wall_jump.yaml"
    TRAINER, SAMPLERS = OLD / "trainer_config.yaml", OLD / "3dball_generalize.yaml"
    PARTS += [[JUMP], [TRAINER, JUMP], [JUMP_FILE, TRAINER], [SAMPLERS, TRAINER]]
    PARTS += [[TRAINER, SAMPLERS, JUMP_FILE], [published("ppo/3DBall.yaml"), SAMPLERS]]


def names_of(paths: list[Path]) -> str:
    return "+".join(name_of(path) for path in paths)


def files_of(paths: list[Path]) -> dict[str, Path]:
    """Return the files by the option that takes them; a trainer's file has the option ""."""

    def option(path: Path) -> str:
        if "curricula" in path.parts:
            return "curriculum"
        return "sampler" if "generalize" in path.name else ""

    return {option(path): path for path in paths}


def settings_of(paths: list[Path]) -> RunSettings:
    """Load the files together, each as the kind that its name indicates."""
    files = files_of(paths)
    trainer = files.pop("", None)
    return load_run_settings(trainer, **files)


@pytest.mark.fixtures
@pytest.mark.parametrize("paths", PARTS, ids=names_of)
def test_every_published_configuration_passes_the_command_config_check(paths, capsys):
    files = files_of(paths) if len(paths) > 1 else {"": paths[0]}
    words = [str(files.pop(""))]
    words += [word for option, path in files.items() for word in (f"--{option}", str(path))]
    assert main(["config", "check", "--full", *words]) == 0
    output = parse_yaml(capsys.readouterr().out, source="shown")
    assert structure(output) == settings_of(paths)


@pytest.mark.fixtures
@pytest.mark.parametrize("paths", PARTS, ids=names_of)
def test_upgraded_file_gives_the_settings_of_the_original_files(paths, tmp_path, capsys):
    new = tmp_path / "new.yaml"
    assert main(["config", "upgrade", *map(str, paths), "-o", str(new)]) == 0
    output = capsys.readouterr().out
    if paths[0] in PRESENT and len(paths) == 1:
        assert "nothing was changed" in output
        assert to_plain(read_yaml(new)) == to_plain(read_yaml(paths[0]))
    original, upgraded = settings_of(paths), load_run_settings(new)
    if "gail_config" in paths[0].name:  # mlagents-learn cannot read this file with its defaults
        assert "default_settings are left out" in output
        original = replace(original, default_settings=None)
    assert upgraded == original


@needs_fixtures
@pytest.mark.fixtures
def test_old_flat_file_gives_each_behavior_the_written_or_the_default_values() -> None:
    flat = load_run_settings(OLD / "trainer_config.yaml")
    sections = to_plain(read_yaml(OLD / "trainer_config.yaml"))
    assert list(flat.behaviors) == [name for name in sections if name != "default"]
    keys = {
        "hyperparameters": "batch_size beta buffer_size epsilon lambd learning_rate",
        "network_settings": "hidden_units normalize num_layers vis_encode_type",
        "": "max_steps time_horizon summary_freq",
    }
    for name, behavior in flat.behaviors.items():
        section = sections["default"] | sections[name]
        for place, listed in keys.items():
            part = getattr(behavior, place) if place else behavior
            for key in listed.split():
                assert getattr(part, key) == section[key], f"{name}.{key}"
        assert (behavior.network_settings.memory is not None) == section["use_recurrent"], name
        assert list(behavior.reward_signals) == list(section["reward_signals"]), name


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_our_own_configurations_load_without_a_warning(path, caplog):
    settings = load_run_settings(path)
    assert settings.behaviors
    assert all(item.trainer_type in HYPERPARAMETERS for item in settings.behaviors.values())
    assert caplog.records == []


@needs_fixtures
@pytest.mark.fixtures
def test_our_ball_configuration_has_the_published_values() -> None:
    ours = load_run_settings(ROOT / "config/ppo/3DBall.yaml")
    assert ours == load_run_settings(published("ppo/3DBall.yaml"))


@pytest.mark.parametrize(
    "path", [ROOT / "params.yaml", ROOT / "workflow/runs.yaml", *OWN], ids=name_of
)
def test_dvc_and_pipeline_read_equal_values_from_our_yaml_files(path: Path) -> None:
    reader = YAML(typ="safe", pure=True)
    assert to_plain(read_yaml(path)) == reader.load(path.read_text(encoding="utf-8"))
