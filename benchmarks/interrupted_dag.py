"""Is a DAG that was interrupted the DAG that was not? Digests of every file that it makes say so.

    python benchmarks/interrupted_dag.py                  10 kills under each engine
    python benchmarks/interrupted_dag.py --kills 20 --seed 7
    python benchmarks/interrupted_dag.py --quick          short trainings, 4 kills
    python benchmarks/interrupted_dag.py --params benchmarks/search.yaml     a search of 20 trials

In copies of the project the DAG of params.yaml runs to its end under DVC and under Snakemake, and
again under both while processes of it get SIGKILL at moments that are drawn: the engine, a stage
and an environment in turn. After the engine or a stage was killed the same command is given again,
as a user would do it (`snakemake --unlock` first). Every file of results/, data/demos/ and build/
must be equal to that of the undisturbed run of the other engine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import psutil
from kills import run, say, stage_of, start
from left_behind import MARK, left_alive, marked
from worktrees import ROOT, copy_project, environment, shortened

ENGINES = {"dvc": ["dvc", "repro"], "snakemake": ["snakemake", "--cores", "2"]}
SHORTEST_S, LONGEST_S = 3.0, 25.0
SOON_S = 60.0  # longest wait for a stage or an environment to kill


def main() -> int:
    """Run, kill, compare, print, and return 1 if there is a difference."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kills", type=int, default=10, help="of each engine's DAG (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of all moments (default: 0)")
    parser.add_argument("--quick", action="store_true", help="short trainings, 4 kills")
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="what is run")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary one)")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="interrupted-"))).resolve()
    params = shortened(6000) if options.quick else options.params.read_text()
    n_kills = 4 if options.quick else options.kills

    def work(job: tuple[str, int]) -> Dag:
        dag = Dag(folder, params, *job, seed=options.seed)
        dag.run_to_end()
        return dag

    jobs = [(engine, kills) for kills in (0, n_kills) for engine in ENGINES]
    with ThreadPoolExecutor(2) as pool:
        dags = dict(zip(jobs, pool.map(work, jobs), strict=True))
    lines = ["| engine | " + " | ".join(Dag.TARGETS) + " | restarts | files | differences |"]
    lines.append(f"| --- {'| ---: ' * 6}|")
    n_differing = 0
    for engine, other in zip(ENGINES, reversed(ENGINES), strict=True):
        dag, expected = dags[engine, n_kills], digests(dags[other, 0].root)
        actual = digests(dag.root)
        differing = sorted(n for n in expected.keys() | actual if expected.get(n) != actual.get(n))
        for name in differing:
            say(f"{engine}: {name} differs")
        n_differing += len(differing)
        counts = [dag.killed.count(target) for target in Dag.TARGETS]
        cells = [engine, *counts, dag.n_restarts, len(actual), len(differing)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    table = "\n".join(lines)
    say(f"seed {options.seed}, folders in {folder}\n\n{table}", to=sys.stdout)
    return int(n_differing > 0)


class Dag:
    """One run of the whole DAG in a copy of the project."""

    TARGETS = ("engine", "stage", "environment")

    def __init__(self, folder: Path, params: str, engine: str, n_kills: int, *, seed: int) -> None:
        self.name = f"{engine}-{'killed' if n_kills else 'whole'}"
        self.root = copy_project(folder / self.name, params)
        self.command = ENGINES[engine]
        self.n_kills = n_kills
        self.chance = random.Random(f"{seed} {self.name}")  # noqa: S311  # no secret
        self.killed: list[str] = []
        self.n_restarts = 0
        self.variables = environment(self.root) | {
            MARK: uuid.uuid4().hex,
            "PIPELINE_CACHE": str(folder / f"{self.name}-cache"),
            "DVC_SITE_CACHE_DIR": str(folder / f"{self.name}-site"),
        }

    def run_to_end(self) -> None:
        """Start, kill and start again, until the engine ends with 0."""
        began = time.monotonic()
        targets = cycle(self.TARGETS)
        process = self.begin()
        while True:
            moment_s = self.chance.uniform(SHORTEST_S, LONGEST_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(moment_s if len(self.killed) < self.n_kills else None)
                if code == 0:
                    break
                if self.n_restarts > 2 * self.n_kills:
                    sys.exit(f"{self.name} does not end: see {self.root / 'log'}")
                self.n_restarts += 1
                process = self.begin()
                continue
            self.kill(next(targets), process)
        seconds = time.monotonic() - began
        say(f"{self.name}: {seconds:.0f} s, {len(self.killed)} kills, {self.n_restarts} restarts")

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the engine."""
        if self.n_restarts and "snakemake" in self.command:
            run(["snakemake", "--unlock"], self.root, self.variables, "log")
        return start(self.command, self.root, self.variables, "log")

    def kill(self, target: str, engine: subprocess.Popen[bytes]) -> None:
        """Kill a process of the kind `target`, unless none starts within `SOON_S`."""
        mark = self.variables[MARK]
        if target == "engine":
            engine.kill()
            engine.wait()
            self.killed.append(target)
            for orphan in left_alive(mark):
                say(f"{self.name}: left behind: {orphan}")
            return
        until = time.monotonic() + SOON_S
        while time.monotonic() < until and engine.poll() is None:
            victim = stage_of(mark) if target == "stage" else player_of(mark)
            with contextlib.suppress(psutil.Error):
                if victim is not None:
                    victim.kill()
                    self.killed.append(target)
                    return
            time.sleep(0.02)


def player_of(mark: str) -> psutil.Process | None:
    """The process of an environment that a stage runs now."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            if any(argument.startswith("--mlagents-port") for argument in process.cmdline()):
                return process
    return None


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of each file that an engine tracks, by its path."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for place in ("results", "data/demos", "build")
        for path in sorted((root / place).rglob("*"))
        if path.is_file() and ".work" not in path.parts and not path.name.startswith(".")
    }


if __name__ == "__main__":
    sys.exit(main())
