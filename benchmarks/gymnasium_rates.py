"""Agent steps per second on Gymnasium's environments: `pipeline learn` beside Stable-Baselines3.

    python benchmarks/gymnasium_rates.py [--task cartpole hopper halfcheetah] [--rounds 3]
        [--steps N] [--programs default compiled plain sb3 chosen sb3-all] [--ours SOURCES]

Commands run in turn, with one thread each: ours with the settings of config/ as they are (default),
with `compile: true` and `compile: false`, and Stable-Baselines3 with the same numbers (its
observations are not normalised). `chosen` is ours with the number of threads that it measures, and
is compared with `sb3-all`, which has a thread for each processor. Hopper has 8 copies, minibatches
of 64 and rollouts of 2,048 rows. A run is stopped after `--steps` steps. Its rate is taken after
the first updates and their compilation, by the wall clock and, for a machine that does other work,
by the processor time of the command and its processes. Seconds to the first step are given apart.
Ratios are taken within each round.

Stable-Baselines3 lives in an environment of its own; SB3_PYTHON names its interpreter:
`python -m venv .venv-sb3 && .venv-sb3/bin/pip install stable-baselines3 "gymnasium[mujoco]"`.
`--ours` measures another checkout's src in place of this one's.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from peer import ROOT
from tables import table

from pipeline.envs.launch import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence


class Task(NamedTuple):
    """One row of the table."""

    env: str
    config: str
    n_envs: int
    steps: int
    every: int
    since: int
    """Steps after which the rate is taken: by then the networks are updated and compiled."""
    ours: dict[str, Any]
    theirs: str


TASKS = {
    "cartpole": Task(
        *("CartPole-v1", "ppo/CartPole.yaml", 16, 40_000, 4096, 8192, {}),
        "PPO('MlpPolicy', env, n_steps=64, batch_size=128, n_epochs=10, learning_rate=1e-3,",
    ),
    "hopper": Task(
        *(
            "Hopper-v5",
            "ppo/Hopper.yaml",
            8,
            25_000,
            4096,
            8192,
            {"batch_size": 64, "buffer_size": 2048},
        ),
        "PPO('MlpPolicy', env, n_steps=256, batch_size=64, n_epochs=10,",
    ),
    "halfcheetah": Task(
        *(
            "HalfCheetah-v5",
            "sac/HalfCheetah.yaml",
            1,
            4_000,
            500,
            1500,
            {"buffer_init_steps": 1000},
        ),
        "SAC('MlpPolicy', env, batch_size=256, learning_starts=1000,",
    ),
}
_REPORT = re.compile(r"Step: (\d+)\.")
_PEER = """
import sys, torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

class Report(BaseCallback):
    last = 0
    def _on_training_start(self):
        print("Version information", flush=True)
    def _on_step(self):
        if self.num_timesteps - self.last >= {every}:
            self.last = self.num_timesteps
            print(f"Step: {{self.last}}.", flush=True)
        return True

if {threads}:
    torch.set_num_threads({threads})
