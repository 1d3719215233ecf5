"""Run fuzz targets for a while: `python tools/fuzzing --seconds 3600 --target demo`.

Every target is a run of pytest, whose tests go through one seed after another until the time is
over. One that crashes is counted and started again behind the seed that it crashed with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "tests" / "fuzz"
TARGETS = sorted(path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py"))
# Without logging: pytest would keep the records of an hour in memory.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:logging", "--timeout=0")
HEAD = (
    "target        rounds  examples  accepted  refused at  failures  hangs  memory  "
    "most MB  most s   CPU s"
)


def main() -> int:
    """Fuzz, print a table, and give 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python tools/fuzzing", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--seed", type=int, help="of the first round; default: a random one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(31)
    names = arguments.target or TARGETS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {seed}, {arguments.seconds:g} s for each of: {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        targets = [Target(name, Path(folder) / f"{name}.json") for name in names]
        try:
            list(pool.map(lambda target: target.run(seed, arguments.seconds), targets))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for target in targets:
                target.stop()
    print("\n".join([HEAD, *map(str, targets)]))
    return int(any(target.n_failures for target in targets))


@dataclass(slots=True)
class Target:
    """The runs of one file of tests, and what they have seen."""

    name: str
    state: Path
    """What a run notes at the beginning of each round, and at its end; see `frame.Tally`."""
    n_failures: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    most: dict[str, float] = field(default_factory=dict)
    refused_at: set[str] = field(default_factory=set)
    process: subprocess.Popen[str] | None = None

    def run(self, seed: int, seconds: float) -> None:
        """Run until the time is over, or until nothing runs at all."""
        end, file = time.monotonic() + seconds, FOLDER / f"test_{self.name}.py"
        while True:
            share = max(0.0, end - time.monotonic()) / file.read_text().count("@fuzz(")
            variables = {"PIPELINE_FUZZ_SEED": str(seed), "PIPELINE_FUZZ_SECONDS": str(share)}
            variables |= {"PIPELINE_FUZZ_STATE": str(self.state), "GRPC_ENABLE_FORK_SUPPORT": "0"}
            self.state.unlink(missing_ok=True)
            self.process = subprocess.Popen(  # noqa: S603  # this interpreter
                [*PYTEST, str(file)],
                cwd=REPOSITORY,
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output, code = self.process.communicate()[0], self.process.returncode
            state = json.loads(self.state.read_text()) if self.state.exists() else {}
            self._add(state)
            if code == 0:
                return
            failed = re.search(r"(\d+) failed", output)
            self.n_failures += int(failed[1]) if failed else 1
            print(
                f"\n{self.name}: ended with code {code} in {state.get('round')}\n{output[-6000:]}"
            )
            if code == 1 or not state or time.monotonic() > end:
                return
            seed = state["seed"] + 1

    def stop(self) -> None:
        """End what still runs, at once."""
        if self.process is not None:
            self.process.kill()

    def _add(self, state: dict[str, Any]) -> None:
        self.sums.update(state.get("outcomes", {}))
        self.sums.update({name: state.get(name, 0) for name in ("rounds", "cpu_s")})
        self.refused_at.update(state.get("refused_at", ()))
        for name in ("most_bytes", "most_s"):
            self.most[name] = max(self.most.get(name, 0), state.get(name, 0))

    def __str__(self) -> str:
        """Return a row of the table."""
        sums = self.sums
        examples = sums["accepted"] + sums["refused"]
        return (
            f"{self.name:<13} {sums['rounds']:>6} {examples:>9} "
            f"{100 * sums['accepted'] / max(1, examples):>7.1f} % "
            f"{len(self.refused_at):>6} places {self.n_failures:>9} "
            f"{sums['hang']:>6} {sums['memory']:>7} {self.most['most_bytes'] / 1e6:>8.1f} "
            f"{self.most['most_s']:>7.2f} {sums['cpu_s']:>7.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
