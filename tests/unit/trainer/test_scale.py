"""Memory stays flat however many agents, behaviors, and agents that vanish there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreter import python

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
