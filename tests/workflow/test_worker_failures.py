"""Executables that are killed while a run trains in four of them."""

from __future__ import annotations

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
            "network_settings": {"hidden_units": 16, "num_layers": 1},
            "max_steps": 12000,
            "time_horizon": 32,
            "summary_freq": 1000,
        }
    }
}
WAIT_S = 120


@pytest.fixture
def learn(tmp_path):
    """Trains in four executables; kills one at each line that matches a pattern, in turn."""
    build = pack("balance_ball", tmp_path / "balance_ball", n_agents=3)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    command = ["learn", "config.yaml", "--env", str(build), "--num-envs", "4", "--seed", "1"]

    def run(kill_at: list[str]) -> tuple[int, str]:
        process = subprocess.Popen(  # noqa: S603  # our own command
            [sys.executable, "-m", "pipeline.cli", *command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
        )
        told, patterns = [], list(kill_at)
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                told.append(line)
                if patterns and re.search(patterns[0], line):
                    patterns.pop(0)
                    kill_newest(process.pid)
        return process.wait(timeout=WAIT_S), "".join(told)

    return run


def kill_newest(trainer: int) -> None:
    """Kill -9 the executable that was started last: after a restart, the restarted one."""
    environments = psutil.Process(trainer).children()
    assert len(environments) == 4
    max(environments, key=lambda one: (one.create_time(), one.pid)).send_signal(signal.SIGKILL)


def nothing_is_left(folder) -> bool:
    return not any(str(folder) in str(p.info["cmdline"]) for p in psutil.process_iter(["cmdline"]))


@pytest.mark.slow
def test_one_of_four_is_killed_and_the_run_goes_on(learn, tmp_path):
    code, told = learn([r"Step: 3000\."])
    assert code == 0, told
    warnings = [line for line in told.splitlines() if "Restarting worker" in line]
    assert len(warnings) == 1
    assert re.search(r"Restarting worker\[3\] after '.*(killed|signal|SIGKILL|-9)", warnings[0])
    state = load_checkpoint(tmp_path / "results/ppo/3DBall/checkpoint.pt")
    assert state["learner"]["step"] >= 12000
    assert nothing_is_left(tmp_path)


@pytest.mark.slow
def test_beyond_the_budget_the_run_stops_with_its_state_saved(learn, tmp_path):
    code, told = learn([r"Step: 3000\.", r"Step: 5000\."])
    assert code == 2, told
    (error,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert "Worker 3 exceeded the allowed number of restarts, 1 of 1 in 60 s" in error
    assert "Traceback" not in told
    run = tmp_path / "results/ppo"
    step = load_checkpoint(run / "3DBall/checkpoint.pt")["learner"]["step"]
    assert 5000 <= step < 12000
    assert (run / "3DBall.onnx").is_file()
    assert nothing_is_left(tmp_path)
