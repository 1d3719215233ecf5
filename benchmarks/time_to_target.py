"""Wall-clock seconds and agent steps until a mean return holds, ours against `mlagents-learn`.

    python benchmarks/time_to_target.py --folder FOLDER [--task balance_ball one_ball ...]
        [--ms 6 14 30] [--seeds 4 5] [--trainer xqc peer-ppo ...] [--at-once 1] [--table]

A row is a task, a time per exchange, a trainer and a seed. The environments are executables of ours
in which every exchange takes so many milliseconds more. A row has reached the target at the first
of five summaries in a row whose mean return is at least the target; summaries without an ended
episode do not count. Seconds are the wall clock's since the command was given, so loading programs
counts too. A row that has not reached the target within the task's limit counts as the limit, which
the table marks ">".

All trainers of a task report summaries equally often. Ours run `threaded`, mlagents-learn as its
files say. Rows run one after another, ours and mlagents-learn's in turn, or two at once with
--at-once 2, which is fair while environments sleep most of the time.

FOLDER keeps finished rows, so a call after an interruption goes on with the rest. After Ctrl-C or
SIGTERM the trainers write checkpoints, and the next call resumes their rows: the seconds before the
interruption count, and the second start does as well.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from peer import ROOT, free_port, peer_command
from tables import table

import profiles
from pipeline.envs.launch import die_with_parent
from pipeline.files import write_whole

N_HELD = 5
"""Summaries in a row that must reach the target."""
POLL_S = 0.1
PEER = "peer-"
_SUMMARY = re.compile(
    r"\. Step: (?P<step>\d+)\. Time Elapsed: [\d.]+ s\. Mean Reward: (?P<reward>-?[\d.]+)\."
    r"(?: Mean Group Reward: (?P<group>-?[\d.]+)\.)?"
)
Summary = tuple[int, float, float]
"""Agent steps, seconds since the command, mean return."""
Result = dict[str, Any]
"""A finished row, as its file has it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learned."""

    simulator: str
    target: float
    """Mean return; of groups where agents have groups."""
    summary_freq: int
    limit_s: float
    files: dict[str, str]
    """Settings of each trainer, below `config/`."""
    alone: tuple[str, ...] = ("xqc",)
    """Trainers that the peer does not have."""
    agents: int | None = None
    """Instead of the simulator's own number."""
    first_step: int = 0
    """Agent steps of an easier lesson, whose summaries do not count."""
    steps_per_update: dict[float, float] = field(default_factory=dict)
    """Of xqc, for each time per exchange: as many updates as the wait hides on one core."""

    @property
    def trainers(self) -> list[str]:
        """Names of ours and, after `peer-`, of the peer's, in turn as far as they go."""
        peers = [PEER + name for name in self.files if name not in self.alone]
        ours = list(self.files)
        n = len(ours)
        return [name for k in range(n) for names in (ours, peers) for name in names[k : k + 1]]


