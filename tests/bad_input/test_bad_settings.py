"""Mistakes in configuration files: each is told in one line, with file, line and remedy."""

from __future__ import annotations

import pytest

from pipeline.cli import main

HYPER = "behaviors:\n  Echo:\n    trainer_type: ppo\n    hyperparameters:\n      "
BEHAVIOR = "behaviors:\n  Echo:\n    "
CURRICULUM = "behaviors: {Echo: {}}\ncurriculum:\n  Echo:\n    "
RANDOM = "behaviors: {Echo: {}}\nparameter_randomization:\n  "
FLAT = "default:\n  trainer: ppo\n  max_steps: 5.0e4\nEcho:\n  "
SIGNALS = BEHAVIOR + "reward_signals:\n      "

# What is wrong: the file, the line that is to be named, and words that say what to do about it.
MISTAKES = {
    # Files that are none.
    "an empty file": ("", 1, "holds no settings"),
    "behaviors without a value": ("debug: true\nbehaviors:\n", 2, "needs a map"),
    "plain text": ("train Echo\n", 1, "needs a map of keys to values"),
    "two documents": ("debug: true\n---\ndebug: false\n", 2, "cannot be read as YAML"),
    "a bracket that stays open": ("behaviors:\n  Echo: [1, 2\n", 3, "cannot be read as YAML"),
    "a wrong indentation": (BEHAVIOR + "max_steps: 5\n   time_horizon: 5\n", 4, "YAML"),
    "a tab": ("behaviors:\n\tEcho: {}\n", 2, "cannot start any token"),
    "a colon too many": ("behaviors: Echo: {}\n", 1, "cannot be read as YAML"),
    "a tag of Python": (
        "debug: !!python/name:os.system\n",
        1,
        "settings are plain data",
    ),
    "a tag of YAML": ("debug: !!bool true\n", 1, "settings are plain data"),
    "a key that is written twice": (BEHAVIOR + "max_steps: 5\n    max_steps: 6\n", 4, "line 3"),
    "an unknown anchor": ("behaviors: *all\n", 1, "undefined alias"),
    # Keys and types; more of them in tests/unit/settings/test_settings_mistakes.py.
    "a misspelt hyperparameter": (HYPER + "bufer_size: 5\n", 5, "did you mean 'buffer_size'?"),
    "no area": ("env_settings: {num_areas: 0}\n", 1, "must be at least 1"),
    "a number for a behavior": ("behaviors:\n  Echo: 5\n", 2, "needs a map"),
    # Demonstrations.
    "GAIL with a list of no demonstrations": (
        SIGNALS + "gail: {demo_path: []}\n",
        4,
        "gail.demo_path: needs at least one demonstration, got an empty list",
    ),
    "a demonstration that weighs nothing": (
        SIGNALS + "gail: {demo_path: [a.demo, {path: b.demo, weight: 0}]}\n",
        4,
        "gail.demo_path[1].weight: must be greater than 0, got 0",
    ),
    "a demonstration with a misspelt key": (
        BEHAVIOR + "behavioral_cloning: {demo_path: [{paht: b.demo}]}\n",
        3,
        "behavioral_cloning.demo_path[0]: unknown key 'paht'",
    ),
    "a demonstration that is no path": (
        BEHAVIOR + "behavioral_cloning: {demo_path: true}\n",
        3,
        "behavioral_cloning.demo_path: needs a path, or a list of paths",
    ),
    "cloning without a demonstration": (
        BEHAVIOR + "behavioral_cloning: {steps: 5}\n",
        3,
        "'demo_path' is required",
    ),
    # Older formats.
    "a section of an unknown trainer": (FLAT + "trainer: poo\n", 5, "'poo' is not allowed"),
    "a section that stands for none": (
        FLAT + "beta: 0.1\nFoe: Ecko\n",
        6,
        "did you mean 'Echo'?",
    ),
    "a recurrence that is no bool": (FLAT + "use_recurrent: 2\n", 5, "needs true or false"),
    "text in a flat section": (FLAT + "batch_size: many\n", 5, "needs a whole number"),
    "nothing but imitation of a player": (
        "Echo:\n  trainer: online_bc\n",
        2,
        "there is no demonstration to learn from",
    ),
    "one threshold too few": (
        CURRICULUM
        + "measure: reward\n    thresholds: [1]\n    parameters:\n      gap: [1, 2, 3]\n",
        7,
        "needs 2 values",
    ),
    "a curriculum without thresholds": (
        CURRICULUM + "measure: reward\n    parameters: {gap: [1]}\n",
        3,
        "needs the key 'thresholds'",
    ),
    "an interval of no steps": (RANDOM + "resampling-interval: 0\n", 3, "must be at least 1"),
}
COMMANDS = {
    "check": ["config", "check", "config.yaml"],
    "upgrade": ["config", "upgrade", "config.yaml", "-o", "new.yaml"],
    "learn": ["learn", "config.yaml", "--env", "env", "--run-id", "run"],
}


def one_line(capsys, caplog, *arguments: str) -> str:
    """The line that a command says in this process, which has to be the only one."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    assert [record.getMessage() for record in caplog.records] == []
    assert said.err.startswith("error: ")
    return said.err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_place(place, monkeypatch, capsys, caplog, mistake, command):
    text, line, words = MISTAKES[mistake]
    place.config(text)
    monkeypatch.chdir(place.folder)
    before = place.files()
    error = one_line(capsys, caplog, *COMMANDS[command])
    assert error.startswith(f"config.yaml:{line}: "), error
    assert words in error
    assert place.files() == before


@pytest.mark.parametrize(
    ("mistake", "command"),
    [
        ("an empty file", "learn"),
        ("a tag of Python", "check"),
        ("a bracket that stays open", "upgrade"),
        ("a misspelt hyperparameter", "learn"),
        ("one threshold too few", "check"),
        ("text in a flat section", "upgrade"),
    ],
)
def test_a_mistake_is_one_line_of_a_process_of_its_own(place, mistake, command):
    text, line, words = MISTAKES[mistake]
    place.config(text)
    before = place.files()
    done = place.pipeline(*COMMANDS[command])
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: config.yaml:{line}: ")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert place.files() == before


JSON = '{\n "measure": "reward",\n "thresholds": [1, 2],\n "parameters": {"gap": [1, 2, 3]}\n}\n'
FILES = {
    "JSON that is none": ("Echo.json", '{\n "measure": reward\n}\n', ":2: cannot be read as JSON"),
    "a comma too many": ("Echo.json", JSON.replace("]}\n", "]},\n"), ":5: cannot be read as JSON"),
    "an empty JSON file": ("Echo.json", "", ":1: cannot be read as JSON"),
    "a list in JSON": ("Echo.json", "[1, 2]", ":1: needs a map of keys to values"),
    "another count of thresholds": ("Echo.json", JSON.replace("[1, 2]", "[1]"), ":4: "),
    "thresholds of text": ("Echo.json", JSON.replace("[1, 2]", '["a", 2]'), ":3: "),
    "a curriculum of no measure": ("Echo.json", JSON.replace("measure", "mesure"), ":1: "),
    "an unknown measure": ("Echo.json", JSON.replace("reward", "luck"), ":2: "),
    "values of text": ("Echo.json", JSON.replace("[1, 2, 3]", '[1, "b", 3]'), ":4: "),
    "a sampler of no type": ("s.yaml", "resampling-interval: 5\nmass: {min_value: 1}\n", ":2: "),
    "a sampler that is a number": ("s.yaml", "resampling-interval: 5\nmass: 3\n", ":2: "),
    "a sampler file of no sampler": ("s.yaml", "resampling-interval: 5\n", ":1: holds no sampler"),
    "an interval that is text": (
        "s.yaml",
        "resampling-interval: often\nmass: {sampler-type: uniform, min_value: 1, max_value: 2}\n",
        ":1: resampling-interval: needs a whole number",
    ),
    "a range that is no range": (
        "s.yaml",
        "mass:\n  sampler-type: multirange_uniform\n  intervals:\n    - [1, 2]\n    - [3]\n",
        ":5: environment_parameters.mass.sampler_parameters.intervals[1]: needs 2 values",
    ),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_mistake_in_a_curriculum_or_sampler_file_is_one_line(
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


def test_files_that_do_not_go_together_are_one_line(place, monkeypatch, capsys, caplog):
    place.config()
    place.config(JSON, "Echo.json")
    (place.folder / "empty").mkdir()
    monkeypatch.chdir(place.folder)
    before = place.files()
    for arguments, words in {
        (
            "check",
            "config.yaml",
            "--sampler",
            "Echo.json",
        ): "Echo.json: this is a curriculum",
        ("check", "config.yaml", "--curriculum", "config.yaml"): "and not a curriculum file",
        ("check", "Echo.json", "--curriculum", "Echo.json"): "Give one of each kind.",
        ("check", "missing.yaml"): "Config file could not be found at",
        ("check", "empty"): "empty: the folder holds no <Behavior>.json file.",
        ("upgrade", "config.yaml", "-o", "config.yaml"): "config.yaml exists already.",
        ("upgrade", "Echo.json", "Echo.json", "-o", "new.yaml"): "Give one of each kind.",
        ("upgrade", "config.yaml", "-o", "empty", "--force"): "empty",
    }.items():
        assert words in one_line(capsys, caplog, "config", *arguments)
    assert place.files() == before
