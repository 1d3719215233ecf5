"""What memory and attention cost: one decision, and one update, with and without them.

    python benchmarks/networks.py

Memory is that of ML-Agents' Hallway configuration: 108 numbers observed, two layers of 128, five
choices, `memory_size` 128, sequences of 64. Lists of entities are those of its Sorter: at most 20
of 23 numbers, 4 numbers of the agent itself, two layers of 128, three branches of three. Times are
processor time on one thread, the best of five rounds, so that other programs on the machine disturb
little.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algos.ppo import PPO
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.rollout import Rollout
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipeline.core.arrays import FloatArray

HALLWAY = BehaviorSpec([ObservationSpec.vector(108)], ActionSpec(0, (5,)))
OWN, MOST = ObservationSpec.vector(4), 20
ACTIONS = ActionSpec(0, (3, 3, 3))
SORTER = BehaviorSpec([ObservationSpec.entities(MOST, 23), OWN], ACTIONS)
NO_LIST = BehaviorSpec([OWN], ACTIONS)
ROUNDS = 5


def algorithm(spec: BehaviorSpec, *, memory: bool = False, **numbers: Any) -> PPO:
    """Return an untrained policy."""
    network: dict[str, Any] = {"hidden_units": 128, "num_layers": 2}
    if memory:
        network["memory"] = {"sequence_length": 64, "memory_size": 128}
    behavior = {"trainer_type": "ppo", "hyperparameters": numbers, "network_settings": network}
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    return PPO(spec, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def observations(spec: BehaviorSpec, n: int, entities: int = MOST) -> list[FloatArray]:
    """Return random observations of `n` agents, with `entities` entities in a list."""
    rng = np.random.default_rng(0)
    drawn = [
        rng.normal(size=(n, *obs_spec.shape)).astype(np.float32)
        for obs_spec in spec.observation_specs
    ]
    if len(drawn) > 1:
        drawn[0][:, entities:] = 0.0
    return drawn


def rollout(
    spec: BehaviorSpec, lengths: Sequence[int], *, entities: int = MOST, memory_size: int = 0
) -> Rollout:
    """Random experience in trajectories of these lengths, each one sequence."""
    rng = np.random.default_rng(0)
    n, trajectory_lengths = sum(lengths), np.array(lengths)
    branches = spec.action_spec.discrete_branches
    return Rollout(
        obs=observations(spec, n, entities),
        fields={
            "log_prob": np.full((n, len(branches)), -1.0, np.float32) * np.log(branches[0]),
            "continuous": np.zeros((n, 0), np.float32),
            "discrete": rng.integers(0, branches[0], (n, len(branches))),
            "allowed": np.ones((n, sum(branches)), np.bool_),
            "reward": rng.normal(size=n).astype(np.float32),
        },
        starts=np.cumsum(trajectory_lengths) - trajectory_lengths,
        lengths=trajectory_lengths,
        terminated=np.zeros(len(trajectory_lengths), np.bool_),
        next_obs=observations(spec, len(trajectory_lengths), entities),
        memory=np.zeros((len(trajectory_lengths), 1, memory_size), np.float32)
        if memory_size
        else None,
    )


def best(work: Callable[[], object], n: int) -> float:
    """Milliseconds of processor time that `work` takes."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(n):
            work()
        rounds.append((time.process_time() - began) / n)
    return min(rounds) * 1e3


def say(label: str, cells: Iterable[str]) -> None:
    """Write one line of a table."""
    sys.stdout.write(label.ljust(20) + "".join(cell.rjust(16) for cell in cells) + "\n")


def memory_costs() -> None:
    """Print both tables of memory."""
    numbers: dict[str, Any] = {"batch_size": 128, "buffer_size": 1024, "num_epoch": 3}
    kinds = {
        "without memory": algorithm(HALLWAY, **numbers),
        "shared_critic": algorithm(HALLWAY, memory=True, shared_critic=True, **numbers),
        "own critic": algorithm(HALLWAY, memory=True, **numbers),
    }
    say("decision, ms", kinds)
    for n in (1, 16, 64):
        acts = []
        for policy in kinds.values():
            memory = np.zeros((n, policy.memory_size), np.float32) if policy.memory_size else None
            acts.append(partial(policy.act, observations(HALLWAY, n), None, memory))
        say(f"{n} agents", [f"{best(act, 100):.3f}" for act in acts])
    say("update, ms", kinds)
    for label, lengths in {"16 episodes of 64": [64] * 16, "64 episodes of 16": [16] * 64}.items():
        updates = [
            partial(
                policy.update, rollout(HALLWAY, lengths, memory_size=policy.memory_size), step=0
            )
            for policy in kinds.values()
        ]
        say(label, [f"{best(update, 5):.1f}" for update in updates])


def attention_costs() -> None:
    """Print both tables of lists of entities."""
    numbers: dict[str, Any] = {"batch_size": 512, "buffer_size": 2048, "num_epoch": 3}
    columns = {"no list": (NO_LIST, algorithm(NO_LIST, **numbers), MOST)}
    with_list = algorithm(SORTER, **numbers)
    columns |= {f"{n} entities": (SORTER, with_list, n) for n in (0, 2, 10, 20)}
    say("decision, ms", columns)
    for n in (1, 16, 64):
        acts = [
            partial(policy.act, observations(spec, n, entities), None)
            for spec, policy, entities in columns.values()
        ]
        say(f"{n} agents", [f"{best(act, 50):.2f}" for act in acts])
    say("update, ms", columns)
    updates = [
        partial(policy.update, rollout(spec, [64] * 32, entities=entities), step=0)
        for spec, policy, entities in columns.values()
    ]
    say("2048 rows", [f"{best(update, 1):.0f}" for update in updates])


if __name__ == "__main__":
    torch.set_num_threads(1)
    memory_costs()
    attention_costs()
