"""Trainer configurations that cannot be used, and runs that cannot be begun."""

from __future__ import annotations

import pytest
from command import CONFIG

# An environment that tells when it is started.
TOUCHES = "touch started; exec sleep 1000"


def test_a_mistake_in_the_configuration_is_told_before_anything_starts(place):
    config = place.config(CONFIG.replace("buffer_size", "bufer_size"))
    env = place.program(TOUCHES)
    before = place.files()
    error = place.learn(env, config=config).error
    assert "config.yaml:4: behaviors.Echo.hyperparameters: unknown key 'bufer_size'" in error
    assert "did you mean 'buffer_size'?" in error
    assert place.files() == before


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_a_configuration_that_is_no_text_file(place, kind):
    config = place.folder / f"{kind}.yaml"
    if kind == "folder":
        config.mkdir()
    elif kind == "bytes":
        config.write_bytes(b"\xff\xfe\x00\x01")
    assert config.name in place.learn("env", config=config).error


@pytest.mark.parametrize("key", ["reward_signals.gail", "behavioral_cloning"])
def test_a_missing_demonstration_is_refused_before_the_environment_starts(place, key):
    first, _, second = key.partition(".")
    value = "{demo_path: no/such.demo}"
    config = place.config(f"{CONFIG}    {first}: {f'{{{second}: {value}}}' if second else value}\n")
    env = place.program(TOUCHES)
    before = place.files()
    line = config.read_text().count("\n")
    expected = f"{config}:{line}: behaviors.Echo.{key}.demo_path: no/such.demo is not there; "
    assert place.learn(env, config=config).error.startswith(expected)
    assert place.files() == before


def test_a_device_that_is_not_there_is_refused_before_the_environment_starts(place):
    place.config()
    env = place.program(TOUCHES)
    before = place.files()
    error = place.learn(env, "--torch-device", "warp").error
    assert error.startswith("--torch-device: 'warp' cannot be used here")
    assert place.files() == before


def test_a_behavior_that_the_configuration_does_not_list(place):
    config = place.config(CONFIG.replace("Echo", "Ecko"))
    env = place.fake()
    before = place.files()
    error = place.learn(env, config=config).error
    assert "The behavior name Echo has not been specified" in error
    assert "did you mean 'Ecko'?" in error
    assert place.files() == before


def test_a_used_run_id_and_one_that_was_never_used(place):
    place.config()
    old = place.folder / "results/run/old"
    old.parent.mkdir(parents=True)
    old.write_text("precious")
    before = place.files()
    assert "Previous data from this run ID was found." in place.learn("env").error
    error = place.pipeline("learn", "config.yaml", "--run-id", "new", "--resume").error
    assert "Previous data from this run ID was not found." in error
    assert place.files() == before


@pytest.mark.parametrize("name", ["../elsewhere", ".", "", "/tmp"])  # noqa: S108  # never made
def test_a_run_id_that_leaves_the_results_folder(place, name):
    place.config()
    (place.folder / "elsewhere").mkdir()
    (place.folder / "results").mkdir()
    (place.folder / "results/precious").touch()
    before = place.files()
    error = place.pipeline("learn", "config.yaml", "--force", f"--run-id={name}").error
    assert "does not name a folder in results" in error
    assert place.files() == before


def test_results_that_cannot_be_written(place):
    place.config()
    (place.folder / "results").write_text("a file")
    before = place.files()
    assert "results" in place.learn(place.fake()).error
    before[str(place.folder / "fake")] = (place.folder / "fake").read_bytes()
    assert place.files() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--seed often", "--seed: needs a whole number, got 'often'"),
        ("--resume --force", "--resume and --force contradict each other"),
        ("--initialize-from gone", "Could not initialize from results/gone."),
        ("--no-grafics", "unrecognized arguments: --no-grafics; did you mean --no-graphics?"),
        ("--width", "argument --width: expected one argument"),
        ("--re", "ambiguous option: --re could match"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(place, options, expected):
    place.config()
    env = place.program(TOUCHES)
    before = place.files()
    arguments = ["learn", "config.yaml", "--env", str(env), *options.split()]
    assert place.pipeline(*arguments).error.startswith(expected)
    assert place.files() == before
