"""Mistakes in configuration files: one line each, with file, line and remedy."""

from __future__ import annotations

import pytest

from pipeline.cli.main import main

HYPER = "behaviors:\n  Echo:\n    trainer_type: ppo\n    hyperparameters:\n      "

# By mistake: the file's text, the line in the error, and words of the remedy. One mistake of each
# kind; tests/unit/settings has all of them.
MISTAKES = {
    "an empty file": ("", 1, "has no settings"),
    "a line that begins in a column of its own": (
        "behaviors:\n    Echo: {}\n   Other: {}\n",
        3,
        "this line begins in column 4, in which no block above begins; begin it in the column of",
    ),
    "a bracket that stays open": ("behaviors:\n  Echo: [1, 2\n", 2, "the '[' here is not closed."),
    "a misspelt hyperparameter": (HYPER + "bufer_size: 5\n", 5, "did you mean 'buffer_size'?"),
}
COMMANDS = {
    "check": ["config", "check", "config.yaml"],
    "upgrade": ["config", "upgrade", "config.yaml", "-o", "new.yaml"],
    "learn": ["learn", "config.yaml", "--env", "env", "--run-id", "run"],
}


def one_line(capsys, caplog, *arguments: str) -> str:
    """Return the error of a command run in this process, which must print that line alone."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1, output.err
    assert [record.getMessage() for record in caplog.records] == []
    assert output.err.startswith("error: ")
    return output.err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_a_configuration_gives_a_one_line_error_with_file_and_line(
    place, monkeypatch, capsys, caplog, mistake, command
):
    text, line, words = MISTAKES[mistake]
    place.config(text)
    monkeypatch.chdir(place.folder)
    before = place.files()
    error = one_line(capsys, caplog, *COMMANDS[command])
    assert error.startswith(f"config.yaml:{line}: "), error
    assert words in error
    assert place.files() == before


JSON = '{\n "measure": "reward",\n "thresholds": [1, 2],\n "parameters": {"gap": [1, 2, 3]}\n}\n'
FILES = {
    "JSON that is none": ("Echo.json", '{\n "measure": reward\n}\n', ":2: cannot be read as JSON"),
    "a sampler file of no sampler": ("s.yaml", "resampling-interval: 5\n", ":1: has no sampler"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_mistake_in_a_curriculum_or_sampler_file_gives_a_one_line_error(
    place, monkeypatch, capsys, caplog, mistake
):
    name, text, expected = FILES[mistake]
    place.config(text, name)
    place.config()
    monkeypatch.chdir(place.folder)
    before = place.files()
    assert one_line(capsys, caplog, "config", "check", name).startswith(f"{name}{expected}")
    option = "--curriculum" if name.endswith("json") else "--sampler"
    error = one_line(capsys, caplog, "config", "check", "config.yaml", option, name)
    assert error.startswith(name + expected)
    error = one_line(capsys, caplog, "config", "upgrade", "config.yaml", name, "-o", "new.yaml")
    assert error.startswith(name + expected)
    assert place.files() == before


def test_missing_repeated_and_mismatched_configuration_files_are_refused_in_one_line(
    place, monkeypatch, capsys, caplog
):
    place.config()
    place.config(JSON, "Echo.json")
    (place.folder / "empty").mkdir()
    monkeypatch.chdir(place.folder)
    before = place.files()
    for arguments, words in {
        "check config.yaml --sampler Echo.json": "Echo.json: this is a curriculum",
        "check config.yaml --curriculum config.yaml": "and not a curriculum file",
        "check Echo.json --curriculum Echo.json": "Give only one file of each kind.",
        "check missing.yaml": "Config file could not be found at",
        "check empty": "empty: the folder has no <Behavior>.json file.",
        "upgrade Echo.json Echo.json -o new.yaml": "Give only one file of each kind.",
        "upgrade config.yaml -o empty --force": "empty",
    }.items():
        assert words in one_line(capsys, caplog, "config", *arguments.split())
    assert place.files() == before
