"""Function calls and copies of each step of the loop, and memory that does not grow."""

import contextlib
import dataclasses
import itertools
import json
import platform
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import python

import pipeline
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.tracking.base import Sink
from pipeline.trainer.learner import Learner
from pipeline.wire.transport import spin_wait

MOST = 160
"""Most calls per step of the loop, with twelve agents of balance_ball in one executable."""
PACKAGE = str(Path(pipeline.__file__).parent)


class CallsBetweenSummaries(Sink):
    """Counts calls of the package's functions from the first summary to the second."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.at: list[int] = []

    def on_summary(self, _behavior, _values, step):
        self.at.append(step)
        sys.setprofile(self.count if len(self.at) == 1 else None)

    def count(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1


def test_step_of_the_loop_makes_at_most_160_function_calls(packed, tmp_path, quick, monkeypatch):
    # The number of polls depends on the machine's speed, so polling is switched off.
    monkeypatch.setenv(spin_wait.VARIABLE, "0")
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=12)
    sink = CallsBetweenSummaries()
    # The buffer is so large that no update comes between the two summaries.
    large = {"batch_size": 64, "buffer_size": 10_000}
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


MOST_FUNCTIONS, MOST_FILES, MOST_BLOCKS = 41, 17, 9
"""Limits for the path of an observation; docs/evidence/observation-path.md lists the path."""
BRANCHES = ("Algorithm.act", "PPO._values_in_parts")
"""Functions that get an observation and return other numbers: the decision, and the value."""
LAST = "PPO.losses"


def arrays_in(value, depth=0):
    """Yield arrays and bytes in a value, also in its lists, dicts and dataclass fields."""
    parts = ()
    if isinstance(value, np.ndarray | torch.Tensor | bytes | bytearray | memoryview):
        yield value
    elif is_plain(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, DecisionSteps | TerminalSteps):
        parts = value.obs
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts if depth < 6 else ():
        yield from arrays_in(part, depth + 1)


def is_plain(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@dataclasses.dataclass
class Call:
    """A call, which has not returned yet, of a function of the package."""

    frame: object
    name: tuple[str, str]
    """File and name of the function."""
    is_given: bool
    """Whether the observation is in an argument."""
    attributes: set[object]
    """Attributes of `self` that have the observation."""
    hands_on: bool = False
    """Whether this call has handed the observation on."""


class Followed:
    """Follows the numbers of one observation through functions and memory, as a profiler.

    Attributes:
        functions: file and name of each function on the way.
        blocks: places in memory with the numbers, and the function in which each was first seen.
        has_arrived: whether the numbers have come to the loss.
    """

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers
        self.functions: dict[tuple[str, str], None] = {}
        self.blocks: dict[int, object] = {}
        self.has_arrived = False
        self._calls = defaultdict(list)  # by thread
        self._kept: list[object] = []

    def holds(self, value, where):
        """Return whether the numbers are in a value, and record their places in memory."""
        is_there = False
        for array in arrays_in(value):
            values = array.detach().numpy() if isinstance(array, torch.Tensor) else array
            if not isinstance(values, np.ndarray):
                with contextlib.suppress(ValueError):  # an empty buffer, or a released view
                    values = np.frombuffer(values, np.uint8)
            if not isinstance(values, np.ndarray):
                continue
            at = values.tobytes().find(self.numbers)
            if at >= 0:
                is_there = True
                index = np.unravel_index(at // values.itemsize, values.shape)
                place = values.ctypes.data + int(np.dot(index, values.strides))
                self.blocks.setdefault(place, where)
                self._kept.append(array)  # so that no new block gets its address
        return is_there

    def attributes(self, owner, where):
        if is_plain(owner) or not hasattr(owner, "__dict__"):
            return set()
        values = list(vars(owner).items())
        return {(key, id(value)) for key, value in values if self.holds(value, (*where, key))}

    def __call__(self, frame, event, result):
        code = frame.f_code
        if self.has_arrived or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(PACKAGE):
            return
        calls, values = self._calls[threading.get_ident()], frame.f_locals
        # A comprehension or lambda counts as the function that contains it.
        name = code.co_filename.removeprefix(PACKAGE), code.co_qualname.split(".<locals>.<")[0]
        owner = values.get("self")
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [values.get(key) for key in names if key != "self" or is_plain(owner)]
            attributes = self.attributes(owner, name)
            calls.append(Call(frame, name, self.holds(given, name), attributes))
            if name[1] == LAST and calls[-1].is_given:
                self.arrive(calls)
            return
        while calls and calls[-1].frame is not frame:
            calls.pop()
        if not calls:
            return
        call = calls.pop()
        self.holds(list(values.values()), name)
        is_new = self.attributes(owner, name) - call.attributes
        is_branch = any(other.name[1] in BRANCHES for other in [*calls, call])
        if (self.holds(result, name) or is_new or call.hands_on) and not is_branch:
            self.functions[name] = None
            if calls and call.is_given:
                calls[-1].hands_on = True

    def arrive(self, calls):
        self.has_arrived = calls[-1].hands_on = True
        for caller, called in reversed([*itertools.pairwise(calls)]):
            caller.hands_on |= called.is_given and called.hands_on
        self.functions |= {call.name: None for call in calls if call.hands_on}


def test_observation_passes_through_a_limited_number_of_functions_and_copies_before_the_loss(
    packed, tmp_path, quick, monkeypatch
):
    """From the socket's `recv` to the tensor that enters PPO's loss.

    A function is counted if an argument has the observation or the function makes it, and if the
    function returns it, writes it to an attribute, or gives it to another function that does so.
    Functions that only read the observation are not counted: the decision, values, checks,
    statistics. Copies are the places in memory that had the observation's numbers, as far as Python
    names refer to these places. Nothing is normalised, so that the numbers stay the same.
    """
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=12)
    settings = quick(
        "3DBall",
        hyperparameters={"batch_size": 64, "buffer_size": 128, "num_epoch": 1},
        network_settings={"hidden_units": 8, "num_layers": 1, "normalize": False},
        time_horizon=16,
        max_steps=300,
    )
    seen, decide = [], Learner.decide

    def noted(self, message):
        decided = decide(self, message)
        seen.append(decided.obs[0][3].tobytes())
        return decided

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "decide", noted)
        pipeline.train(build, settings, seed=1, run_dir=tmp_path / "first")
    followed = Followed(seen[5])
    before = sys.getprofile()
    try:
        threading.setprofile(followed)
        sys.setprofile(followed)
        pipeline.train(build, settings, seed=1, run_dir=tmp_path / "second")
    finally:
        threading.setprofile(None)
        sys.setprofile(before)
    assert followed.has_arrived
    way = "\n".join(f"{file} {name}" for file, name in followed.functions)
    assert len(followed.functions) <= MOST_FUNCTIONS, way
    assert len({file for file, _ in followed.functions}) <= MOST_FILES, way
    assert len(followed.blocks) <= MOST_BLOCKS, "\n".join(map(str, followed.blocks.values()))


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
def test_process_keeps_freed_memory_instead_of_returning_it_to_the_system():
    """Without `keep_freed_memory` the system clears 240,000 pages here."""
    assert int(python("-c", WORK).stdout) < 1000


SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scale.py"
MB = 4
"""Megabytes by which a process may grow: more is a leak at these sizes."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc return large blocks at once; else fragmentation would change the memory by 11 MB."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps", "sizes"),
    [
        ("agents", 500, ["--agents=300"]),
        ("behaviors", 750, ["--behaviors=6"]),
        ("vanishing", 5500, ["--agents=12"]),
    ],
)
def test_memory_of_trainer_and_environment_does_not_grow(case, steps, sizes):
    words = [f"--case={case}", "--mode=training", f"--steps={steps}", "--json", *sizes]
    done = python(SCRIPT, *words, **ALLOCATOR)
    memory = json.loads(done.stdout)
    for process in ("trainer_mb", "environment_mb"):
        early, late = memory[process]
        assert 20 < late < early + MB, (process, memory)