env = make_vec_env("{env}", n_envs={n_envs})
model = {model} seed={seed}, device="cpu")
model.learn({steps}, callback=Report())
"""


class Run(NamedTuple):
    """What was measured of one command."""

    first_s: float
    rate: float
    rate_of_processor: float


def command_of(task: Task, program: str, seed: int, steps: int, folder: Path) -> list[str]:
    """Return the command of one program, with its files in `folder`."""
    if program.startswith("sb3"):
        python = Path(os.environ.get("SB3_PYTHON", ROOT / ".venv-sb3/bin/python"))
        if not python.exists():
            sys.exit(f"{python} does not exist: set SB3_PYTHON to Stable-Baselines3's interpreter")
        code = _PEER.format(
            **task._asdict() | {"steps": 2 * steps, "model": task.theirs, "seed": seed},
            threads=int(program == "sb3"),
        )
        return [str(python), "-c", code]
    content = yaml.safe_load((ROOT / "config" / task.config).read_text())
    (behavior,) = content["behaviors"].values()
    behavior["hyperparameters"] |= task.ours
    behavior["summary_freq"] = task.every
    if program in ("compiled", "plain"):
        content["torch_settings"] = {"compile": program == "compiled"}
    config = folder / "trainer.yaml"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    command = [sys.executable, "-m", "pipeline.cli.main", "learn", str(config), "--force"]
    command += ["--env", f"gymnasium:{task.env}", "--results-dir", str(folder)]
    command += [] if program == "chosen" else ["--threads", "1"]
    return [*command, "--seed", str(seed), "--env-args", "--num-agents", str(task.n_envs)]


def processor_s(pid: int) -> float:
    """Return the processor time of a process and of the processes that it has started."""
    total = 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # utime and stime, and the same of children that have ended (proc(5)).
        total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(processor_s, map(int, (task / "children").read_text().split())))
    except OSError:  # the process has ended meanwhile
        pass
    return total


def measured(
    command: Sequence[str], since: int, steps: int, sources: Path, *, one_thread: bool
) -> Run:
    """Run a command until it has reported `steps` steps; the rate is that from `since` steps on."""
    environment = {**os.environ, "PIPELINE_PYTHON": sys.executable}
    environment |= {"OMP_NUM_THREADS": "1"} if one_thread else {}
    environment |= {"PYTHONPATH": str(sources), "PYTHONUNBUFFERED": "1"}
    began, first_s, reports, lines = time.perf_counter(), 0.0, [], []
    with subprocess.Popen(  # noqa: S603  # the two programs that are compared
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # calls only prctl
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if "Version information" in line:
                first_s = time.perf_counter() - began
            if report := _REPORT.search(line):
                clocks = time.perf_counter(), processor_s(process.pid)
                reports.append((int(report[1]), *clocks))
                if reports[-1][0] >= steps:
                    process.send_signal(signal.SIGINT)
                    break
        if len(reports) < 3:
            process.kill()
            sys.exit(f"{' '.join(command)} gave fewer than 3 reports:\n{''.join(lines[-20:])}")
        for _ in process.stdout or ():
            pass
    begin = next(report for report in reports if report[0] >= since)
    taken, wall, processor = (b - a for a, b in zip(begin, reports[-1], strict=True))
    return Run(first_s, taken / wall, taken / processor)


def main() -> None:
    """Measure, and print a row for each task and program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    programs = ("default", "compiled", "plain", "sb3", "chosen", "sb3-all")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run (default: the task's)")
    parser.add_argument("--ours", type=Path, default=ROOT / "src", help="sources of ours")
    options = parser.parse_args()
    rows = []
    for name in options.task:
        task, runs = TASKS[name], {program: list[Run]() for program in options.programs}
        steps = options.steps or task.steps
        for number in range(options.rounds):
            order = options.programs[:: 1 if number % 2 == 0 else -1]
            for program in order:
                with tempfile.TemporaryDirectory() as folder:
                    command = command_of(task, program, 1 + number, steps, Path(folder))
                    one = program not in ("chosen", "sb3-all")
                    run = measured(
                        command, task.since, steps, options.ours.resolve(), one_thread=one
                    )
                    runs[program].append(run)
                sys.stderr.write(f"{name}, {program}: {runs[program][-1]}\n")
        for program, of_program in runs.items():
            middle = [statistics.median(values) for values in zip(*of_program, strict=True)]
            cells = [f"{middle[0]:.1f}", f"{middle[1]:,.0f}", f"{middle[2]:,.0f}"]
            rival = "sb3-all" if program in ("chosen", "sb3-all") else "sb3"
            for column in (1, 2) if rival in runs else ():
                pairs = zip(of_program, runs[rival], strict=True)
                ratios = sorted(ours[column] / theirs[column] for ours, theirs in pairs)
                spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                cells.append(f"{statistics.median(ratios):.2f}{spread}")
            rows.append([task.env, program, *cells])
    header = ["environment", "program", "first step, s", "steps/s", "steps/processor s"]
    header += ["ratio", "ratio of processor time"]
    sys.stdout.write(table(header, rows))


if __name__ == "__main__":
    main()
