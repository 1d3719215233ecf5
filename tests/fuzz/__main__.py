"""Run fuzz targets for a while: `python -m tests.fuzz --seconds 3600 --target demo`.

Every target has a process of its own, so that one that crashes is counted and started again.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
TARGETS = sorted(path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py"))


def main() -> int:
    """Fuzz, print a table, and give 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--seed", type=int, help="of the first round; default: a random one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at a time")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)  # this is a target's process
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(31)
    targets = arguments.target or TARGETS
    if arguments.state:
        _work(targets[0], arguments.seconds, seed, arguments.state)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {seed}, {arguments.seconds:g} s for each of: {', '.join(targets)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        waiting = [_Target(name, arguments.seconds, seed, Path(folder)) for name in targets]
        done, running = [], []
        try:
            while waiting or running:
                while waiting and len(running) < arguments.jobs:
                    running.append(waiting.pop(0))
                    running[-1].start()
                time.sleep(0.5)
                done += [target for target in running if not target.goes_on()]
                running = [target for target in running if target not in done]
        finally:
            for target in running:
                target.stop()
    print(_table(done))
    return int(any(target.failures for target in done))


class _Target:
    """A target's processes, one after another until its time is over."""

    def __init__(self, name: str, seconds: float, seed: int, folder: Path) -> None:
        self.name, self.seed = name, seed
        self.failures: dict[str, dict[str, Any]] = {}
        self._announced: set[str] = set()
        self.total: dict[str, Any] = {"outcomes": {}, "refused_at": {}}
        self._seconds, self._folder = seconds, folder
        self._state: Path
        self._said: Path
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        self._end = time.monotonic() + self._seconds
        self._spawn(self.seed)

    def _spawn(self, seed: int) -> None:
        self._state = self._folder / f"{self.name}-{seed}.json"
        self._said = self._state.with_suffix(".txt")
        left = max(0.0, self._end - time.monotonic())
        command = [sys.executable, "-m", "tests.fuzz", "--target", self.name]
        command += ["--seconds", str(left), "--seed", str(seed), "--state", str(self._state)]
        path = os.pathsep.join(
            str(ROOT / part) for part in ("src", "tests/support", "tests/learning")
        )
        environment = os.environ | {"PYTHONPATH": path, "GRPC_ENABLE_FORK_SUPPORT": "0"}
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(  # noqa: S603  # ours
                command, cwd=ROOT, env=environment, stderr=said
            )

    def stop(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def goes_on(self) -> bool:
        """Look at the process; False when the target's time is over."""
        code = self._process.poll()
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        for failure in state.get("failures", []):
            self._announce(failure)
        if code is None:
            return True
        self._add(state)
        if code == 0:
            return False
        where = f"{state.get('test')} with seed {state.get('seed')}"
        said = self._said.read_text(errors="replace")[-3000:]
        self._fail({"key": f"ended with code {code}", "text": f"{where}\n{said}", "count": 1})
        again = state.get("seed", self.seed) + 1
        if time.monotonic() > self._end or not state:
            return False
        self._spawn(again)
        return True

    def _add(self, state: dict[str, Any]) -> None:
        for failure in state.get("failures", []):
            self._fail(failure)
        for name in ("outcomes", "refused_at"):
            for key, count in state.get(name, {}).items():
                self.total[name][key] = self.total[name].get(key, 0) + count
        for name in ("most_bytes", "most_s"):
            self.total[name] = max(self.total.get(name, 0), state.get(name, 0))
        for name in ("cpu_s", "rounds"):
            self.total[name] = self.total.get(name, 0) + state.get(name, 0)

    def _fail(self, failure: dict[str, Any]) -> None:
        known = self.failures.setdefault(failure["key"], failure | {"count": 0})
        known["count"] += failure["count"]
        self._announce(failure)

    def _announce(self, failure: dict[str, Any]) -> None:
        if failure["key"] not in self._announced:
            self._announced.add(failure["key"])
            print(f"\n{self.name}: {failure['key']}\n{failure['text']}", flush=True)


def _work(name: str, seconds: float, seed: int, state_file: Path) -> None:
    """Rounds of a target's tests, one after another, until `seconds` are over."""
    sys.stdout = sys.stderr  # what Hypothesis prints goes with what fails
    warnings.simplefilter("error")
    logging.disable()
    module = importlib.import_module(f"tests.fuzz.test_{name}")
    frame = importlib.import_module("tests.fuzz.frame")
    tests = [test for test in vars(module).values() if getattr(test, "is_fuzz", False)]
    failures: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    rounds = ((seed + n, test) for n in itertools.count() for test in tests)
    for number, (seed_now, test) in enumerate(rounds):
        _write_state(state_file, frame.TALLY, failures, number, seed_now, test.__name__)
        if time.monotonic() > end and number:
            return
        os.environ["PIPELINE_FUZZ_SEED"] = str(seed_now)
        try:
            test()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            key = _key(error)
            text = "".join(traceback.format_exception(error))
            text = text if len(text) < 6000 else f"{text[:4000]}\n[...]\n{text[-1500:]}"
            os.environ["PIPELINE_FUZZ_WITHOUT"] = "shrink" if key in failures else ""
            failures.setdefault(key, {"key": key, "text": text, "count": 0})["count"] += 1


def _key(error: BaseException) -> str:
    """What tells findings apart: the kind of error and the last line of ours in it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/pipeline/" in f.filename or "test_" in f.filename] or frames
    return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"


def _write_state(
    path: Path, tally: Any, failures: dict[str, Any], rounds: int, seed: int, test: str
) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    state = {
        "outcomes": tally.outcomes,
        "refused_at": tally.refused_at,
        "most_bytes": tally.most_bytes,
        "most_s": tally.most_s,
        "failures": list(failures.values()),
        "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
        "rounds": rounds,
        "seed": seed,
        "test": test,
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(state))
    temporary.replace(path)


def _table(targets: list[_Target]) -> str:
    lines = [
        "target        rounds  examples  accepted  refused at  failures  hangs  memory  "
        "most MB  most s   CPU s"
    ]
    for target in targets:
        total, outcomes = target.total, target.total["outcomes"]
        examples = sum(outcomes.get(name, 0) for name in ("accepted", "refused"))
        failures = sum(failure["count"] for failure in target.failures.values())
        lines.append(
            f"{target.name:<13} {total.get('rounds', 0):>6} {examples:>9} "
            f"{100 * outcomes.get('accepted', 0) / max(1, examples):>7.1f} % "
            f"{len(total['refused_at']):>6} places {failures:>9} "
            f"{outcomes.get('hang', 0):>6} {outcomes.get('memory', 0):>7} "
            f"{total.get('most_bytes', 0) / 1e6:>8.1f} {total.get('most_s', 0):>7.2f} "
            f"{total.get('cpu_s', 0):>7.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
