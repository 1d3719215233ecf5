"""Mistakes in configuration files: one line each, with file, line and remedy."""

import pytest

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


@pytest.fixture
def one_line(refused, caplog):
    """Return the error of a command, which must not log."""

    def run(*arguments: str) -> str:
        error = refused(*arguments)
        assert caplog.messages == []
        return error

    return run


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_a_configuration_gives_a_one_line_error_with_file_and_line(
    place, here, one_line, mistake, command
):
    text, line, words = MISTAKES[mistake]
    place.config(text)
    before = place.files()
    error = one_line(*COMMANDS[command])
    assert error.startswith(f"config.yaml:{line}: "), error
    assert words in error
    assert place.files() == before


JSON = '{\n "measure": "reward",\n "thresholds": [1, 2],\n "parameters": {"gap": [1, 2, 3]}\n}\n'
FILES = {
    "JSON that is none": ("Echo.json", '{\n "measure": reward\n}\n', ":2: cannot be read as JSON"),
    "a sampler file of no sampler": ("s.yaml", "resampling-interval: 5\n", ":1: has no sampler"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_mistake_in_a_curriculum_or_sampler_file_gives_one_error(place, here, one_line, mistake):
    name, text, expected = FILES[mistake]
    place.config(text, name)
    place.config()
    before = place.files()
    option = "--curriculum" if name.endswith("json") else "--sampler"
    for words in (
        ("check", name),
        ("check", "config.yaml", option, name),
        ("upgrade", "config.yaml", name, "-o", "new.yaml"),
    ):
        assert one_line("config", *words).startswith(f"{name}{expected}")
    assert place.files() == before


def test_missing_repeated_and_mismatched_files_are_refused_in_one_line(place, here, one_line):
    place.config()
    place.config(JSON, "Echo.json")
    (here / "empty").mkdir()
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
        assert words in one_line("config", *arguments.split())
    assert place.files() == before
