"""Is anything lost, left over or broken when a run is killed with `kill -9` at a random moment?

    python benchmarks/kills.py                          # 100 kills, all scenarios
    python benchmarks/kills.py --only sac dvc --kills 20 --seed 7
    python benchmarks/kills.py --seed 7 --numbers 31    # repeat one of them

Each scenario is a small run that takes seconds: `pipeline learn` with PPO, SAC whose replay is
saved, self-play, POCA and two environments side by side, and a copy of the project with all its
stages under DVC and Snakemake. First each runs to its end, which gives its length and the names of
its files. Then it is started anew for each kill and killed at a moment of that length: one kill in
ten within the first 0.2 s, one in three as soon as a file is being written. Only the process that
was started is killed (in `dvc-stage` and `snakemake-stage`: only the stage that runs then), because
what becomes of the others is a part of the question.

Then is checked, for each kill:

  orphans    no process that the run has started, directly or not, lives ten seconds later
  resumed    what a user is told to do next ends with 0: `pipeline learn` with --resume (with
             --force in one case of four, without either when nothing was written); `pipeline plan`
             and `dvc repro`; `snakemake --unlock` and `snakemake`. A checkpoint that was there is
             continued from, its replay too, and the last step and all files are reached.
  corrupt    every file that was in place can be read after the kill, and every file in the end
  temporary  in the end there is no file or folder of a kind that the run without a kill has not
             (without the empty folder of its own that Snakemake leaves in the system's /tmp)

A kill that fails is printed with its seed, moment and last lines, and its folder is kept. The exit
code is 1 when any has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from kill_scenarios import PARAMS, SCENARIOS, Scenario
from left_behind import (
    MARK,
    being_written,
    declared,
    kinds,
    left_alive,
    lost,
    marked,
    saved_step,
    unreadable,
)
from worktrees import ROOT, copy_project, environment

from pipeline.simulators.pack import pack

MOST_S, EARLY_S = 600.0, 0.2


@dataclass(kw_only=True, slots=True)
class Whole:
    """Facts of a scenario's run without a kill."""

    length_s: float
    kinds: frozenset[str]


