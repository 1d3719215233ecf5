"""Microseconds that a simulator takes per step, without a trainer and without the wire.

    python benchmarks/simulators.py [NAME ...] [--copies N] [--cpu]

NAME is a built-in simulator, played by its scripted expert; `gymnasium:ID` or `pettingzoo:ID`,
played at random within its masks; or the path of an executable, played so over the wire. The
player's own time is left out. The lower quartile over blocks of 20 steps is printed beside the
median, because other work on the machine only ever adds time. With --cpu the processor time of this
process is measured, which other work hardly changes; that of an executable is not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.unity import UnityEnvironment
from pipeline.simulators import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.core.specs import ActionSpec, ActionTuple
    from pipeline.core.steps import DecisionSteps
    from pipeline.envs.base import BaseEnv


def opened(name: str, copies: int | None) -> BaseEnv:
    """The environment that the command line names."""
    source, _, env_id = name.partition(":")
    if source in registry.BRIDGES:
        return InProcessEnvironment(registry.make(source, seed=1, n_agents=copies, id=env_id))
    if name in registry.NAMES:
        return InProcessEnvironment(registry.make(name, seed=1, n_agents=copies))
    args = () if copies is None else ("--num-agents", str(copies))
    return UnityEnvironment(Path(name), seed=1, no_graphics=True, additional_args=args)


def allowed(decisions: DecisionSteps, spec: ActionSpec, rng: np.random.Generator) -> ActionTuple:
    """Uniform actions that no mask forbids."""
    action = spec.random_action(len(decisions), rng)
    for branch, mask in enumerate(decisions.action_mask or ()):
        draws = rng.random(mask.shape)
        draws[mask] = -1.0
        action.discrete[:, branch] = draws.argmax(axis=1)
    return action


def step_times_us(
    env: BaseEnv,
    policy: Callable[[str], Callable[[DecisionSteps], ActionTuple]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    n_blocks: int = 100,
    block: int = 20,
) -> tuple[np.ndarray, float]:
    """[n_blocks] mean time of a step in each block, episodes' beginnings included.

    Beside it the mean number of agents that decide in a step.
    """
    rng = np.random.default_rng(0)
    times, n_decisions = np.zeros((n_blocks, block)), 0
    env.reset()
    for k in range(times.size):
        for behavior, spec in env.behavior_specs.items():
            decisions, _ = env.get_steps(behavior)
            n_decisions += len(decisions)
            if len(decisions):
                acting = (
                    policy(behavior)(decisions)
                    if policy
                    else allowed(decisions, spec.action_spec, rng)
                )
                env.set_actions(behavior, acting)
        start = clock()
        env.step()
        times.flat[k] = clock() - start
    return times.mean(axis=1) * 1e6, n_decisions / times.size


def main() -> None:
    """Measure each environment in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=registry.NAMES, metavar="NAME")
    parser.add_argument("--copies", type=int, default=None)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    for name in arguments.names:
        policy = cache(partial(registry.expert, name)) if name in registry.NAMES else None
        with opened(name, arguments.copies) as env:
            times, n_agents = step_times_us(env, policy, clock)
        quartile, median = np.percentile(times, (25, 50))
        sys.stdout.write(
            f"{name}: {n_agents:.0f} agents, {quartile:.0f} us per step (median {median:.0f} us), "
            f"{n_agents / quartile * 1e6:,.0f} agent steps/s (median "
            f"{n_agents / median * 1e6:,.0f})\n"
        )


if __name__ == "__main__":
    main()
