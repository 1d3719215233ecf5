"""Reports of users who paste printed commands, with names that a shell would split."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fake_player import CONFIG, SCRIPT

from pipeline.cli import compare, init
from pipeline.cli import main as cli
from pipeline.cli.parser import aligned
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import read_demo, writing_demo
from pipeline.envs.launch import EnvironmentProcess
from pipeline.envs.named_env import executable_of
from pipeline.errors import PipelineError, brief, shell_command, shown
from pipeline.settings import load_run_settings
from pipeline.settings.nodes import from_plain
from pipeline.settings.project.environments import EnvironmentParams
from pipeline.settings.trainer.run_file import missing_demonstrations

ODD = """My "big" $HOME's *"""
"""A name with every kind of character that a shell treats specially."""
PROGRAMS = ("pipeline", "chmod")


@pytest.fixture
def pasted(tmp_path_factory: pytest.TempPathFactory):
    """Run a command in a real shell, where a stand-in program gives back its arguments."""
    folder = tmp_path_factory.mktemp("bin")
    for name in PROGRAMS:
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"print(json.dumps([os.getcwd(), {name!r}, *map(os.fsencode, sys.argv[1:])], "
            "default=lambda data: data.decode('utf-8', 'surrogateescape')))\n"
        )
        program.chmod(0o755)

    def run(command: str) -> list[str]:
        variables = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/home/other"}
        result = subprocess.run(  # noqa: S603  # the shell is what is tried
            ["/bin/bash", "-c", command], env=variables, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, (command, result.stderr)
        (line,) = result.stdout.splitlines()
        run.folder, *words = json.loads(line)
        return words

    return run


def quoted_in(text: str) -> list[str]:
    """Return the commands of a message, which are between backticks."""
    return re.findall(r"`([^`]*)`", text)


def said(call, *args, **options) -> str:
    with pytest.raises(PipelineError) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "word",
    [ODD, "", "a\nb", "\x1b[31m'red'\\", "\u202eevil", "\x85é", os.fsdecode(b"\xff'\\x")],
    ids=ascii,
)
def test_shell_command_quotes_words_so_that_a_shell_keeps_them(word: str, pasted):
    command = shell_command("pipeline", word, Path("a b"))
    assert command.isprintable()
    assert pasted(command) == ["pipeline", word, "a b"]


def game(path: Path, behavior: str) -> Path:
    """An executable with one behavior of this name."""
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"import fake_environment\nfake_environment.NAME = {behavior + '?team=0'!r}\n"
        "fake_environment.main()\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("by_option", [True, False])
def test_printed_evaluate_command_plays_the_trained_policy(
    by_option, tmp_path: Path, monkeypatch, pasted, capsys
):
    """Unity's behaviors are called "My Behavior" unless somebody renames them."""
    monkeypatch.chdir(tmp_path)
    build = game(tmp_path / f"{ODD}.x86_64", ODD)
    Path("my $seen").mkdir()
    Path("c.yaml").write_text(CONFIG.replace("Echo", json.dumps(ODD)))
    args = ["--quiet", "--record", "my $seen"]
    words = ["--env", str(build), "--run-id", ODD, "--seed", "1"]
    if by_option:
        words += ["--env-args", *args]
    else:
        with Path("c.yaml").open("a") as file:
            file.write(f"env_settings: {{env_args: {json.dumps(args)}}}\n")
    assert cli.main(["learn", "c.yaml", *words]) == 0
    command = capsys.readouterr().out.partition("Play it: ")[2].strip()
    model = f"results/{ODD}/{ODD}.onnx"
    rest = ["--env", str(build), "--env-args", *args]
    assert pasted(command) == ["pipeline", "evaluate", model, *rest]
    assert cli.main(["card", f"results/{ODD}"]) == 0
    readme = Path("cards", ODD, "README.md").read_text()
    commands = [line for line in readme.splitlines() if line.startswith("pipeline ")]
    rest[1] = build.name
    assert [pasted(line) for line in commands] == [["pipeline", "evaluate", f"{ODD}.onnx", *rest]]
    (provenance,) = [text for text in quoted_in(readme) if text.startswith("pipeline prov")]
    assert pasted(provenance) == ["pipeline", "provenance", f"{ODD}.onnx"]
    (push,) = quoted_in(capsys.readouterr().out)
    assert pasted(push) == ["pipeline", "push", f"cards/{ODD}", "--repo-id", "NAME/POLICY"]