@dataclass(kw_only=True, slots=True)
class Kill:
    """One kill and what came of it."""

    number: int
    scenario: str
    how: str = ""
    moment_s: float = 0.0
    writing: bool = False
    saved_step: int = 0
    ended: int | None = None
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def main() -> int:
    """Kill, print a table, and return 1 if a check fails."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of all moments (default: 0)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--numbers", nargs="+", type=int, help="only these kills of the seed")
    parser.add_argument("--at-once", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary one)")
    parser.add_argument("--minutes", type=float, help="begin no kill when so many have passed")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    chosen = shares(options.only, options.kills)
    numbers = options.numbers or list(range(1, options.kills + 1))
    until = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    campaign = Campaign(folder.resolve(), options.seed)

    def kill(number: int) -> list[Kill]:
        return [campaign.kill(number, chosen[number])] if time.monotonic() < until else []

    with ThreadPoolExecutor(options.at_once) as pool:
        campaign.prepare({chosen[number] for number in numbers}, pool)
        kills = [result for results in pool.map(kill, numbers) for result in results]
    say(f"seed {options.seed}, folders of failures in {folder}\n\n{table(kills)}", to=sys.stdout)
    return int(any(kill.problems for kill in kills))


def say(text: str, to: Any = sys.stderr) -> None:
    """Write a line and flush, as several threads write."""
    to.write(f"{text}\n")
    to.flush()


def shares(names: list[str], kills: int) -> dict[int, str]:
    """The scenario of each kill, by number from 1, in proportion and mixed."""
    total = sum(SCENARIOS[name].share for name in names)
    spread = [
        ((turn + 0.5) / SCENARIOS[name].share, name)
        for name in names
        for turn in range(-(-kills * SCENARIOS[name].share // total))
    ]
    return dict(enumerate((name for _, name in sorted(spread)[:kills]), start=1))


class Campaign:
    """Kills of one seed, in folders of their own below `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.whole: dict[str, Whole] = {}

    def prepare(self, names: set[str], pool: ThreadPoolExecutor) -> None:
        """Pack the simulators, and let every scenario run to its end."""
        for name in {SCENARIOS[scenario].simulator for scenario in names} - {""}:
            pack(name, self.folder / "builds" / name)
        if any(SCENARIOS[name].engine for name in names):
            copy_project(self.folder / "project", PARAMS)
        alike = {SCENARIOS[name].engine or name: name for name in sorted(names)}
        results = dict(zip(alike, pool.map(self.uninterrupted, alike.values()), strict=True))
        self.whole = {name: results[SCENARIOS[name].engine or name] for name in names}

    def uninterrupted(self, name: str) -> Whole:
        """Run a scenario without a kill."""
        scenario = SCENARIOS[name]
        work = self.work(f"whole-{name}", scenario)
        before, start = scenario.first()[:-1], scenario.first()[-1]
        variables = self.variables(work, scenario, cold=True)
        for command in before:
            run(command, work, variables, "log")
        began = time.monotonic()
        code = run(start, work, variables, "log")
        result = Whole(length_s=time.monotonic() - began, kinds=frozenset(kinds(work)))
        problems = [*unreadable(work), *scenario.short(work)]
        if code or problems:
            sys.exit(f"{name} fails without a kill ({code}, {problems}); see {work / 'log'}")
        say(f"{name}: {result.length_s:.1f} s without a kill")
        return result

    def work(self, name: str, scenario: Scenario) -> Path:
        """Return a fresh folder with what the scenario needs to start."""
        work = self.folder / "runs" / name
        shutil.rmtree(work, ignore_errors=True)
        if scenario.engine:
            shutil.copytree(self.folder / "project", work, symlinks=True)
        else:
            work.mkdir(parents=True)
            content = {"behaviors": {scenario.behavior: scenario.settings}}
            (work / "config.yaml").write_text(yaml.safe_dump(content))
        (work / "tmp").mkdir()
        return work

    def variables(self, work: Path, scenario: Scenario, *, cold: bool) -> dict[str, str]:
        """Environment variables of a scenario's processes; `cold` gives them their own cache."""
        sources = work if scenario.engine else ROOT
        return environment(sources) | {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(work / "tmp"),
            "PIPELINE_CACHE": str((work if cold else self.folder) / "cache"),
            "DVC_SITE_CACHE_DIR": str(work / "site"),
        }

    def kill(self, number: int, name: str) -> Kill:
        """Kill once, start again, and check the results."""
        scenario = SCENARIOS[name]
        chance = random.Random(f"{self.seed} {number} {name}")  # noqa: S311  # no secret
        kill = Kill(number=number, scenario=name)
        work = self.killed(kill, scenario, chance)
        kill.problems["corrupt"] += unreadable(work, after_kill=True)
        force = not scenario.engine and chance.random() < 0.25
        kill.saved_step = saved_step(scenario.checkpoint(work))
        variables = self.variables(work, scenario, cold=(work / "cache").exists())
        began = time.monotonic()
        for command in scenario.following(work, force=force):
            kill.ended = run(command, work, variables, "next.log")
            if kill.ended:
                kill.problems["not resumed"].append(f"{' '.join(command)}: exit {kill.ended}")
                break
        if not kill.ended and not kill.saved_step and not scenario.engine:
            # it began anew: measure its length again, because the machine's load varies
            self.whole[name].length_s = time.monotonic() - began
        kill.problems["orphans"] += left_alive(variables[MARK])
        kill.problems["corrupt"] += unreadable(work)
        kill.problems["temporary"] += sorted(kinds(work) - self.whole[name].kinds)
        if not kill.ended:
            log = (work / "next.log").read_text(errors="replace")
            kill.problems["not resumed"] += scenario.short(work)
            kill.problems["not resumed"] += [] if force else lost(log, kill.saved_step)
            missing = {kind for kind in self.whole[name].kinds - kinds(work) if declared(kind)}
            kill.problems["not resumed"] += [f"{kind} is missing" for kind in sorted(missing)]
        kill.problems = {check: messages for check, messages in kill.problems.items() if messages}
        self.finish(kill, work)
        return kill

    def killed(self, kill: Kill, scenario: Scenario, chance: random.Random) -> Path:
        """Start anew until the kill comes before the end; return the folder."""
        length, most = self.whole[kill.scenario].length_s, 1.0
        while True:
            work = self.work(f"{kill.number:03d}-{kill.scenario}", scenario)
            variables = self.variables(work, scenario, cold=chance.random() < 0.25)
            way = chance.random()
            kill.how = "early" if way < 0.1 else "writing" if way < 0.45 else "any"
            kill.moment_s = chance.uniform(0, EARLY_S if kill.how == "early" else most * length)
            for command in scenario.first()[:-1]:
                run(command, work, variables, "killed.log")
            if strike(scenario, kill, work, variables):
                kill.problems["orphans"] += left_alive(variables[MARK])
                kill.writing = being_written(work)
                return work
            left_alive(variables[MARK])
            most *= 0.7

    def finish(self, kill: Kill, work: Path) -> None:
        """Print the result of a kill, and delete its folder unless a check failed."""
        writing = ", a file was being written" if kill.writing else ""
        summary = f"{kill.number:3d} {kill.scenario}: {kill.how}, {kill.moment_s:.2f} s"
        summary += f", step {kill.saved_step}{writing}"
        if not kill.problems:
            shutil.rmtree(work)
            say(f"{summary}: as it should be")
            return
        lines = [f"{summary}, seed {self.seed}: FAILED, see {work}"]
        lines += [
            f"    {check}: {message}"
            for check, messages in kill.problems.items()
            for message in messages
        ]
        for log in ("killed.log", "next.log"):
            with contextlib.suppress(OSError):
                last = (work / log).read_text(errors="replace").splitlines()[-10:]
                lines += [f"    {log} | {line}" for line in last]
        say("\n".join(lines))


def run(command: list[str], work: Path, variables: dict[str, str], log: str) -> int:
    """Run a command to its end, and return its exit code."""
    process = start(command, work, variables, log)
    try:
        return process.wait(MOST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def start(
    command: list[str], work: Path, variables: dict[str, str], log: str
) -> subprocess.Popen[bytes]:
    """Start a command of this environment in a session of its own."""
    with (work / log).open("ab") as file:
        return subprocess.Popen(  # noqa: S603  # our own commands
            [sys.executable, "-m", *command],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def strike(scenario: Scenario, kill: Kill, work: Path, variables: dict[str, str]) -> bool:
    """Start the scenario, and kill it at its moment; False when it has ended before that."""
    process = start(scenario.first()[-1], work, variables, "killed.log")
    kill_at = time.monotonic() + kill.moment_s
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(kill_at - time.monotonic(), 0))
    victim: Any = None if scenario.stage else process
    while process.poll() is None:
        if victim is None:
            time.sleep(0.02)
            victim = stage_of(variables[MARK])
        elif kill.how != "writing" or being_written(work):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                break
            victim = None  # that stage has ended
        time.sleep(0.0005)
    if not scenario.stage:
        return process.wait() == -9
    process.wait(MOST_S)  # an engine whose stage was killed ends by itself
    return victim is not None and process.returncode != 0


def stage_of(mark: str) -> psutil.Process | None:
    """The process of a stage that a marked engine runs now."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:2] and process.cmdline()[1].startswith("workflow/scripts/"):
                return process
    return None


def table(kills: list[Kill]) -> str:
    """The outcome of each scenario, in Markdown."""
    heads = ["kills", "first 0.2 s", "file being written", "checkpoint saved", "ended with 0"]
    bad = ["not resumed", "corrupt", "orphans", "temporary"]
    lines = [f"| {' | '.join(['scenario', *heads, *bad])} |", f"| --- {'| ---: ' * 9}|"]
    for name in [*SCENARIOS, "all"]:
        selected = [kill for kill in kills if name in (kill.scenario, "all")]
        counts: list[int] = [len(selected)]
        counts.append(sum(kill.moment_s <= EARLY_S for kill in selected))
        counts.append(sum(kill.writing for kill in selected))
        counts.append(sum(kill.saved_step > 0 for kill in selected))
        counts.append(sum(kill.ended == 0 for kill in selected))
        counts += [sum(check in kill.problems for kill in selected) for check in bad]
        if selected:
            lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
