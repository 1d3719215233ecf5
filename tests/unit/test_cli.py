import logging
import os
import shlex
from pathlib import Path

import pytest

from pipeline.cli import main as cli
from pipeline.cli import ui

ROOT = Path(__file__).resolve().parents[2]


def test_main_help_has_examples_and_fits_on_one_screen(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for example in ("pipeline init", "pipeline run", "pipeline learn --env"):
        assert example in text
    assert [text.count(f"\n  {name} ") for name in cli.COMMANDS] == [1] * len(cli.COMMANDS)
    assert len(text.splitlines()) <= 40, "the help does not fit on one screen"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", cli.EXAMPLES)
def test_examples_in_the_help_of_a_command_are_valid(capsys, name):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert f"\nfor example\n  pipeline {cli.EXAMPLES[name][0]}\n" in capsys.readouterr().out
    for example in cli.EXAMPLES[name]:
        words = shlex.split(example.partition("    ")[0])
        assert cli.parser_for(words).parse_args(words).work is not None


NEAREST = [
    ("learn --nun-envs 2", "--num-envs", "pipeline learn"),
    ("learn --nun-envs=2", "--num-envs", "pipeline learn"),
    ("learn --run_id x", "--run-id", "pipeline learn"),
    ("learn x.yaml --sed 2 --env-args --level 7", "--seed", "pipeline learn"),
    ("demo record balance_ball --ouput a.demo", "--output", "pipeline demo record"),
    ("compare a --fracton 0.5", "--fraction", "pipeline compare"),
    ("--vresion", "--version", "pipeline"),
    ("lern", "'learn'", "pipeline learn"),
    ("lern --num-envs 2", "'learn'", "pipeline learn"),
    ("demo recrod", "'record'", "pipeline demo record"),
    ("completion fihs", "'fish'", "pipeline completion"),
    ("train a.yaml", "'learn'", "pipeline learn"),
    ("eval a.onnx", "'evaluate'", "pipeline evaluate"),
    ("demo train", "'trim'", "pipeline demo trim"),
]
NO_NEAREST = [
    ("learn --zzz", "pipeline learn"),
    ("learn a.yaml b.yaml", "pipeline learn"),
    ("zzz", "pipeline"),
    ("demo zzz", "pipeline demo"),
]
"""Words that are similar to no command or option."""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        *(
            (words, f"did you mean {nearest}? `{command} --help` lists")
            for words, nearest, command in NEAREST
        ),
        *((words, f"; `{command} --help` lists the options") for words, command in NO_NEAREST),
        ("sign food --key me.pem", "'sign' was removed: sign the folder with cosign or gpg"),
        ("attach --to 10.0.0.5:5004", "'attach' was removed: players on other machines"),
        ("export", "'export' is a stage and no command: `pipeline run EXPERIMENT --stage export`"),
        ("report", "'report' is a stage and no command: `pipeline run` makes it, `pipeline comp"),
        ("env fetch http://x/y --max-ratio 9", "--max-ratio; it was removed; --max-unpacked-gb"),
    ],
)
def test_error_for_an_unknown_word_on_the_command_line_names_a_similar_word_or_an_alternative(
    refused, words, answer
):
    line = refused(*words.split())
    assert answer in line
    if words in dict(NO_NEAREST):
        assert line.endswith(answer)
        assert "did you mean" not in line