_BALL = {"ppo": "ppo/3DBall.yaml", "sac": "sac/3DBall.yaml"}
TASKS = {
    "balance_ball": Task(
        simulator="balance_ball",
        target=90.0,
        summary_freq=1200,
        limit_s=900.0,
        files={"xqc": "xqc/3DBall_agents.yaml"} | _BALL,
        steps_per_update={6.0: 12, 14.0: 4, 30.0: 2},
    ),
    "one_ball": Task(
        simulator="balance_ball",
        agents=1,
        target=90.0,
        summary_freq=500,
        limit_s=600.0,
        files={"xqc": "xqc/3DBall.yaml"} | _BALL,
    ),
    "collector": Task(
        simulator="collector",
        target=10.0,
        summary_freq=4800,
        limit_s=900.0,
        files={"ppo": "ppo/FoodCollector.yaml", "sac": "sac/FoodCollector.yaml"},
    ),
    "push_together": Task(
        simulator="push_together",
        target=1.9,
        summary_freq=5000,
        limit_s=900.0,
        files={"poca": "poca/PushTogether.yaml"},
        first_step=64_000,
    ),
    "hallway": Task(
        simulator="hallway",
        target=0.7,
        summary_freq=10_000,
        limit_s=3600.0,
        files={"ppo": "ppo/Hallway.yaml"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training run on the way to its target."""

    task_name: str
    ms: float
    trainer: str
    seed: int
    folder: Path
    """Of all rows."""

    @property
    def task(self) -> Task:
        """What is to be learned."""
        return TASKS[self.task_name]

    @property
    def is_peer(self) -> bool:
        """Whether mlagents-learn trains."""
        return self.trainer.startswith(PEER)

    @property
    def name(self) -> str:
        """Of the row's files and of its run."""
        return f"{self.task_name}-{self.ms:g}-{self.trainer}-{self.seed}"

    def file(self, kind: str = "json") -> Path:
        """Return the path of the finished row, or of another of the row's files."""
        return self.folder / f"{self.name}.{kind}"

    def settings(self) -> dict[str, Any]:
        """Return the trainer's configuration."""
        path = ROOT / "config" / self.task.files[self.trainer.removeprefix(PEER)]
        content: dict[str, Any] = yaml.safe_load(path.read_text())
        for behavior in content["behaviors"].values():
            behavior |= {"summary_freq": self.task.summary_freq, "threaded": not self.is_peer}
            h = behavior["hyperparameters"]
            if behavior["trainer_type"] in ("sac", "xqc"):
                h["save_replay_buffer"] = True  # for a second start
                if h["learning_rate_schedule"] == "constant":
                    behavior["max_steps"] = 10_000_000  # nothing depends on it
            if behavior["trainer_type"] == "xqc" and self.ms in self.task.steps_per_update:
                h["steps_per_update"] = self.task.steps_per_update[self.ms]
        return content

    def digest(self) -> str:
        """Return the digest of what decides the row's outcome."""
        task = self.task
        described = [self.settings(), task.simulator, task.agents, task.target, task.limit_s]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def kept(self, kind: str = "json") -> Result | None:
        """Return what is kept of the row; None if it is missing or its settings have changed."""
        if not self.file(kind).exists():
            return None
        content: Result = json.loads(self.file(kind).read_text())
        return content if content["settings"] == self.digest() else None


def reached(summaries: list[Summary], target: float, first_step: int = 0) -> Summary | None:
    """Return the first of `N_HELD` summaries in a row whose mean return is at least `target`."""
    counted = [summary for summary in summaries if summary[0] > first_step]
    for k in range(len(counted) - N_HELD + 1):
        if all(mean >= target for _, _, mean in counted[k : k + N_HELD]):
            return counted[k]
    return None


def joined(earlier: list[Summary], later: list[Summary]) -> list[Summary]:
    """Return the summaries of an interrupted run, without the time between its starts.

    Args:
        earlier: before the interruption; steps that the resumed run repeats are left out.
        later: since the second start, with seconds since that start.
    """
    kept = [summary for summary in earlier if not later or summary[0] < later[0][0]]
    spent = kept[-1][1] if kept else 0.0
    return kept + [(step, spent + seconds, mean) for step, seconds, mean in later]


class Running:
    """A row while its trainer runs: started, or resumed after an interruption."""

    def __init__(self, row: Row) -> None:
        self.row = row
        run, config = row.folder / "runs" / row.name, row.file("yaml")
        partial = row.kept("partial.json")
        # The peer writes checkpoints when it is interrupted; a killed run of it starts again.
        can_resume = partial is not None and any(run.rglob("*.pt"))
        before = partial if partial is not None and can_resume else {"summaries": [], "starts": 0}
        self._before: list[Summary] = [tuple(summary) for summary in before["summaries"]]
        self._n_starts = before["starts"] + 1
        config.write_text(yaml.safe_dump(row.settings(), sort_keys=False))
        place = row.folder / "envs" / row.name
        place.mkdir(parents=True, exist_ok=True)
        environment = argparse.Namespace(sigma=0.0, agents=row.task.agents)
        env = profiles.executable(place, row.task.simulator, row.ms, environment)
        command = [str(config), "--env", str(env), "--run-id", row.name, "--seed", str(row.seed)]
        command += ["--results-dir", str(run.parent), "--no-graphics", "--torch-device", "cpu"]
        command += ["--resume" if can_resume else "--force"]
        if row.is_peer:
            command = [peer_command(), *command, "--base-port", str(free_port())]
            command += ["--timeout-wait", "120"]
        else:
            command = [sys.executable, "-m", "pipeline.cli", "learn", *command]
        self._began = time.monotonic()
        with row.file("log").open("w") as stream:
            self._process = subprocess.Popen(  # noqa: S603  # the two programs that are compared
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=stream,
                stderr=stream,
                process_group=0,  # Ctrl-C is passed on by `interrupt`
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # calls only prctl
            )
        self._stream = row.file("log").open()
        self._since: list[Summary] = []
        self._line = ""

    def poll(self) -> bool:
        """Read what the trainer has printed; return whether the row is over, and keep it if so.

        Raises:
            RuntimeError: The trainer failed; the message has the end of its output.
        """
        row, task, code = self.row, self.row.task, self._process.poll()
        seconds = time.monotonic() - self._began
        *lines, self._line = (self._line + self._stream.read()).split("\n")
        for match in filter(None, map(_SUMMARY.search, lines)):
            mean = float(match["group"] or match["reward"])
            self._since.append((int(match["step"]), seconds, mean))
        if code:
            output = row.file("log").read_text().splitlines()[-20:]
            raise RuntimeError(f"{row.name} failed:\n" + "\n".join(output))
        summaries = joined(self._before, self._since)
        first = reached(summaries, task.target, task.first_step)
        earlier = self._before[-1][1] if self._before else 0.0
        if first is None and code is None and earlier + seconds < task.limit_s:
            return False
        step, when, _ = first or (summaries[-1][0] if summaries else 0, task.limit_s, 0.0)
        result = {"task": row.task_name, "ms": row.ms, "trainer": row.trainer, "seed": row.seed}
        result |= {"reached": first is not None, "seconds": round(when, 1), "steps": step}
        result |= {"starts": self._n_starts, "load": round(os.getloadavg()[1], 1)}
        result |= {"settings": row.digest(), "summaries": summaries}
        write_whole(row.file(), json.dumps(result) + "\n")
        row.file("partial.json").unlink(missing_ok=True)
        self._end()
        mark = "" if first else "not reached, "
        print(f"{row.name}: {mark}{when:.0f} s, {step:,} steps", flush=True)  # noqa: T201
        return True

    def interrupt(self) -> None:
        """End the trainer so that the next call resumes it."""
        content: Result = {"settings": self.row.digest(), "starts": self._n_starts}
        content["summaries"] = joined(self._before, self._since)
        write_whole(self.row.file("partial.json"), json.dumps(content))
        self._end()

    def _end(self) -> None:
        """Interrupt the trainer, which writes a checkpoint."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._stream.close()


def run_all(waiting: list[Row], n_at_once: int) -> None:
    """Run the rows, so many at once; what is under way when a signal comes is kept."""
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < n_at_once:
                running.append(Running(waiting.pop(0)))
            running = [one for one in running if not one.poll()]
            time.sleep(POLL_S)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not cut this short
            signal.signal(number, signal.SIG_IGN)
        for one in running:
            one.interrupt()


def lines_of(results: list[Result]) -> list[list[str]]:
    """Return the cells of the table: medians over seeds, of each task, time and trainer."""
    groups: dict[tuple[str, float], dict[str, list[Result]]] = {}
    for result in results:
        trainers = groups.setdefault((result["task"], result["ms"]), {})
        trainers.setdefault(result["trainer"], []).append(result)
    lines = []
    for (task, ms), trainers in groups.items():
        peers = [median(rows) for name, rows in trainers.items() if name.startswith(PEER)]
        for name, rows in trainers.items():
            seconds, is_limit = median(rows)
            steps = f"{statistics.median(result['steps'] for result in rows):,.0f}"
            ratio, mark = "", "> " if is_limit else ""
            if peers and not name.startswith(PEER) and not (is_limit and min(peers)[1]):
                bound = "< " if is_limit else "> " if min(peers)[1] else ""
                ratio = f"{bound}{min(peers)[0] / seconds:.1f}"
            title = name.removeprefix(PEER).upper()
            title = f"mlagents-learn, {title}" if name.startswith(PEER) else title
            cells = [task, f"{ms:g}", title, str(len(rows)), f"{mark}{seconds:,.0f}"]
            lines.append([*cells, f"{mark}{steps}", ratio])
    return lines


def median(results: list[Result]) -> tuple[float, bool]:
    """Return the median of seconds, and whether a limit takes part in it."""
    ordered = sorted(results, key=lambda result: (result["seconds"], not result["reached"]))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    seconds = statistics.median(result["seconds"] for result in middle)
    return seconds, not all(result["reached"] for result in middle)


def main() -> int:
    """Run what is missing, and print the table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    names = sorted({name for task in TASKS.values() for name in task.trainers})
    parser.add_argument("--folder", type=Path, required=True, help="kept between calls")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ms", nargs="+", type=float, default=[6.0, 14.0, 30.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[4, 5])
    parser.add_argument("--trainer", nargs="+", choices=names, default=names)
    parser.add_argument("--at-once", type=int, default=1, help="rows (default: 1)")
    parser.add_argument("--table", action="store_true", help="of finished rows; run nothing")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        Row(task_name=task, ms=ms, trainer=trainer, seed=seed, folder=folder)
        for task in options.task
        for ms in options.ms
        for seed in options.seeds
        for trainer in TASKS[task].trainers
        if trainer in options.trainer
    ]
    if not options.table:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            run_all([row for row in rows if row.kept() is None], options.at_once)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on", file=sys.stderr)  # noqa: T201
            return 130
    header = ["task", "ms", "trainer", "seeds", "seconds", "agent steps", "times as fast"]
    print(table(header, lines_of([kept for row in rows if (kept := row.kept())])), end="")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
