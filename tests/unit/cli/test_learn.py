"""`pipeline learn`: from its options to the environment's messages and the run's files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
import yaml
from fake_player import SCRIPT
from free_ports import free_ports

from pipeline import files
from pipeline.cli.learn_run import run_folder
from pipeline.dag import provenance
from pipeline.dag.attempt import digest_of
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import SettingsError
from pipeline.trainer import loop
from pipeline.trainer.stopping import StopRequest
from pipeline.wire.channels import side_channels as wire
from pipeline.wire.codec.generated.messages import UnityRLInitializationInputProto


@pytest.fixture
def editor_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, used in place of the Editor's port 5004."""
    port = free_ports(1)
    assert UnityEnvironment.DEFAULT_EDITOR_PORT == 5004
    monkeypatch.setattr(UnityEnvironment, "DEFAULT_EDITOR_PORT", port)
    return port


@pytest.fixture
def editor(editor_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that connects to `editor_port`, as the Editor does when Play is pressed."""
    command = [sys.executable, str(SCRIPT), "--mlagents-port", str(editor_port), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:  # noqa: S603  # ours
        yield process
        process.kill()


def test_command_line_options_reach_every_environment(learn, fake, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    engine = "--width 100 --height 50 --quality-level 3 --time-scale 7.5 --target-frame-rate 30 "
    engine += "--capture-frame-rate 25 --no-graphics-monitor --num-areas 4 --num-envs 2"
    env = fake("--record", str(seen))
    assert learn("--env", env, *engine.split(), "--env-args", "--nan-at", "7") == 0
    workers = {}
    for path in seen.glob("*.args"):
        arguments = path.read_text().split("\n")
        log = Path(arguments[arguments.index("-logFile") + 1])
        assert log.parent == tmp_path / "results/ppo/run_logs"
        assert arguments[-2:] == ["--nan-at", "7"]
        start = UnityRLInitializationInputProto.FromString(path.with_suffix(".start").read_bytes())
        assert start.num_areas == 4
        workers[log.name] = ("-nographics" in arguments, "-batchmode" in arguments, start.seed)
        sent = wire.unpack(path.with_suffix(".channels").read_bytes())
        assert [payload for name, payload in sent if name == wire.ENGINE_CONFIGURATION] == [
            struct.pack("<iii", 0, 100, 50),
            struct.pack("<ii", 1, 3),
            struct.pack("<if", 2, 7.5),
            struct.pack("<ii", 3, 30),
            struct.pack("<ii", 4, 25),
        ]
    visible, hidden = workers["Player-0.log"], workers["Player-1.log"]
    assert visible[:2] == (False, False)
    assert hidden[:2] == (True, True)
    assert hidden[2] == visible[2] + 1


@contextlib.contextmanager
def written_by_another(folder: Path) -> Iterator[None]:
    """While the block runs, a thread is the folder's writer."""
    with ThreadPoolExecutor(1) as other:
        writer = files.sole_writer(folder)
        other.submit(writer.__enter__).result()
        try:
            yield
        finally:
            other.submit(writer.__exit__, None, None, None).result()


@pytest.mark.parametrize("option", ["--force", "--resume", None])
def test_a_second_writer_of_a_run_folder_is_refused_before_anything_changes(
    option, learn, fake, tmp_path, capsys
):
    options = ["--env", fake(), *([option] if option else [])]
    assert learn("--env", fake()) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    with written_by_another(tmp_path / "results/ppo"):
        assert learn(*options) == 2
    error = capsys.readouterr().err
    assert "results/ppo" in error
    assert f"pid {os.getpid()}" in error
    assert error.count("\n") == 1
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert learn("--env", fake(), "--force") == 0
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["ppo", "ppo.1"]


def test_option_force_removes_temporary_files_of_the_killed_run(learn, fake, tmp_path):
    assert learn("--env", fake()) == 0
    leftover = tmp_path / "results/ppo/Echo/.replay-64.npz.abcd1234.tmp"
    leftover.touch()
    assert learn("--env", fake(), "--force") == 0
    assert [path.name for path in (tmp_path / "results").rglob(".*")] == []


@pytest.mark.parametrize("left", [[], [".configuration.yaml.abcd1234.tmp"]])
def test_resume_starts_a_run_at_step_0_if_the_run_was_killed_before_it_completed_a_file(
    left: list[str], learn, fake, tmp_path
):
    folder = tmp_path / "results/ppo"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).touch()
    assert learn("--env", fake(), "--resume") == 0
    assert [path.name for path in folder.rglob(".*")] == []
    assert (folder / "Echo.onnx").is_file()


