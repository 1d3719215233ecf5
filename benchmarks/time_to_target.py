"""Wall-clock seconds and agent steps until a mean return holds, ours against `mlagents-learn`.

    python benchmarks/time_to_target.py --folder FOLDER [--task balance_ball one_ball ...]
        [--ms 6 14 30] [--seeds 4 5] [--trainer xqc peer-ppo ...] [--at-once 1] [--table]

A row is a task, a time per exchange, a trainer and a seed, on an executable of ours in which every
exchange takes so many milliseconds more. It has reached the target at the first of five summaries
in a row whose mean return is at least the target; summaries without an ended episode do not count.
Seconds are the wall clock's since the command was given. A row that has not reached the target
within the task's limit counts as the limit, marked ">". All trainers of a task report summaries
equally often. Ours run `threaded`, mlagents-learn as its files say, one row after another in turn;
--at-once 2 is fair only while environments sleep most of the time.

FOLDER keeps finished rows, so a call after an interruption goes on with the rest. After Ctrl-C or
SIGTERM the trainers write checkpoints, and the next call resumes their rows; both starts count.
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
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from peer import ROOT, free_port, peer_command
from tables import table

import profiles
from pipeline.envs.launch import die_with_parent
from pipeline.files import write_whole

N_HELD = 5  # summaries in a row that must reach the target
PEER = "peer-"
_SUMMARY = re.compile(
    r"\. Step: (?P<step>\d+)\. Time Elapsed: [\d.]+ s\. Mean Reward: (?P<reward>-?[\d.]+)\."
    r"(?: Mean Group Reward: (?P<group>-?[\d.]+)\.)?"
)
_HEADER = ["task", "ms", "trainer", "seeds", "seconds", "agent steps", "times as fast"]
Summary = tuple[int, float, float]  # agent steps, seconds since the command, mean return
Result = dict[str, Any]  # a finished row, as its file has it


@dataclass(frozen=True)
class Task:
    """What is to be learned, with settings of each trainer below `config/`."""

    simulator: str
    target: float  # mean return; of groups where agents have groups
    summary_freq: int
    limit_s: float
    files: dict[str, str]
    agents: int | None = None  # instead of the simulator's own number
    first_step: int = 0  # summaries of an easier lesson before do not count
    steps_per_update: dict[float, int] = field(default_factory=dict)  # of xqc, by milliseconds

    @property
    def trainers(self) -> list[str]:
        """Names of ours and, after `peer-`, of the peer's, in turn as far as they go."""
        peers = [PEER + name for name in self.files if name != "xqc"]
        return [name for pair in zip_longest(self.files, peers) for name in pair if name]


_BALL = {"xqc": "xqc/3DBall.yaml", "ppo": "ppo/3DBall.yaml", "sac": "sac/3DBall.yaml"}
_BALLS = _BALL | {"xqc": "xqc/3DBall_agents.yaml"}
_FOOD = {name: f"{name}/FoodCollector.yaml" for name in ("xqc", "ppo", "sac")}
# As many updates as the wait of an exchange hides on one core.
_WAIT = {6.0: 12, 14.0: 4, 30.0: 2}
TASKS = {
    "balance_ball": Task("balance_ball", 90.0, 1200, 900.0, _BALLS, steps_per_update=_WAIT),
    "one_ball": Task("balance_ball", 90.0, 500, 600.0, _BALL, agents=1),
    "collector": Task("collector", 10.0, 4800, 900.0, _FOOD),
    "push_together": Task(
        "push_together", 1.9, 5000, 900.0, {"poca": "poca/PushTogether.yaml"}, first_step=64_000
    ),
    "hallway": Task("hallway", 0.7, 10_000, 3600.0, {"ppo": "ppo/Hallway.yaml"}),
}


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


