"""The life of a run as a user has it: learn, Ctrl+C, --resume, --initialize-from, --inference."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from pipeline.simulators.pack import pack
from pipeline.trainer.checkpoints import load_checkpoint

CONFIG = {
    "behaviors": {
        "3DBall": {
            "trainer_type": "ppo",
            "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
            "network_settings": {"hidden_units": 16, "num_layers": 1, "normalize": True},
            "max_steps": 8000,
            "time_horizon": 32,
            "summary_freq": 1000,
            "checkpoint_interval": 2000,
        }
    }
}
WAIT_S = 120


@pytest.fixture
def learn(tmp_path):
    """Runs the command in `tmp_path`; with `until`, Ctrl+C as soon as a line matches."""
    build = pack("balance_ball", tmp_path / "balance_ball")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    options = ["learn", "config.yaml", "--env", str(build), "--seed", "3"]

    def run(*more: str, until: str | None = None) -> tuple[int, str]:
        process = subprocess.Popen(  # noqa: S603  # our own command
            [sys.executable, "-m", "pipeline.cli", *options, *more],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
        )
        told = []
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                told.append(line)
                if until is not None and re.search(until, line):
                    process.send_signal(signal.SIGINT)
                    until = None
        return process.wait(timeout=WAIT_S), "".join(told)

    return run


def step_of(folder) -> int:
    return int(load_checkpoint(folder / "3DBall" / "checkpoint.pt")["learner"]["step"])


@pytest.mark.slow
def test_learn_interrupt_resume_initialize_and_inference(learn, tmp_path):
    code, told = learn("--run-id", "a", until=r"3DBall\. Step: 2000\.")
    a = tmp_path / "results" / "a"
    assert code == 130, told
    assert "give the same command with --resume" in told
    stopped = step_of(a)
    assert 2000 <= stopped < 8000
    assert (a / "3DBall.onnx").is_file()
    assert (a / "configuration.yaml").is_file()
    assert json.loads((a / "run_logs" / "timers.json").read_text())["name"] == "root"

    code, told = learn("--run-id", "a")
    assert code == 2
    assert "Previous data from this run ID was found" in told
    code, told = learn("--run-id", "a", "--resume")
    assert code == 0, told
    assert f"Resuming training of 3DBall from step {stopped}." in told
    assert step_of(a) >= 8000
    status = json.loads((a / "run_logs" / "training_status.json").read_text())
    steps = [one["steps"] for one in status["3DBall"]["checkpoints"]]
    assert steps == sorted(steps)
    assert stopped in steps
    assert steps[-1] == status["3DBall"]["final_checkpoint"]["steps"] == step_of(a)
    for one in status["3DBall"]["checkpoints"]:
        for path in (one["file_path"], *one["auxillary_file_paths"]):
            assert (tmp_path / path).is_file()

    code, told = learn("--run-id", "b", "--initialize-from", "a", until=r"3DBall\. Step: 1000\.")
    assert code == 130, told
    assert "3DBall begins with the weights of results/a/3DBall/checkpoint.pt" in told
    assert "were not loaded" not in told
    assert step_of(tmp_path / "results" / "b") < 8000

    before = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    more = ["--run-id", "a", "--resume", "--inference"]
    code, told = learn(*more, until=r"3DBall\. Step: 12000\. .*Not Training")
    assert code == 0, told
    assert "Played with seed 3" in told
    after = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    changed = [p.name for p in after if after[p] != before.get(p) and p.suffix != ".log"]
    assert changed == []

    code, told = learn("--run-id", "a", "--force", until=r"3DBall\. Step: 1000\.")
    assert code == 130, told
    assert "results/a.1" in told
    assert step_of(tmp_path / "results" / "a.1") >= 8000
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []
