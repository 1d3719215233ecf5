"""Microseconds that a built-in simulator takes per step, played by its scripted expert.

    python benchmarks/simulators.py [NAME ...]

Agents are those that decide at a step, on average. The expert's own time is left out. The lower
quartile over blocks of 20 steps is printed beside the median, because other work on the machine
only ever adds time.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from pipeline.simulators import registry


def step_times_us(name: str, n_blocks: int = 100, block: int = 20) -> tuple[np.ndarray, float]:
    """[n_blocks] mean time of a step in each block, episodes' beginnings included.

    Also the mean number of agents that decided at a step.
    """
    simulator = registry.make(name, seed=1)
    policies = {behavior: registry.expert(name, behavior) for behavior in simulator.behavior_specs}
    times, n_decisions = np.zeros((n_blocks, block)), 0
    steps = simulator.reset()
    for k in range(times.size):
        actions = {behavior: policies[behavior](steps[behavior][0]) for behavior in policies}
        n_decisions += sum(len(decisions) for decisions, _ in steps.values())
        start = time.perf_counter()
        steps = simulator.step(actions)
        times.flat[k] = time.perf_counter() - start
    simulator.close()
    return times.mean(axis=1) * 1e6, n_decisions / times.size


if __name__ == "__main__":
    for name in sys.argv[1:] or registry.NAMES:
        times, n_deciding = step_times_us(name)
        quartile, median = np.percentile(times, (25, 50))
        sys.stdout.write(
            f"{name}: {n_deciding:.1f} agents, {quartile:.0f} us per step "
            f"(median {median:.0f} us), {1e6 * n_deciding / quartile:.0f} agent steps/s\n"
        )
