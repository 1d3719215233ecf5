"""Commands in separate processes, with checks of the processes and files that they leave."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fake_player
import psutil
from forked import forking
from only_our_parts import search_path

ROOT = Path(__file__).resolve().parents[2]
_MARK = "PIPELINE_BAD_INPUT_TEST"
_GONE_S = 300.0
_LIBRARIES = ("torch", "onnx", "grpc", "PIL.Image", "tensorboard.compat.proto.event_pb2")

CONFIG = fake_player.CONFIG.replace("max_steps: 120", "max_steps: 240")
CONFIG += "    checkpoint_interval: 60\n    keep_checkpoints: 0\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only error line; fails unless there is exactly one, as the last line."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1, self.err
        assert lines[-1] == errors[0], self.err
        prefixes = ("[INFO] ", "[WARNING] ", "\t")  # after a tab: a dump of settings goes on
        assert all(line.startswith(prefixes) for line in lines[:-1]), self.err
        assert self.code == 2
        return errors[0].removeprefix("error: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder to run commands in, with a trainer configuration."""

    folder: Path

    def config(self, text: str = CONFIG, name: str = "config.yaml") -> Path:
        """Write a trainer configuration."""
        path = self.folder / name
        path.write_text(text)
        return path

    def program(self, body: str, name: str = "program") -> Path:
        """Write an executable shell script."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def fake(self, *arguments: str) -> Path:
        """Write an executable environment: behavior Echo, observation (4,), two actions."""
        return fake_player.fake_player(self.folder, "--quiet", *arguments)

    def learn(self, env: Path | str, *arguments: str, config: Path | None = None) -> Done:
        """Run `pipeline learn` with the run id `run`."""
        chosen = config or self.config()
        return self.pipeline(
            "learn", str(chosen), "--env", str(env), "--run-id", "run", "--seed", "1", *arguments
        )

    def pipeline(self, *arguments: str) -> Done:
        """Run a `pipeline` command; fails if it leaves a process."""
        return self.python("-m", "pipeline.cli.main", *arguments)

    def python(self, *arguments: str, **variables: str) -> Done:
        """Run this interpreter with the project's sources."""
        env = os.environ | self._variables() | variables
        completed = forking(*_LIBRARIES).run(*arguments, timeout=240, cwd=self.folder, env=env)
        assert left_over(str(self.folder)) == []
        return Done(code=completed.returncode, out=completed.stdout, err=completed.stderr)

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start a `pipeline` command for the block; fails if it leaves a process."""
        with subprocess.Popen(  # noqa: S603  # this interpreter
            [sys.executable, "-m", "pipeline.cli.main", *arguments],
            cwd=self.folder,
            env=os.environ | self._variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
        assert left_over(str(self.folder)) == []

    def _variables(self) -> dict[str, str]:
        variables = {"PYTHONPATH": search_path(ROOT / "src"), "PIPELINE_MLFLOW": "off"}
        return variables | {_MARK: str(self.folder)}

    def files(self) -> dict[str, bytes | None]:
        """Return the content of each file below the folder; None for a subfolder."""
        paths = sorted(self.folder.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def left_over(mark: str) -> list[str]:
    """Return command lines of processes that commands of the place `mark` have left running.

    On a busy machine a killed process stays a little longer.
    """
    end = time.monotonic() + _GONE_S
    while (commands := _living(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return commands


def _living(mark: str) -> list[str]:
    commands = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return commands
