"""`pipeline learn` as a process whose output is read, and which is stopped or killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from pipeline.trainer.checkpoints.file import load_checkpoint

PPO = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
    "network_settings": {"hidden_units": 16, "num_layers": 1, "normalize": True},
    "max_steps": 4000,
    "time_horizon": 32,
    "summary_freq": 1000,
}
WAIT_S = 200


class Learning:
    """A command that learns in `folder`, with its output so far."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        self.told = ""
        self.process = subprocess.Popen(  # noqa: S603  # the tests' own commands
            [sys.executable, "-m", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
        )

    def until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told += line
            if re.search(pattern, line):
                return
        pytest.fail(f"never said {pattern}: {self.told}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.told += self.process.stdout.read()
        code = self.process.wait(timeout=WAIT_S)
        self.process.stdout.close()
        return code

    def error(self) -> str:
        """Return the only line with an error."""
        assert "Traceback" not in self.told
        (line,) = [line for line in self.told.splitlines() if line.startswith("error")]
        return line

    @property
    def follower(self) -> psutil.Process:
        """The process of rank 1."""
        children = psutil.Process(self.process.pid).children()
        (worker,) = (worker for worker in children if "pipeline.trainer.worker" in worker.cmdline())
        return worker

    def processes(self) -> list[psutil.Process]:
        """Return the command's process and all processes below it."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


def write(folder: Path, settings: dict) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"behaviors": {"3DBall": settings}}))


def checkpoint(folder: Path, run: str) -> dict:
    return load_checkpoint(folder / "results" / run / "3DBall" / "checkpoint.pt")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=WAIT_S)[1]