def test_inference_may_read_a_run_while_another_writes_to_it(learn, fake, tmp_path, monkeypatch):
    assert learn("--env", fake()) == 0
    monkeypatch.setattr(StopRequest, "__call__", lambda _: True)
    before = sorted((tmp_path / "results").rglob("*"))
    with written_by_another(tmp_path / "results/ppo"):
        assert learn("--env", fake(), "--resume", "--inference") == 0
    assert sorted((tmp_path / "results").rglob("*")) == before


def test_option_no_graphics_starts_the_environment_without_graphics(learn, fake, tmp_path):
    assert learn("--env", fake("--record", str(tmp_path)), "--no-graphics") == 0
    (arguments,) = (path.read_text().split("\n") for path in tmp_path.glob("*.args"))
    assert {"-nographics", "-batchmode"} <= {*arguments}


def test_learn_without_env_trains_in_the_editor(
    learn, editor_port, editor, caplog, capsys, tmp_path
):
    with caplog.at_level(logging.INFO):
        assert learn("--base-port", "1") == 0
    assert (
        f"Listening on port {editor_port}. Start training by pressing the Play button in the "
        "Unity Editor."
    ) in caplog.text
    assert "Connected to Unity environment with package version 3.0.0" in caplog.text
    assert "Connected new brain: Echo?team=0" in caplog.text
    assert "--base-port is ignored" in caplog.text
    assert "Echo: 1" in capsys.readouterr().out  # steps
    assert (tmp_path / "results/ppo/Echo.onnx").is_file()
    assert editor.wait(60) == 0  # the player was asked to end


def test_occupied_editor_port_is_reported_in_one_line(learn, editor_port, capsys, tmp_path):
    with socket.create_server(("127.0.0.1", editor_port)):
        assert learn() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"(port {editor_port}) is still in use" in error
    assert "end the process that listens there" in error
    assert "--base-port" not in error
    assert not (tmp_path / "results").exists()


def test_option_debug_shows_output_and_command_of_the_player(learn, fake, capfd, caplog, tmp_path):
    assert learn("--env", fake()) == 0
    assert "fake environment starts" not in capfd.readouterr().err
    with caplog.at_level(logging.DEBUG):
        assert learn("--env", fake(), "--debug", "--run-id", "again") == 0
    assert "fake environment starts" in capfd.readouterr().err
    assert "--mlagents-port" in caplog.text
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("debug: true\n")
    assert learn("--env", fake(), "--run-id", "by the file") == 0
    assert "fake environment starts" in capfd.readouterr().err


def test_initial_weights_of_another_run_are_used_and_recorded(learn, fake, caplog, tmp_path):
    env = fake()
    assert learn("--env", env, "--run-id", "old") == 0
    with caplog.at_level(logging.INFO):
        assert learn("--env", env, "--run-id", "new", "--initialize-from", "old") == 0
    assert "Echo begins with the weights of results/old/Echo/checkpoint.pt" in caplog.text
    written = yaml.safe_load((tmp_path / "results/new/configuration.yaml").read_text())
    assert written["checkpoint_settings"]["initialize_from"] == "old"
    assert written["behaviors"]["Echo"]["init_path"] is None


