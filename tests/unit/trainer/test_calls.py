"""What a step of a run costs however small it is, and memory that stays flat."""

import json
import platform
import sys
from collections import Counter
from pathlib import Path

import pytest
from interpreter import python

import pipeline
from pipeline.protocol import spin_wait
from pipeline.tracking.base import Sink

MOST = 160
"""Calls per step of the loop, for the twelve agents of balance_ball in one executable."""


PACKAGE = str(Path(pipeline.__file__).parent)


class CallsBetweenSummaries(Sink):
    """Counts calls of the package's functions from the first summary to the second."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.at: list[int] = []

    def metrics(self, _behavior, _values, step):
        self.at.append(step)
        sys.setprofile(self.count if len(self.at) == 1 else None)

    def count(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1


def test_a_step_calls_no_more_of_our_functions_than_it_did(packed, tmp_path, quick, monkeypatch):
    # a poll calls as often as there is time for it, which is no cost of a step
    monkeypatch.setenv(spin_wait.VARIABLE, "0")
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=12)
    sink = CallsBetweenSummaries()
    large = {"batch_size": 64, "buffer_size": 10_000}  # so that no update comes between
    times = {"time_horizon": 64, "max_steps": 4000, "summary_freq": 1500}
    settings = quick("3DBall", hyperparameters=large, **times)
    before = sys.getprofile()
    try:
        pipeline.train(build, settings, seed=1, run_dir=tmp_path / "run", sinks=[sink])
    finally:
        sys.setprofile(before)
    assert len(sink.at) == 2
    n_steps = sink.calls["/trainer/loop.py:TrainingLoop._step"]
    assert n_steps > 100
    most = "\n".join(f"{n / n_steps:6.2f} {name}" for name, n in sink.calls.most_common())
    assert sum(sink.calls.values()) / n_steps <= MOST, most


WORK = """
import resource, torch
from pipeline.trainer.api import keep_freed_memory

def work():
    for _ in range(5):
        [torch.ones(25_000) for _ in range(2000)]  # 200 MB, more than glibc keeps by itself

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
work()
before = faults()
work()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries stay as they are")
def test_memory_that_a_step_frees_is_there_for_the_next_one():
    """Without it the system clears 240,000 pages here."""
    assert int(python("-c", WORK).stdout) < 1000


SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scale.py"


MB = 4
"""What a process may grow by: more is a leak at these sizes."""


ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives large blocks back at once: without it memory jumps by 11 MB when blocks lie badly."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps", "sizes"),
    [
        ("agents", 500, ["--agents=300"]),
        ("behaviors", 750, ["--behaviors=6"]),
        ("vanishing", 5500, ["--agents=12"]),
    ],
)
def test_memory_of_trainer_and_environment_is_flat(case, steps, sizes):
    words = [f"--case={case}", "--mode=training", f"--steps={steps}", "--json", *sizes]
    done = python(SCRIPT, *words, **ALLOCATOR)
    memory = json.loads(done.stdout)
    for process in ("trainer_mb", "environment_mb"):
        early, late = memory[process]
        assert 20 < late < early + MB, (process, memory)
