"""Is a run that was interrupted the run that was not? Digests of every file say so.

    python benchmarks/interruptions.py                        5 runs of 3 kills in each row
    python benchmarks/interruptions.py --quick                1 run of 2 kills in each row
    python benchmarks/interruptions.py --rows ppo sac-4 --seed 7 --runs 2 --kills 3
    python benchmarks/interruptions.py --list                 names and settings of the rows

Each row is a method with a number of environments (executables that the trainer starts), learners,
and `threaded`, compiled and with exchanges that take time, or not. Its run goes to its end once
without an interruption. Then the same run is started again, gets SIGKILL, now and then SIGINT, at a
moment that is drawn when there is something to resume from, is continued with `--resume`, is killed
again, and so on, to its end. One that ends before its last draw is compared, and another is begun
in its place. Now and then one of its environments is killed alone, which the trainer starts again,
and of several learners the further one, which ends all of them. Equal must be every checkpoint,
replay, ONNX file and progress.csv, by name and by SHA-256. Left out is what holds times or options:
run_logs/, configuration.yaml, metrics.jsonl.

The last column counts files that differ, are missing, or are there in addition. The exit code is 1
when there is one in a row whose environments give their state. Moments depend on the machine, so
that a seed repeats the draws and not the steps; any seed must give no differences.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml
from interruption_rows import ROWS
from left_behind import saved_step
from tables import table

import profiles
from pipeline.cli import learn_run  # noqa: F401  # imported once, before processes are forked
from pipeline.cli import main as cli
from pipeline.core.specs import ActionTuple
from pipeline.demos.demo_file import writing_demo
from pipeline.simulators import registry
from pipeline.simulators.pack import pack
from pipeline.trainer import api  # noqa: F401

MOST_S = 600.0
RESUMED_S = 0.5  # until a run that is resumed takes steps
MOST_TRIES = 4  # runs that are begun for one with all its kills
CTRL_C = 0.25  # share of the interruptions that let the run save
ENVIRONMENT = 0.3  # share of them before which one of the environments is killed
LEARNER = 0.4  # share, with several learners, that kill one but the first; that ends the run
INTERRUPTED = (-signal.SIGKILL, 128 + signal.SIGINT, 2)
LEFT_OUT = ("run_logs", "configuration.yaml", "metrics.jsonl")


def main() -> int:
    """Interrupt, print a table, and return 1 if there is a difference."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--runs", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all moments (default: 0)")
    parser.add_argument("--quick", action="store_true", help="1 run of 2 kills in each row")
    parser.add_argument("--minutes", type=float, help="begin no run when so many have passed")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary one)")
    parser.add_argument("--list", action="store_true", help="print the rows, and end")
    options = parser.parse_args()
    if options.list:
        say("\n".join(f"{name:16s} {row}" for name, row in ROWS.items()))
        return 0
    n_runs, n_kills = (1, 2) if options.quick else (options.runs, options.kills)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="interruptions-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_demo(folder / "expert.demo")
    os.environ["PIPELINE_CACHE"] = str(folder / "cache")
    until = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    outcomes = []
    for name in options.rows:
        if time.monotonic() < until:
            campaign = Campaign(name, folder, options.seed)
            outcomes.append(campaign.outcome(n_runs, n_kills, until))
    say(f"seed {options.seed}, folders of differences in {folder}\n\n{summary(outcomes)}")
    return int(any(outcome.differing for outcome in outcomes if ROWS[outcome.row].gives_state))


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Results of a row."""

    row: str
    n_runs: int = 0
    """With all their kills."""
    n_kills: int = 0
    n_environments: int = 0
    """Environments that were killed alone, in addition."""
    n_resumed: int = 0
    """Kills after which a checkpoint was continued from."""
    n_files: int = 0
    differing: list[str] = field(default_factory=list)


class Campaign:
    """The runs of one row, in folders of their own."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.row = name, ROWS[name]
        self.folder = folder / name
        self.n_environments = 0  # that were killed alone
        self.first_kept_s = float("inf")  # after the start of the uninterrupted run
        self.chance = random.Random(f"{seed} {name}")  # noqa: S311  # no secret
        shutil.rmtree(self.folder, ignore_errors=True)

    def outcome(self, n_runs: int, n_kills: int, until: float) -> Outcome:
        """Run once without an interruption, and `n_runs` times with `n_kills`."""
        build = self.folder.parent / "builds" / self.row.build
        if self.row.ms:
            build.parent.mkdir(parents=True, exist_ok=True)
            slowed = argparse.Namespace(sigma=0.3, agents=None)
            profiles.executable(build.parent, self.row.env, self.row.ms, slowed)
        elif ":" not in self.row.env and not build.exists():
            pack(self.row.env, build)
        if self.row.compiled:
            self.run(self.work("compiled"))  # only the first compilation takes long
        uninterrupted = self.work("whole")
        began = time.monotonic()
        code = self.run(uninterrupted)
        length_s = time.monotonic() - began
        expected = digests(uninterrupted / "results/run")
        outcome = Outcome(row=self.name, n_files=len(expected))
        if code:
            outcome.differing.append(f"the uninterrupted run ended with {code}")
        say(f"{self.name}: {length_s:.1f} s, {len(expected)} files without an interruption")
        number = 0
        while outcome.n_runs < n_runs and number < MOST_TRIES * n_runs and not code:
            if time.monotonic() > until:
                break
            # A run that ended before its last draw is compared too, and one more is begun.
            kills = self.interrupted(number, n_kills, length_s, expected, outcome)
            outcome.n_runs += kills == n_kills
            number += 1
        outcome.n_environments = self.n_environments
        return outcome

    def interrupted(
        self,
        number: int,
        n_kills: int,
        length_s: float,
        expected: dict[str, str],
        outcome: Outcome,
    ) -> int:
        """Kill a run up to `n_kills` times, let it end, compare its files; return the kills."""
        work = self.work(f"run{number}")
        moments, steps = [], []
        last_step = self.row.content()["behaviors"][self.row.behaviors[0]]["max_steps"]
        for kill in range(n_kills):
            # A kill before anything is kept proves little; a resumed process starts first.
            first_s = self.first_kept_s if kill == 0 else RESUMED_S
            share = 1.0 - (steps[-1] / last_step if steps else 0.0)
            left_s = max(0.0, share * (length_s - self.first_kept_s)) / (n_kills - kill)
            moment = first_s + self.chance.uniform(0.0, max(0.1, left_s - 0.1))
            signum = signal.SIGINT if self.chance.random() < CTRL_C else signal.SIGKILL
            killed_s = self.chance.uniform(first_s, moment)
            if self.chance.random() > ENVIRONMENT:
                killed_s = None
            n_killed = self.n_environments
            follower = self.row.learners > 1 and self.chance.random() < LEARNER
            if self.run(work, moment, signum, killed_s, follower=follower) not in INTERRUPTED:
                break  # it was at its end
            also = ["a learner" if follower else "Ctrl+C"] * (follower or signum == signal.SIGINT)
            also += ["an environment before"] * (self.n_environments > n_killed)
            moments.append(f"{moment:.1f} s" + (f" ({', '.join(also)})" if also else ""))
            steps.append(max(map(saved_step, work.glob("results/run/*/checkpoint.pt")), default=0))
        code = self.run(work)
        actual = digests(work / "results/run")
        differing = sorted(n for n in expected.keys() | actual if expected.get(n) != actual.get(n))
        if code:
            differing.append(f"ended with {code}")
        outcome.n_kills += len(moments)
        outcome.n_resumed += sum(step > 0 for step in steps)
        outcome.differing += [f"{work.name}: {name}" for name in differing]
        history = f"killed at {', '.join(moments) or 'no moment'}, resumed from steps {steps}"
        say(f"  {self.name} {number}: {history}: {differing or 'the same bytes'}")
        if not differing:
            shutil.rmtree(work)
        return len(moments)

    def work(self, name: str) -> Path:
        """A new folder with the configuration."""
        work = self.folder / name
        work.mkdir(parents=True)
        (work / "config.yaml").write_text(yaml.safe_dump(self.row.content()))
        return work

    def run(
        self,
        work: Path,
        kill_after_s: float | None = None,
        how: int = signal.SIGKILL,
        environment_after_s: float | None = None,
        *,
        follower: bool = False,
    ) -> int:
        """Begin or continue a run; return its exit code, or the negative signal.

        Args:
            work: its folder.
            kill_after_s: when it is interrupted; None lets it end.
            how: the signal.
            environment_after_s: when one of its environments is killed; None for never.
            follower: whether the further learner gets SIGKILL in place of the first one.
        """
        run = work / "results/run"
        more = ["--resume"] if run.is_dir() and any(run.iterdir()) else []
        pid = os.fork()
        if pid == 0:
            be_command(work, self.row.command(*more))
        began = time.monotonic()
        until = began + (MOST_S if kill_after_s is None else kill_after_s)
        while time.monotonic() < until:
            if kill_after_s is None and not more and any(run.glob("*/checkpoint.pt")):
                self.first_kept_s = min(self.first_kept_s, time.monotonic() - began)
            if environment_after_s is not None and time.monotonic() > began + environment_after_s:
                environment_after_s = None
                for child in psutil.Process(pid).children()[-1:]:
                    self.n_environments += 1
                    child.kill()
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        if follower:
            for child in psutil.Process(pid).children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "pipeline.trainer.worker" in child.cmdline():
                        child.kill()
        else:
            os.kill(pid, how)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def be_command(work: Path, arguments: list[str]) -> None:
    """Run the `pipeline` command in a forked process, and exit."""
    code = 70
    try:
        os.setsid()
        os.chdir(work)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = cli.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each file that must be the same in two equal runs, by path."""
    by_name = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_file() and not any(part in name for part in LEFT_OUT):
            by_name[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return by_name


def write_demo(path: Path) -> None:
    """Write a demonstration of 200 random steps."""
    spec = registry.make("balance_ball").behavior_specs["3DBall?team=0"]
    rng = np.random.default_rng(0)
    with writing_demo(path, "3DBall?team=0", spec) as writer:
        writer.append(
            obs=[rng.normal(size=(200, 8)).astype(np.float32)],
            actions=ActionTuple(rng.uniform(-1, 1, (200, 2)).astype(np.float32)),
            reward=np.zeros(200, dtype=np.float32),
            done=np.arange(200) % 50 == 49,
        )


def summary(outcomes: list[Outcome]) -> str:
    """The outcome of each row as a table in Markdown, and the sums."""
    header = ["row", "method", "environment", "num_envs", "learners", "threaded", "compiled"]
    header += ["runs", "kills", "resumed from a checkpoint", "environments", "files", "differences"]
    cells = []
    for outcome in outcomes:
        row = ROWS[outcome.row]
        settings = (row.method, row.build, row.num_envs, row.learners, row.threaded, row.compiled)
        counts = (outcome.n_runs, outcome.n_kills, outcome.n_resumed, outcome.n_environments)
        files = (outcome.n_files, len(outcome.differing))
        cells.append([str(cell) for cell in (outcome.row, *settings, *counts, *files)])
    n_kills = sum(outcome.n_kills for outcome in outcomes)
    n_environments = sum(outcome.n_environments for outcome in outcomes)
    n_differing = sum(len(outcome.differing) for outcome in outcomes)
    sums = f"{n_kills} kills, {n_environments} of environments, {n_differing} differences"
    return f"{table(header, cells)}\n{sums}"


if __name__ == "__main__":
    sys.exit(main())
