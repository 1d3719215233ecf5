"""Mistakes of newcomers, and the program's answers."""

import logging
import os
from pathlib import Path

import onnx
import pytest
import reference

import pipeline
from pipeline.cli import main as cli
from pipeline.cli.onnx import check
from pipeline.envs.named_env import executable_of
from pipeline.export.publish import build_model

TOO_SHORT = "max_steps {} ends the run before the first update, for which hyperparameters.{} {} "
SIZES = [
    ("ppo", {"max_steps": 99, "buffer_size": 100, "batch_size": 50}, ("buffer_size", 100)),
    ("poca", {"max_steps": 99, "buffer_size": 100, "batch_size": 50}, ("buffer_size", 100)),
    ("sac", {"max_steps": 99, "buffer_init_steps": 100}, ("batch_size", 128)),
    ("sac", {"max_steps": 199, "buffer_init_steps": 200}, ("buffer_init_steps", 200)),
    ("ppo", {"max_steps": 100, "buffer_size": 100, "batch_size": 100}, None),
    ("sac", {"max_steps": 200, "buffer_init_steps": 200}, None),
]


def trainer(kind: str, *, max_steps: int = 1000, **sizes: int) -> dict:
    network = {"hidden_units": 8, "num_layers": 1}
    top = {"trainer_type": kind, "max_steps": max_steps, "network_settings": network}
    top["summary_freq"] = max_steps
    return {"default_settings": {**top, "hyperparameters": sizes}}


def checked(tmp_path: Path, capsys, settings: dict) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(str(settings))  # JSON of numbers and words is YAML
    assert cli.main(["config", "check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition("sizes: ")[2].strip() for line in lines if "sizes: " in line]


@pytest.mark.parametrize(("kind", "sizes", "missed"), SIZES)
def test_run_that_ends_before_its_first_update_logs_a_warning(
    kind, sizes, missed, tmp_path, capsys, caplog
):
    remarks = checked(tmp_path, capsys, trainer(kind, **sizes))
    expected = [] if missed is None else [TOO_SHORT.format(sizes["max_steps"], *missed)]
    found = [text.partition("has to be")[0] for text in remarks]
    assert found == [f"default_settings: {text}" for text in expected]
    if kind == "poca":
        return
    with caplog.at_level(logging.WARNING):
        done = pipeline.train("balance_ball", trainer(kind, **sizes), seed=1, run_dir=tmp_path)
    said = [one.message for one in caplog.records if "first update" in one.message]
    found = [text.partition("has to be")[0] for text in said]
    assert found == [f"3DBall: {text}" for text in expected]
    assert not expected or done.behaviors["3DBall"].n_updates == 0


@pytest.mark.parametrize(
    ("kind", "end"), [("ppo", "an update has only one minibatch"), ("sac", "nothing is learned")]
)
def test_config_check_warns_if_batch_size_is_above_buffer_size(kind, end, tmp_path, capsys):
    said = "hyperparameters.batch_size 65 is above hyperparameters.buffer_size 64"
    remarks = checked(tmp_path, capsys, trainer(kind, batch_size=65, buffer_size=64))
    assert remarks == [f"default_settings: {said}: {end}"]
    assert checked(tmp_path, capsys, trainer(kind, batch_size=64, buffer_size=64)) == []


OPPONENTS = "opponents play only the initial policy or the newest policy"
LATE = {
    "summary_freq": ({}, "no summary and no learning curve is written"),
    "checkpoint_interval": ({}, "the run saves a checkpoint only at its end"),
    "self_play.save_steps": ({"team_change": 1000}, OPPONENTS),
    "self_play.team_change": ({"save_steps": 1000}, "the learning team does not change"),
    "behavioral_cloning.steps": ({"demo_path": "."}, "cloning does not fade out before the end"),
}


@pytest.mark.parametrize("key", LATE)
def test_config_check_warns_if_an_interval_is_longer_than_max_steps(key, tmp_path, capsys):
    (more, effect), settings = LATE[key], trainer("sac", buffer_init_steps=0)
    section, _, name = key.rpartition(".")
    (tmp_path / "a.demo").touch()
    said = f"default_settings: {key} 1001 is above max_steps 1000: {effect}"
    for number, expected in ((1001, [said]), (1000, [])):
        values = {name: number} | more
        settings["default_settings"] |= {section: values} if section else values
        assert checked(tmp_path, capsys, settings) == expected


def test_config_check_warns_if_sequence_length_is_above_time_horizon(tmp_path, capsys):
    settings = trainer("ppo", buffer_size=1000, batch_size=1000)
    settings["default_settings"]["network_settings"]["memory"] = {"sequence_length": 65}
    (said,) = checked(tmp_path, capsys, settings)
    assert said.endswith("is above time_horizon 64: no sequence is longer than time_horizon")


@pytest.fixture(autouse=True)
def folder(here) -> Path:
    (here / "c.yaml").write_text(str(trainer("ppo")))
    return here


def test_error_about_a_configuration_file_given_as_env_says_that_it_is_a_yaml_file(refused):
    """Regression: the advice was `chmod -R 755 c.yaml`."""
    line = refused("learn", "c.yaml", "--env", "c.yaml")
    assert line.startswith("c.yaml: is a YAML file, but --env takes an environment; give a")
    assert "chmod" not in line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("README.md", b"# Words\n", "is a Markdown file"),
        ("notes", b"Words\n", "is a text file"),
        ("game.zip", b"PK\x03\x04\x14\0", "is an archive; unpack it first"),
        ("A.onnx", b"\x08\x09:\x10abc", "is an ONNX model, which `pipeline evaluate` plays"),
        ("a.demo", b"\x28\0\x01", "has binary data"),
        ("empty", b"", "is empty; copy or download it again"),
    ],
)
def test_error_about_a_file_given_as_env_names_the_type_of_the_file(refused, name, content, said):
    Path(name).write_bytes(content)
    line = refused("learn", "c.yaml", "--env", name)
    assert line.startswith(f"{name}: {said}, but --env takes an environment; give a path")
    assert "chmod" not in line


@pytest.mark.parametrize(
    ("name", "content"),
    [("Game.x86_64", b"?"), ("game", b"\x7fELF\x02"), ("game", b"#!/bin/sh\n")],
)
def test_error_about_a_program_without_execute_permission_gives_the_chmod_command(
    refused, name, content
):
    Path(name).write_bytes(content)
    assert "`chmod -R 755 " in refused("learn", "c.yaml", "--env", f"./{name}")


@pytest.mark.parametrize("env", ["gymnasium:CartPole-v1", "balance_ball", "my_env:make"])
def test_error_about_an_environment_given_as_configuration_gives_the_correct_command(refused, env):
    line = refused("learn", env)
    assert line.startswith(f"{env}: is an environment, but CONFIG is a trainer config")
    assert f"`pipeline learn --env {env}`" in line


def test_resume_of_a_missing_run_lists_existing_runs(refused):
    env = ("--env", "balance_ball", "--run-id", "first", "--resume")
    assert refused("learn", "c.yaml", *env).endswith("(results/first) results has no run.")
    for name in ("a", "b", "c", "d", "fist", "second"):
        Path("results", name).mkdir(parents=True)
        Path("results", name, "configuration.yaml").touch()
    said = "(results/first) results has fist, second, a, b, c and 1 more."
    assert refused("learn", "c.yaml", *env).endswith(said)


@pytest.mark.parametrize(
    ("name", "content"), [("README.md", b"# Words"), ("a.pt", b"PK\x03\x04"), ("no.onnx", b"")]
)
def test_file_that_is_no_policy_is_refused_before_the_environment_is_built(
    refused, monkeypatch, name, content
):
    monkeypatch.setattr("pipeline.envs.named_env.executable_of", None)
    if content:
        Path(name).write_bytes(content)
    assert refused("evaluate", name, "--env", "balance_ball").startswith(f"{name}: ")


def test_error_about_an_unknown_device_names_the_devices_of_this_machine(refused, monkeypatch):
    """Regression: torch's 20 device types were listed, after the environment was built."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    line = refused("learn", "c.yaml", "--env", "balance_ball", "--torch-device", "gpu")
    assert line == (
        "--torch-device: 'gpu' cannot be used here (the names are cpu, cuda, cuda:N and mps); "
        "use cpu, cuda:0, cuda:1, which this machine has"
    )
    assert [path.name for path in Path().iterdir()] == ["c.yaml"]


def test_folder_given_as_env_without_a_visible_program_is_refused(refused, tmp_path, monkeypatch):
    """Regression: the error listed the scripts of .git/hooks, or was a traceback."""
    for name in (".git/hooks/pre-push", "gone/a", "text"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("#!/bin/sh\n")
    (tmp_path / "mine/.git/hooks/pre-push").chmod(0o755)
    scandir = os.scandir

    def without_one(path="."):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_one)
    line = refused("learn", "c.yaml", "--env", "./mine")
    assert "does not match any environments" in line
    assert "pre-push" not in line
    game = tmp_path / "mine/Game"
    game.touch(0o755)
    assert executable_of("./mine") == game
    monkeypatch.chdir(tmp_path / "mine")
    assert executable_of(".") == game


def test_onnx_check_accepts_a_run_folder_and_prints_the_exporter(refused, capsys):
    model, run = build_model(reference.policy(continuous=2, branches=(3,))), Path("results/a")
    (run / "3DBall").mkdir(parents=True)
    onnx.save(model, run / "3DBall/3DBall-500.onnx")
    onnx.save(model, run / "3DBall.onnx")
    assert cli.main(["onnx", "check", "results/a"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("results/a/3DBall.onnx: Unity can load this file")
    assert second == "  made by   rl-pipeline"
    model.producer_name, model.producer_version = "pytorch", "1.8"
    onnx.save(model, run / "Other.onnx")
    assert "  made by   pytorch 1.8\n" in check(run / "Other.onnx")
    line = refused("onnx", "check", "results/a")
    assert line.endswith("which has results/a/3DBall.onnx, results/a/Other.onnx; name one of them")
    for file in run.glob("*.onnx"):
        file.unlink()
    assert cli.main(["onnx", "check", "results/a"]) == 0
    assert "results/a/3DBall/3DBall-500.onnx: Unity" in capsys.readouterr().out
    assert refused("onnx", "check", ".") == (
        ".: is a folder, which has no .onnx file; give the file of a run"
    )
