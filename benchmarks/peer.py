"""Run ours and `mlagents-learn` on one executable and read what they print.

The peer lives in an environment of its own, made by `make peer` in `.venv-mlagents`; the variable
MLAGENTS_LEARN names another place.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pipeline.envs.launch import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
_SUMMARY = re.compile(
    r"\. Step: (?P<step>\d+)\. Time Elapsed: (?P<time>[\d.]+) s\."
    r"(?: Mean Reward: (?P<reward>-?[\d.]+)\.)?"
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one training run printed."""

    steps: list[int]
    seconds: list[float]
    rewards: list[float | None]
    wall_s: float

    def rate(self, first: int = 0) -> float:
        """Agent steps per second between a summary, by its number from 0, and the last."""
        return (self.steps[-1] - self.steps[first]) / (self.seconds[-1] - self.seconds[first])


def peer_command() -> str:
    """Path of `mlagents-learn`; ends the program with the remedy where there is none."""
    path = Path(os.environ.get("MLAGENTS_LEARN", ROOT / ".venv-mlagents/bin/mlagents-learn"))
    if not path.exists():
        sys.stderr.write(
            f"{path} does not exist: run `make peer`, or set MLAGENTS_LEARN to the program\n"
        )
        sys.exit(2)
    return str(path)


def executable(name: str) -> Path:
    """A packed built-in simulator."""
    from pipeline.simulators.pack import pack

    target = Path(tempfile.gettempdir()) / "rl-pipeline-benchmarks" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    return pack(name, target)


def configuration(source: Path, folder: Path, **changes: int) -> Path:
    """A copy of a trainer configuration whose behaviors have `changes`."""
    content = yaml.safe_load(source.read_text())
    for behavior in content["behaviors"].values():
        behavior.update(changes)
    path = folder / "trainer.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def train(
    program: str,
    config: Path,
    env: Path,
    *,
    seed: int,
    folder: Path,
    sources: Path = ROOT / "src",
    site: Path | None = None,
    options: Sequence[str] = (),
) -> Curve:
    """Train with `ours` or `peer`, and give the curve; the run lies in `folder`/`program`-`seed`.

    Args:
        program: which of the two.
        config: the trainer configuration.
        env: the environment's executable.
        seed: of the run.
        folder: where runs lie; a run of the same program and seed is replaced.
        sources: of `ours`.
        site: a folder of packages that both find.
        options: more of `ours` only.

    Raises:
        RuntimeError: The program failed; the message holds the end of its output.
    """
    run = f"{program}-{seed}"
    common = [str(config), "--env", str(env), "--run-id", run, "--seed", str(seed), "--force"]
    common += ["--results-dir", str(folder), "--no-graphics", "--torch-device", "cpu"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PIPELINE_PYTHON": sys.executable}
    if program == "ours":
        command = [sys.executable, "-m", "pipeline.cli.main", "learn", *common, *options]
        folders = [sources, site]
    else:
        command = [peer_command(), *common, "--base-port", str(free_port())]
        command += ["--timeout-wait", "120"]
        folders = [site]
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in folders if path is not None)
    began = time.perf_counter()
    log = folder / f"{run}.log"
    with log.open("w") as stream:
        completed = subprocess.run(  # noqa: S603  # the two programs that are compared
            command,
            env=environment,
            stdout=stream,
            stderr=stream,
            check=False,
            preexec_fn=die_with_parent(os.getpid()),  # calls only prctl
        )
    wall = time.perf_counter() - began
    output = log.read_text()
    if completed.returncode:
        raise RuntimeError(f"{run} failed:\n" + "\n".join(output.splitlines()[-20:]))
    summaries = [match.groupdict() for match in _SUMMARY.finditer(output)]
    return Curve(
        steps=[int(summary["step"]) for summary in summaries],
        seconds=[float(summary["time"]) for summary in summaries],
        rewards=[
            None if summary["reward"] is None else float(summary["reward"]) for summary in summaries
        ],
        wall_s=wall,
    )


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
