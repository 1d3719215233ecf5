"""Microseconds that a built-in simulator takes per step, played by its scripted expert.

    python benchmarks/simulators.py [NAME ...]

The expert's own time is left out. The lower quartile over blocks of 20 steps is printed beside the
median, because other work on the machine only ever adds time.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from pipeline.simulators import registry


def step_times_us(name: str, n_blocks: int = 100, block: int = 20) -> np.ndarray:
    """[n_blocks] mean time of a step in each block, episodes' beginnings included."""
    simulator, policy = registry.make(name, seed=1), registry.expert(name)
    times = np.zeros((n_blocks, block))
    ((behavior, (decisions, _)),) = simulator.reset().items()
    for k in range(times.size):
        actions = {behavior: policy(decisions)}
        start = time.perf_counter()
        decisions, _ = simulator.step(actions)[behavior]
        times.flat[k] = time.perf_counter() - start
    simulator.close()
    return times.mean(axis=1) * 1e6


if __name__ == "__main__":
    for name in sys.argv[1:] or registry.NAMES:
        times = step_times_us(name)
        quartile, median = np.percentile(times, (25, 50))
        n_agents = registry.entry(name).n_agents
        sys.stdout.write(
            f"{name}: {n_agents} agents, {quartile:.0f} us per step (median {median:.0f} us), "
            f"{n_agents / quartile * 1e6:,.0f} agent steps/s\n"
        )
