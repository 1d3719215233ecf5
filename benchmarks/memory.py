"""What memory costs: one decision, and one update, with and without a recurrent layer.

    python benchmarks/memory.py

Networks are those of ML-Agents' Hallway configuration: 108 numbers observed, two layers of 128,
five choices, `memory_size` 128, sequences of 64. Times are processor time on one thread, the best
of five rounds, so that other programs on the machine disturb little.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algos.ppo import PPO
from pipeline.data.rollout import Rollout
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SPEC = BehaviorSpec([ObservationSpec.vector(108)], ActionSpec(0, (5,)))
ROUNDS = 5


def algorithm(*, memory: bool, shared: bool = False) -> PPO:
    """A policy that has learned nothing."""
    network: dict[str, Any] = {"hidden_units": 128, "num_layers": 2}
    if memory:
        network["memory"] = {"sequence_length": 64, "memory_size": 128}
    numbers = {"batch_size": 128, "buffer_size": 1024, "num_epoch": 3, "shared_critic": shared}
    behavior = {"trainer_type": "ppo", "hyperparameters": numbers, "network_settings": network}
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    return PPO(SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def rollout(lengths: list[int], memory_size: int) -> Rollout:
    """Random experience in trajectories of these lengths, each one sequence."""
    rng = np.random.default_rng(0)
    n, each = sum(lengths), np.array(lengths)
    return Rollout(
        fields={
            "obs_0": rng.normal(size=(n, 108)).astype(np.float32),
            "log_prob": np.full((n, 1), -1.6, np.float32),
            "continuous": np.zeros((n, 0), np.float32),
            "discrete": rng.integers(0, 5, (n, 1)),
            "allowed": np.ones((n, 5), np.bool_),
            "reward": rng.normal(size=n).astype(np.float32),
        },
        starts=np.cumsum(each) - each,
        lengths=each,
        terminated=np.zeros(len(each), np.bool_),
        next_obs=[rng.normal(size=(len(each), 108)).astype(np.float32)],
        memory=np.zeros((len(each), 1, memory_size), np.float32) if memory_size else None,
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


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    kinds = {
        "without memory": algorithm(memory=False),
        "shared_critic": algorithm(memory=True, shared=True),
        "own critic": algorithm(memory=True),
    }
    say("decision, ms", kinds)
    for n in (1, 16, 64):
        obs = [np.random.default_rng(0).normal(size=(n, 108)).astype(np.float32)]
        acts = []
        for one in kinds.values():
            size = one.memory_size
            memory = np.zeros((n, size), np.float32) if size else None
            acts.append(partial(one.act, obs, None, memory))
        say(f"{n} agents", [f"{best(act, 100):.3f}" for act in acts])
    say("update, ms", kinds)
    shapes = {"16 episodes of 64": [64] * 16, "64 episodes of 16": [16] * 64}
    for label, lengths in shapes.items():
        updates = [
            partial(one.update, rollout(lengths, one.memory_size), step=0) for one in kinds.values()
        ]
        say(label, [f"{best(update, 5):.1f}" for update in updates])


def say(label: str, cells: Iterable[str]) -> None:
    """Write one line of a table."""
    sys.stdout.write(label.ljust(20) + "".join(cell.rjust(16) for cell in cells) + "\n")


if __name__ == "__main__":
    main()