@pytest.mark.parametrize("words", ["env", "config", "demo", "onnx", "", "env --debug"])
def test_command_without_its_subcommand_prints_its_help(capsys, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main([*words.split()[:1], "--help"])
    assert (out, err) == ("", capsys.readouterr().out)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_numeric_options_have_a_metavar_in_the_help(name):
    parsers = [cli.parser_for([name])._subcommands.choices[name]]
    if parsers[0]._subcommands is not None:
        parsers = [*parsers[0]._subcommands.choices.values()]
    actions = [action for parser in parsers for action in parser._actions]
    numbers = [action for action in actions if action.type in (int, float)]
    assert [action.dest for action in numbers if action.metavar is None] == []


def test_too_little_memory_gives_a_one_line_error_and_exit_code_two(monkeypatch, refused):
    def read(path):
        raise MemoryError("Unable to allocate 12.5 GiB")

    monkeypatch.setattr("pipeline.demos.demo_file.read_demo", read)
    error = "not enough memory; use smaller inputs, networks or buffers (Una"
    assert refused("demo", "info", "a.demo").startswith(error)


def test_option_debug_adds_the_traceback_to_the_one_line_error_of_a_mistake(here, refused, capsys):
    line = refused("plan")
    assert line.startswith("Parameter file could not be found")
    assert cli.main(["plan", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "SettingsError" in error
    assert error.splitlines()[-1] == f"error: {line}"


def test_plan_writes_the_table_of_runs_and_plan_check_refuses_a_table_that_is_out_of_date(
    here, monkeypatch, printed, refused
):
    (here / "workflow").mkdir()
    (here / "config").symlink_to(ROOT / "config")
    text = (ROOT / "params.yaml").read_text()
    (here / "params.yaml").write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    refused("plan", "--check")
    assert "`pipeline run --cores 3`" in printed("plan"), "the cores of this machine"
    assert "up to date" in printed("plan", "--check")
    (here / "params.yaml").write_text(text.replace("      - 2\n", "      - 3\n", 1))
    refused("plan", "--check")


def test_recorded_episodes_are_equal_for_equal_seeds(tmp_path, printed):
    files = [tmp_path / name for name in ("a.demo", "b.demo", "c.demo")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        words = "grid_world", "-o", file, "--episodes", 2, "--seed", seed
        assert "2 episodes" in printed("demo", "record", *words)
    contents = [file.read_bytes() for file in files]
    assert contents[0] == contents[1] != contents[2]


def test_ui_without_dag_runs_says_so_and_names_the_command_for_curves_of_learn_runs(
    here, monkeypatch, refused, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(ui, "why_not_free", lambda _: None)  # ports of this machine
    assert "there are no runs yet" in refused("ui")
    (here / "results/cart").mkdir(parents=True)
    (here / "results/cart/configuration.yaml").touch()
    assert "there are no runs yet" in refused("ui")
    said = "Curves of runs of `pipeline learn` (1 here): `tensorboard --logdir results`"
    assert said in caplog.messages
    starting = "Starting MLflow on http://127.0.0.1:5000; this may take a minute ..."
    assert starting in caplog.messages


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_startup_line_of_mlflow_is_shown_only_at_debug_level(level, caplog, capsys):
    caplog.set_level(level, "pipeline")
    noise, error = "[MLflow] Security middleware enabled with default settings\n", "no space\n"
    ui.forward_log([noise.encode(), error.encode()])
    assert capsys.readouterr().err == (error if level == logging.INFO else noise + error)


@pytest.mark.parametrize("command", ["onnx check", "evaluate", "provenance", "demo info"])
def test_file_that_is_no_model_or_demonstration_is_refused_in_one_line(tmp_path, refused, command):
    path = tmp_path / ("a.demo" if command == "demo info" else "a.onnx")
    path.write_bytes(b"nothing")
    env = ["--env", "nowhere"] if command == "evaluate" else []
    assert path.name in refused(*command.split(), path, *env)


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "train"), ("gymnasium", "envs"), ("minari", "minari")]
)
def test_missing_package_is_reported_with_its_extra(package, extra, monkeypatch, refused):
    def build(*_, **__):
        raise ModuleNotFoundError(f"No module named '{package}.nn'", name=f"{package}.nn")

    monkeypatch.setattr("pipeline.cli.env.build", build)
    error = refused("env", "build", "balance_ball", "-o", "x")
    assert f"package {package}," in error
    assert f"rl-pipeline[{extra}]" in error


def test_missing_module_of_this_package_raises_module_not_found_error(monkeypatch):
    def build(*_, **__):
        raise ModuleNotFoundError("No module named 'pipeline.x'", name="pipeline.x")

    monkeypatch.setattr("pipeline.cli.env.build", build)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["env", "build", "balance_ball", "-o", "x"])