def test_forced_run_may_start_from_the_weights_that_it_replaces(learn, fake, caplog, tmp_path):
    assert learn("--env", fake()) == 0
    with caplog.at_level(logging.INFO):
        assert learn("--env", fake(), "--force", "--initialize-from", "ppo") == 0
    assert "Echo begins with the weights of results/ppo.1/Echo/checkpoint.pt" in caplog.text
    weights = digest_of(tmp_path / "results/ppo.1/Echo/checkpoint.pt")
    model = onnx.load(tmp_path / "results/ppo/Echo.onnx")
    (text,) = [entry.value for entry in model.metadata_props if entry.key == provenance.KEY]
    record = json.loads(text)["stages"][-1]
    assert record["inputs"]["first weights of Echo"]["sha256"] == weights


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ([], "no episode has ended"),
        ([2.0], "mean reward 2.000 over the only episode"),
        ([1.0, 2.0, 4.5], "mean reward 2.500 over the last 3 episodes"),
    ],
)
def test_final_summary_states_how_many_episodes_the_mean_reward_covers(
    learn, fake, capsys, monkeypatch, returns, said
):
    of_learners = loop.result_of

    def with_returns(learners, *arguments, **options):
        for learner in learners.values():
            learner.statistics.recent = deque(returns)
        return of_learners(learners, *arguments, **options)

    monkeypatch.setattr("pipeline.trainer.loop.result_of", with_returns)
    assert learn("--env", fake()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  Echo: 12")
    assert lines[1].endswith(said)


def test_timers_file_has_the_measured_seconds_and_is_written_for_failed_runs(learn, fake, tmp_path):
    logs = tmp_path / "results/ppo/run_logs"
    assert learn("--env", fake()) == 0
    tree = json.loads((logs / "timers.json").read_text())
    seconds = json.loads((logs / "seconds.json").read_text())
    learning = tree["children"]["TrainerController.start_learning"]
    assert learning["total"] == seconds["total"]
    assert learning["children"]["_update_policy"]["total"] == seconds["update"]
    assert learning["children"]["_update_policy"]["count"] > 1
    assert tree["total"] >= learning["total"]
    assert tree["gauges"]["Echo.Environment.CumulativeReward.mean"]["count"] == 2
    assert tree["metadata"]["timer_format_version"] == "0.1.0"
    assert all(isinstance(value, str) for value in tree["metadata"].values())
    assert learn("--env", fake("--mode", "die"), "--force") == 2
    tree = json.loads((logs / "timers.json").read_text())
    assert tree["children"]["TrainerController.start_learning"]["total"] > 0


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_error_for_a_file_in_place_of_a_folder_names_the_option_results_dir(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    raises = pytest.raises(SettingsError, match=r"results_dir: .*/file is a file.*--results-dir")
    with raises, run_folder(tmp_path / name, resume=False, force=True):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_folder_that_contains_only_folders_of_runs_is_not_taken_for_a_run(tmp_path):
    for inner in ("b", "c/d"):
        (tmp_path / "a" / inner).mkdir(parents=True)
        (tmp_path / "a" / inner / "configuration.yaml").write_text("debug: false")
    (tmp_path / "a/.b.lock").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match="was not found"):
        run_folder(tmp_path / "a", resume=True, force=False).__enter__()
    for force in (False, True):  # the run fails before its start, and the other runs stay
        with run_folder(tmp_path / "a", resume=False, force=force) as run:
            (run.path / "run_logs").mkdir()
            (run.path / "half").touch()
        assert sorted(tmp_path.rglob("*")) == before
    with run_folder(tmp_path / "a", resume=False, force=False) as run:
        run.start()
        (run.path / "Walker").mkdir()
        (run.path / "Walker/checkpoint.pt").touch()
    with pytest.raises(SettingsError, match="was found"):
        run_folder(tmp_path / "a", resume=False, force=False).__enter__()