def test_command_printed_for_a_run_without_a_policy_resumes_the_run(
    tmp_path: Path, monkeypatch, pasted, capsys
):
    """Regression: the printed command lacked the trainer file."""
    monkeypatch.chdir(tmp_path)
    run = Path("my runs", ODD)
    run.mkdir(parents=True)
    (run / "configuration.yaml").write_text("behaviors: {B: {max_steps: 1}}\n")
    assert cli.main(["card", str(run)]) == 2
    (command,) = quoted_in(capsys.readouterr().err)
    where = ["--results-dir", "my runs", "--run-id", ODD]
    expected = ["pipeline", "learn", str(run / "configuration.yaml"), *where, "--resume"]
    assert pasted(command) == expected


def test_name_of_an_environment_keeps_the_slash_of_a_gymnasium_id(tmp_path: Path):
    """Regression: the printed command had `--env Pong-v5`, which is not an environment."""
    for env, name in (("gymnasium:ALE/Pong-v5", "gymnasium:ALE/Pong-v5"), ("a/Game", "Game")):
        (tmp_path / "configuration.yaml").write_text(f"env_settings: {{env_path: '{env}'}}\n")
        assert compare._identity(tmp_path / "configuration.yaml")[2] == name


def test_message_of_an_interrupted_forced_run_advises_resume_instead_of_force(
    tmp_path: Path, monkeypatch, capsys
):
    """Regression: the advice was to add --resume to --force, which is refused."""
    from pipeline import trainer
    from pipeline.errors import Interrupted

    def stop(job, *, callbacks, **options):
        callbacks[0].on_settings(job.settings)
        raise Interrupted("stopped")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "train", stop)
    build = game(tmp_path / "Game", "B")
    for flags, end in ((["--force"], " instead of --force\n"), ([], " with --resume\n")):
        words = ["learn", "--env", str(build), "--run-id", f"run{len(flags)}", *flags]
        assert cli.main(words) != 0
        assert capsys.readouterr().err.endswith(end)