class Row:
    """A training run on the way to its target; `folder` is that of all rows."""

    def __init__(self, task: str, ms: float, trainer: str, seed: int, folder: Path) -> None:
        self.key = {"task": task, "ms": ms, "trainer": trainer, "seed": seed}
        self.name = f"{task}-{ms:g}-{trainer}-{seed}"
        self.task, self.ms, self.folder = TASKS[task], ms, folder
        self.algorithm, self.is_peer = trainer.removeprefix(PEER), trainer.startswith(PEER)
        self.file, self.partial = folder / f"{self.name}.json", folder / f"{self.name}.partial.json"
        self.log, self.config = folder / f"{self.name}.log", folder / f"{self.name}.yaml"

    def settings(self) -> dict[str, Any]:
        """Return the trainer's configuration."""
        path = ROOT / "config" / self.task.files[self.algorithm]
        content: dict[str, Any] = yaml.safe_load(path.read_text())
        for behavior in content["behaviors"].values():
            behavior |= {"summary_freq": self.task.summary_freq, "threaded": not self.is_peer}
            h = behavior["hyperparameters"]
            if behavior["trainer_type"] in ("sac", "xqc"):
                h["save_replay_buffer"] = True  # for a second start
                if h["learning_rate_schedule"] == "constant":
                    behavior["max_steps"] = 10_000_000  # nothing depends on it
            if behavior["trainer_type"] == "xqc":
                room = 20 * self.task.summary_freq  # for five summaries after learning
                behavior["max_steps"] = max(behavior["max_steps"], room)
                h["steps_per_update"] = self.task.steps_per_update.get(
                    self.ms, h["steps_per_update"]
                )
        return content

    def digest(self) -> str:
        """Return the digest of what decides the row's outcome."""
        task = self.task
        described = [self.settings(), task.simulator, task.agents, task.target, task.limit_s]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def kept(self, path: Path) -> Result | None:
        """Return what a file of the row keeps; None if it is missing or settings have changed."""
        content: Result = json.loads(path.read_text()) if path.exists() else {}
        return content if content.get("settings") == self.digest() else None

    def start(self) -> None:
        """Start the trainer, or resume it after an interruption."""
        run = self.folder / "runs" / self.name
        # The peer writes checkpoints when it is interrupted; a killed run of it starts again.
        partial = self.kept(self.partial) if any(run.rglob("*.pt")) else None
        content = partial or {"summaries": [], "starts": 0}
        self.before: list[Summary] = [tuple(summary) for summary in content["summaries"]]
        self.n_starts = content["starts"] + 1
        place = self.folder / "envs" / self.name
        place.mkdir(parents=True, exist_ok=True)  # makes the folder of all rows, too
        self.config.write_text(yaml.safe_dump(self.settings(), sort_keys=False))
        environment = argparse.Namespace(sigma=0.0, agents=self.task.agents)
        env = profiles.executable(place, self.task.simulator, self.ms, environment)
        command = [str(self.config), "--env", str(env), "--run-id", self.name]
        command += ["--results-dir", str(run.parent), "--no-graphics", "--torch-device", "cpu"]
        command += ["--seed", str(self.key["seed"]), "--resume" if partial else "--force"]
        if self.is_peer:
            command = [peer_command(), *command, "--base-port", str(free_port())]
            command += ["--timeout-wait", "120"]
        else:
            command = [sys.executable, "-m", "pipeline.cli.main", "learn", *command]
        self.began, self.since, self.line = time.monotonic(), list[Summary](), ""
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(  # noqa: S603  # the two programs that are compared
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=stream,
                stderr=stream,
                process_group=0,  # Ctrl-C is passed on by `interrupt`
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  # calls only prctl
            )
        self.output = self.log.open()

    def poll(self) -> bool:
        """Read what the trainer has printed; return whether the row is over, and keep it if so."""
        task, code, seconds = self.task, self.process.poll(), time.monotonic() - self.began
        *lines, self.line = (self.line + self.output.read()).split("\n")
        for match in filter(None, map(_SUMMARY.search, lines)):
            mean = float(match["group"] or match["reward"])
            self.since.append((int(match["step"]), seconds, mean))
        if code:
            raise RuntimeError(f"{self.name} failed:\n{self.log.read_text()[-2000:]}")
        summaries = joined(self.before, self.since)
        first = reached(summaries, task.target, task.first_step)
        seconds += self.before[-1][1] if self.before else 0.0
        if first is None and code is None and seconds < task.limit_s:
            return False
        step, when, _ = first or (summaries[-1][0] if summaries else 0, task.limit_s, 0.0)
        result = self.key | {"reached": first is not None, "seconds": round(when, 1)}
        result |= {"steps": step, "starts": self.n_starts, "load": round(os.getloadavg()[1], 1)}
        result |= {"settings": self.digest(), "summaries": summaries}
        write_whole(self.file, json.dumps(result) + "\n")
        self.partial.unlink(missing_ok=True)
        self._end()
        mark = "" if first else ", not reached"
        print(f"{self.name}: {when:.0f} s, {step:,} steps{mark}", flush=True)  # noqa: T201
        return True

    def interrupt(self) -> None:
        """End the trainer so that the next call resumes it."""
        content: Result = {"settings": self.digest(), "starts": self.n_starts}
        content["summaries"] = joined(self.before, self.since)
        write_whole(self.partial, json.dumps(content))
        self._end()

    def _end(self) -> None:
        """Interrupt the trainer, which writes a checkpoint."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # mlagents-learn's workers and their executables outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output.close()


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
            program = "mlagents-learn, " if name.startswith(PEER) else ""
            title = f"{program}{name.removeprefix(PEER).upper()}"
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
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="of finished rows; run nothing")
    options = parser.parse_args()
    rows = [
        Row(task, ms, trainer, seed, options.folder.resolve())
        for task in options.task
        for ms in options.ms
        for seed in options.seeds
        for trainer in TASKS[task].trainers
        if trainer in options.trainer
    ]
    if not options.table:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        waiting, running = [row for row in rows if row.kept(row.file) is None], list[Row]()
        try:
            while waiting or running:
                while waiting and len(running) < options.at_once:
                    waiting[0].start()
                    running.append(waiting.pop(0))
                running = [row for row in running if not row.poll()]
                time.sleep(0.1)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not cut this short
                signal.signal(number, signal.SIG_IGN)
            for row in running:
                row.interrupt()
    print(table(_HEADER, lines_of([kept for row in rows if (kept := row.kept(row.file))])), end="")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
