"""Mean return of the scripted expert and of chance in built-in simulators.

    python benchmarks/yardsticks.py [NAME ...]

Chance is uniform over the actions that are not masked. Of each of 64 areas the first ten episodes
count, so that short episodes do not count more often than long ones.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from pipeline.simulators import registry

if TYPE_CHECKING:
    from pipeline.protocol.specs import ActionTuple, BehaviorSpec
    from pipeline.protocol.steps import DecisionSteps
    from pipeline.simulators.registry import Expert

N_AREAS, N_EPISODES, SEED = 64, 10, 1


def chance(spec: BehaviorSpec) -> Expert:
    """A policy that draws uniformly from what is allowed."""
    rng = np.random.default_rng(SEED)

    def act(steps: DecisionSteps) -> ActionTuple:
        action = spec.action_spec.random_action(len(steps), rng)
        for branch, mask in enumerate(steps.action_mask or ()):
            score = rng.random(mask.shape) - mask
            action.discrete[:, branch] = score.argmax(axis=1)
        return action

    return act


def episodes(name: str, policy: Expert | None) -> np.ndarray:
    """[N_AREAS * N_EPISODES, 3] return, length, and 1 if terminated; by chance without a policy."""
    simulator = registry.make(name, seed=SEED, n_agents=N_AREAS)
    ((behavior, spec),) = simulator.behavior_specs.items()
    act = policy or chance(spec)
    decisions, _ = simulator.reset()[behavior]
    gained, n_steps = np.zeros(N_AREAS), np.zeros(N_AREAS)
    ended = np.zeros(N_AREAS, dtype=np.int64)
    found = np.zeros((N_AREAS, N_EPISODES, 3))
    while ended.min() < N_EPISODES:
        decisions, terminals = simulator.step({behavior: act(decisions)})[behavior]
        n_steps += 1
        rows = terminals.agent_id
        gained += decisions.reward
        gained[rows] += terminals.reward
        counts = ended[rows] < N_EPISODES
        kept, number = rows[counts], ended[rows[counts]]
        found[kept, number, 0], found[kept, number, 1] = gained[kept], n_steps[kept]
        found[kept, number, 2] = ~terminals.interrupted[counts]
        ended[rows] += 1
        gained[rows], n_steps[rows] = decisions.reward[rows], 0
    simulator.close()
    return found.reshape(-1, 3)


if __name__ == "__main__":
    for name in sys.argv[1:] or registry.NAMES:
        for who, policy in (("expert", registry.expert(name)), ("chance", None)):
            found = episodes(name, policy)
            mean, length, terminated = found.mean(axis=0)
            sys.stdout.write(
                f"{name}, {who}: return {mean:.3f} ({found[:, 0].min():.3f} to "
                f"{found[:, 0].max():.3f}), length {length:.1f}, {terminated:.1%} terminated\n"
            )