def test_command_printed_by_env_build_can_be_pasted(tmp_path: Path, monkeypatch, pasted, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.simulators.pack.pack", mock.Mock())
    assert cli.main(["env", "build", "balance_ball", "-o", f"builds/{ODD}"]) == 0
    command = capsys.readouterr().out.partition("Train in it: ")[2]
    assert pasted(command) == ["pipeline", "learn", "CONFIG", "--env", f"builds/{ODD}"]
    assert cli.main(["env", "build", f"builds/{ODD}", "-o", "x"]) == 2
    command = capsys.readouterr().err.partition("train in it: ")[2]
    assert pasted(command) == ["pipeline", "learn", "CONFIG", "--env", f"builds/{ODD}"]


def test_commands_printed_and_written_by_init_can_be_pasted(tmp_path, monkeypatch, pasted, capsys):
    """Regression: the printed command had an unquoted folder and a remark in parentheses."""
    monkeypatch.chdir(tmp_path)
    asked = {ODD: init.Behavior(spec=SPEC, n_agents=1)}
    monkeypatch.setattr(init, "_query_behaviors", mock.Mock(return_value=asked))
    game(tmp_path / f"{ODD}.x86_64", ODD)
    project = f"my {ODD}"
    assert cli.main(["init", project, "--env", f"./{ODD}.x86_64"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert pasted(said[-1]) == ["pipeline", "run", "--cores", "2"]
    assert pasted.folder == str(tmp_path / project)
    readme = Path(project, "README.md").read_text()
    (learn,) = [line for line in readme.splitlines() if line.startswith("pipeline learn")]
    trainer = "config/my_my_big_home_s_short.yaml"
    env = ["--env", f"../{ODD}.x86_64", "--run-id", "first"]
    assert pasted(learn) == ["pipeline", "learn", trainer, *env]


def test_commands_in_errors_about_missing_files_can_be_pasted(tmp_path: Path, pasted):
    target = tmp_path / ODD / "x.demo"
    record = ["pipeline", "demo", "record", "ENV", "-o", str(target)]
    (command,) = quoted_in(said(read_demo, target))
    assert pasted(command) == record
    text = json.dumps(str(target))
    (tmp_path / "c.yaml").write_text(
        f"behaviors: {{B: {{behavioral_cloning: {{demo_path: {text}}}}}}}\n"
    )
    (message,) = missing_demonstrations(load_run_settings(tmp_path / "c.yaml")).values()
    assert [pasted(command) for command in quoted_in(message)] == [record]
    for name in ("balance_ball", "my game"):
        path = str(tmp_path / ODD / name)
        command = quoted_in(said(executable_of, path))[0]
        word = name if name == "balance_ball" else "NAME"
        assert pasted(command) == ["pipeline", "env", "build", word, "-o", path]


def test_printed_url_with_a_query_is_quoted_for_the_shell(pasted):
    """Regression: an unquoted `&` sent the first half of the command into the background."""
    url = "https://example.org/game.zip?a=1&b=$c"
    node = from_plain({"source": "fetch", "url": url}, "params.yaml")
    (command,) = quoted_in(said(EnvironmentParams.from_node, node, "environments.a"))
    assert pasted(command) == ["pipeline", "env", "fetch", url]


def test_printed_chmod_command_quotes_the_file_name(tmp_path: Path, pasted):
    path = tmp_path / f"{ODD}.x86_64"
    path.write_bytes(b"#!/bin/sh\n")
    (command,) = quoted_in(said(EnvironmentProcess, [str(path)]))
    assert pasted(command) == ["chmod", "-R", "755", str(path)]


EVIL = "a\x1b[2Jb\u202ec\x85"
SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
STEP = {
    "obs": [np.zeros((2, 2), np.float32)],
    "actions": ActionTuple(np.zeros((2, 1), np.float32), np.zeros((2, 0), np.int32)),
    "reward": np.zeros(2, np.float32),
    "done": np.array([False, True]),
}
SHOWN = r"a\x1b[2Jb\u202ec\u0085"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "check", f"{EVIL}.yaml"], f"{SHOWN}.yaml"),
        (["learn", "c.yaml", "more", EVIL], SHOWN),
        (["demo", "info", f"{EVIL}.demo"], f"{SHOWN}.demo"),
        (["onnx", "check", f"{EVIL}.onnx"], f"{SHOWN}.onnx"),
        (["compare", f"results/{EVIL}"], f"results/{SHOWN}"),
        (["env", "build", f"./{EVIL}", "-o", "x"], f"./{SHOWN}"),
        (["timers", EVIL], SHOWN),
        (["config", "check", f"{'long ' * 2000}.yaml"], "characters)..."),
        (["learn", "--env", "x" * 10_000], "characters)..."),
    ],
)
def test_errors_escape_control_characters_and_shorten_long_names(
    words, said, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert error.rstrip("\n").isprintable()
    assert len(error) < 4500


def test_output_and_log_escape_control_characters_and_shorten_long_names(
    tmp_path: Path, monkeypatch, capsys
):
    """`config check` printed a behavior's name raw: it could clear the screen."""
    monkeypatch.chdir(tmp_path)
    long = "n" * 900  # a longer key is not YAML
    behaviors = {EVIL + "\nnext": {"max_steps": 5}, long: {"max_steps": 5}, f"{long} b": {}}
    Path("c.yaml").write_text(json.dumps({"behaviors": behaviors}))
    assert cli.main(["config", "check", "c.yaml"]) == 0
    out = capsys.readouterr().out
    assert SHOWN + r"\x0anext (ppo, 5 steps), nnn" in out
    assert out.replace("\n", "").isprintable()
    assert out.count("\n  sizes: ") == 4  # two names that are shortened alike are both listed
    assert len(out) < 1800
    with writing_demo(tmp_path / "d.demo", EVIL, SPEC) as writer:
        writer.append(**STEP)
    assert cli.main(["demo", "info", "d.demo"]) == 0
    assert f"behavior      {SHOWN}\n" in capsys.readouterr().out
    assert aligned([[EVIL, "1"], ["b", "2"]])[0] == f"{SHOWN}  1"
    record = logging.LogRecord("pipeline", logging.INFO, "", 0, "%s\n  %s", (EVIL, long * 9), None)
    assert cli._Shown("%(message)s").format(record).split("\n")[0] == SHOWN
    assert len(cli._Shown("%(message)s").format(record)) < 1200


def test_printable_text_and_tables_are_shown_unchanged():
    text = "a\tb\n  é → ∞ 日本\n" + "word " * 3000
    assert shown(text) == text
    assert brief("x" * 200) == "x" * 200
    assert shown("x" * 9999) == f"{'x' * 750}...(9999 characters)...{'x' * 200}"
