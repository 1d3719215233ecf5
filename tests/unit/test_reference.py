"""The generated pages of the reference: complete, and the site that they belong to."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
from interpreter import python

import pipeline
from pipeline.cli.main import COMMANDS
from pipeline.settings import RunSettings, load_run_settings
from pipeline.settings.project.params import Params
from pipeline.settings.reader import setting_hints
from pipeline.settings.trainer import schema

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/tools/reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

CLASSES = [cls for root in (RunSettings, Params) for cls in reference.settings_classes(root)]
PARSERS = dict(reference.command_parsers())


@pytest.fixture(scope="module")
def settings() -> str:
    return reference.settings_page()


@pytest.mark.parametrize("path", reference.FILES)
def test_generated_reference_page_is_current(path: str):
    written = (reference.DOCS / path).read_text("utf-8")
    assert written == reference.FILES[path](), "run `python docs/tools/reference.py`"


def test_settings_page_has_every_settings_class():
    settings_classes = {
        settings_class for name, settings_class in vars(schema).items() if name.endswith("Settings")
    }
    bases = {schema.HyperparameterSettings, schema.OnPolicySettings, schema.OffPolicySettings}
    bases |= {schema.RewardSignalSettings, schema.SamplerSettings}
    assert settings_classes - set(CLASSES) <= bases


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_description_on_the_settings_page(cls: type, settings: str):
    section = settings.partition(f"\n### {cls.__name__}\n")[2].partition("\n### ")[0]
    assert settings.count(f"\n### {cls.__name__}\n") == 1
    for key in setting_hints(cls):
        row = re.search(rf"^\| `{key}` \| .+ \| .+ \| (.+) \|$", section, re.MULTILINE)
        assert row, f"{cls.__name__}.{key} has no text below its field"


def test_commands_page_has_a_section_for_every_command():
    page = reference.commands_page()
    assert {name.split()[0] for name in PARSERS} == set(COMMANDS)
    for name in PARSERS:
        assert f"\n## pipeline {name}\n" in page


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_description_on_the_commands_page(name: str):
    section = "\n".join(reference._command_section(name, PARSERS[name]))
    assert "--debug" in PARSERS[name].format_help()
    for action in PARSERS[name]._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if action.help != argparse.SUPPRESS and action.dest != "debug":
            invocation = PARSERS[name]._get_formatter()._format_action_invocation(action)
            word = re.escape((action.option_strings or [invocation])[0])
            row = re.search(rf"^\| `[^|]*{word}[^`]*` \| (.+) \|$", section, re.MULTILINE)
            assert row, f"pipeline {name}: {word} has no help"


def test_api_page_has_every_public_name():
    page = reference.api_page()
    for name in pipeline.__all__:
        assert name == "__version__" or f".{name}\n" in page


def test_defaults_on_the_settings_page_are_written_as_in_yaml(settings: str):
    assert "| `threaded` | true or false | `false` |" in settings
    assert "| `steps_per_update` | number > 0 or `auto` | `1.0` |" in settings
    assert "| `init_path` | text or null | `null` |" in settings


def test_statistics_page_has_every_statistic_of_the_code():
    page = reference.statistics_page()
    explained = [re.escape(tag) for tag in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)]
    patterns = [re.sub(r"<[^>]+>", "[^/]+", tag) for tag in explained]
    tag = re.compile(r'"((?:Losses|Policy|Environment|Self-play)/[\w ]*\w)"')
    texts = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    tags = {name for text in texts for name in tag.findall(text)}
    assert len(tags) > 20
    assert [name for name in tags if not any(re.fullmatch(p, name) for p in patterns)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_metavar_of_an_option_differs_from_the_name_of_the_option(name: str):
    repeated = {
        flag
        for action in PARSERS[name]._actions
        for flag in action.option_strings
        if action.nargs is None
        and not action.choices
        and (action.metavar or action.dest.upper()) == flag.strip("-").upper().replace("-", "_")
    }
    assert repeated <= {"--port"}  # a number of its own kind


def test_documentation_site_builds_without_warnings(tmp_path: Path):
    words = "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"
    assert "WARNING" not in python(*words, cwd=ROOT, NO_MKDOCS_2_WARNING="1").stderr
    page = (tmp_path / "site/reference/api.html").read_text()
    for name in pipeline.__all__:
        assert name == "__version__" or f'.{name}"' in page, name


def typical(cls: type) -> dict[str, tuple[float, float]]:
    """Return the typical range of each key of a settings class whose text gives one range."""
    ranges = {
        key: re.findall(r"Typical: ([\d.]*\d) to ([\d.]*\d)", text)
        for key, text in reference.meanings(cls).items()
    }
    return {key: (float(low), float(high)) for key, found in ranges.items() for low, high in found}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_default_of_a_setting_is_in_its_typical_range(cls: type):
    defaults = {item.name: item.default for item in fields(cls)}
    for key, (low, high) in typical(cls).items():
        assert low <= defaults[key] <= high, key


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_hyperparameters_in_the_config_folder_are_in_their_typical_ranges(path: Path):
    for behavior in load_run_settings(path).behaviors.values():
        for section in (behavior.hyperparameters, behavior.network_settings):
            for key, (low, high) in typical(type(section)).items():
                assert low <= getattr(section, key) <= high, key
