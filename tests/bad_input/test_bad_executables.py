"""Environments that cannot be started, or are not what they should be."""

from __future__ import annotations

import shutil
import socket

import pytest


def test_an_executable_that_does_not_exist(place):
    place.config()
    before = place.files()
    done = place.learn("nowhere")
    assert done.error.startswith("Couldn't launch the nowhere environment.")
    assert str(place.folder) in done.error
    assert place.files() == before


@pytest.mark.parametrize(
    ("mode", "content", "expected"),
    [
        (0o644, b"not a program", "it may not be executed. Try `chmod -R 755"),
        (0o755, b"\0\1\2 not a program", "this system cannot run it (exec format error)"),
        (0o755, None, "Provided filename does not match any environments"),
    ],
)
def test_a_file_that_is_no_program_and_a_folder(place, mode, content, expected):
    place.config()
    data = place.folder / "data"
    if content is None:
        data.mkdir()
    else:
        data.write_bytes(content)
        data.chmod(mode)
    before = place.files()
    assert expected in place.learn("data").error
    assert place.files() == before


def test_an_executable_that_exits_at_once_is_quoted(place):
    place.config()
    env = place.fake("--mode", "exit")
    before = place.files()
    error = place.learn(env).error
    assert "return code 3" in error
    assert error.endswith("| fake environment starts | cannot find the scene")
    assert place.files() == before


def test_an_environment_that_never_connects_is_given_up_after_the_time_out(place):
    place.config()
    env = place.program("exec sleep 1000")
    before = place.files()
    done = place.learn(env, "--timeout-wait", "2")
    assert "took too long to respond (2 s)" in done.error
    assert 2 <= done.seconds < 60, "as long as without the option"
    assert place.files() == before


def test_an_environment_of_another_protocol_version(place):
    place.config()
    env = place.fake("--mode", "old")
    before = place.files()
    error = place.learn(env).error
    assert "Python has 1.5.0" in error
    assert "environment has 0.15.0" in error
    assert place.files() == before


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("no-actions", "behavior Echo?team=0: it announces no actions; give its agents"),
        ("huge-branch", "2147483647 choices in all; at most 65536 actions and choices"),
        ("huge-shape", "behavior Echo?team=0: an agent observes 4611686014132420609 numbers"),
        ("no-observations", "a message about the behavior Echo?team=0 would take 413 MB of memory"),
        (
            "unknown-statistic",
            "statistic Echo/Score is to be aggregated by method 9; known methods",
        ),
    ],
)
def test_an_environment_that_sends_what_cannot_be(place, mode, expected):
    place.config()
    env = place.fake("--mode", mode)
    done = place.learn(env)
    assert expected in done.error
    assert "Traceback" not in done.err


def test_a_base_port_in_use(place):
    place.config()
    env = place.fake()
    before = place.files()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        error = place.learn(env, "--base-port", str(port)).error
    assert f"worker number 0 (port {port}) is still in use" in error
    assert "--base-port" in error
    assert place.files() == before


def test_an_earlier_run_is_replaced_only_when_the_new_one_starts(place, trained):
    shutil.copytree(trained.folder / "results", place.folder / "results")
    place.config()
    env = place.fake()
    before = place.files()
    assert place.learn("nowhere", "--force").code == 2
    assert place.files() == before
    assert place.program("exit 1", name="broken").exists()
    assert place.learn("broken", "--force").code == 2
    (place.folder / "broken").unlink()
    assert place.files() == before
    done = place.learn(env, "--force")
    assert done.code == 0, done.err
    assert "The earlier run of this id is kept in results/run.1." in done.err
    results = place.folder / "results"
    assert sorted(path.name for path in results.iterdir()) == ["run", "run.1"]
    after = place.files()
    for path, content in before.items():
        if path.startswith(str(results / "run/")):
            assert after[path.replace("/results/run/", "/results/run.1/")] == content
    assert place.learn(env, "--force").code == 0
    assert sorted(path.name for path in results.iterdir()) == ["run", "run.1", "run.2"]


@pytest.mark.parametrize("command", ["learn", "evaluate"])
def test_debug_shows_the_traceback_as_well(place, trained, command):
    first = place.config() if command == "learn" else trained.folder / "results/run/Echo.onnx"
    done = place.pipeline(command, str(first), "--debug", "--env", "nowhere")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "UnityEnvironmentException" in done.err
    assert done.err.splitlines()[-1].startswith("error: Couldn't launch the nowhere environment.")


def test_evaluate_names_the_behavior_that_no_policy_is_for(place, trained):
    model = place.folder / "Other.onnx"
    shutil.copy(trained.folder / "results/run/Echo.onnx", model)
    env = place.fake()
    before = place.files()
    error = place.pipeline("evaluate", str(model), "--env", str(env), "--episodes", "1").error
    assert "'Echo?team=0'" in error
    assert "['Other']" in error
    assert "Echo.onnx" in error
    assert place.files() == before


def test_evaluate_refuses_a_policy_of_other_shapes(place, trained):
    model = trained.folder / "results/run/Echo.onnx"
    env = place.fake("--wide")
    before = place.files()
    error = place.pipeline("evaluate", str(model), "--env", str(env), "--episodes", "1").error
    assert "Echo" in error
    assert "5" in error
    assert place.files() == before


def test_a_missing_file_is_answered_with_the_one_that_its_name_is_like(place):
    for name in ("Ball.onnx", "timers.json"):
        (place.folder / name).touch()
    env = place.fake("--wide")
    for command in (
        ("evaluate", "Bal.onnx", "--env", str(env)),
        ("onnx", "check", "Bal.onnx"),
        ("timers", "timer.json"),
    ):
        error = place.pipeline(*command).error
        missing = command[1] if command[0] != "onnx" else command[2]
        assert missing in error, command
        assert "; did you mean '" in error, command
