"""What attention costs: one decision, and one update, by the number of entities.

    python benchmarks/attention.py

Networks are those of ML-Agents' Sorter configuration: at most 20 entities of 23 numbers, 4 numbers
of the agent itself, two layers of 128, three branches of three. Times are processor time on one
thread, the best of five rounds, so that other programs on the machine disturb little.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from memory import best, say

from pipeline.algos.ppo import PPO
from pipeline.data.rollout import Rollout
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

OWN, MOST = ObservationSpec.vector(4), 20
ACTIONS = ActionSpec(0, (3, 3, 3))
LENGTH, N_ROWS = 64, 2048


def algorithm(*, entities: bool) -> PPO:
    """A policy that has learned nothing."""
    specs = [ObservationSpec.entities(MOST, 23), OWN] if entities else [OWN]
    numbers = {"batch_size": 512, "buffer_size": N_ROWS, "num_epoch": 3}
    network = {"hidden_units": 128, "num_layers": 2}
    behavior = {"trainer_type": "ppo", "hyperparameters": numbers, "network_settings": network}
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    spec = BehaviorSpec(specs, ACTIONS)
    return PPO(spec, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def observations(n: int, entities: int | None) -> list[np.ndarray]:
    """Of n agents that see so many entities each, or None for none in the specification."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(n, 4)).astype(np.float32)
    if entities is None:
        return [own]
    values = rng.normal(size=(n, MOST, 23)).astype(np.float32)
    values[:, entities:] = 0.0
    return [values, own]


def rollout(entities: int | None) -> Rollout:
    """Random experience in trajectories of the same length."""
    rng = np.random.default_rng(0)
    obs = observations(N_ROWS, entities)
    n = N_ROWS // LENGTH
    return Rollout(
        fields={
            **{f"obs_{i}": values for i, values in enumerate(obs)},
            "log_prob": np.full((N_ROWS, 3), -1.1, np.float32),
            "continuous": np.zeros((N_ROWS, 0), np.float32),
            "discrete": rng.integers(0, 3, (N_ROWS, 3)),
            "allowed": np.ones((N_ROWS, 9), np.bool_),
            "reward": rng.normal(size=N_ROWS).astype(np.float32),
        },
        starts=np.arange(n) * LENGTH,
        lengths=np.full(n, LENGTH),
        terminated=np.zeros(n, np.bool_),
        next_obs=observations(n, entities),
    )


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    with_entities, without = algorithm(entities=True), algorithm(entities=False)
    columns = {"no list": None, **{f"{n} entities": n for n in (0, 2, 10, 20)}}
    say("decision, ms", columns)
    for n in (1, 16, 64):
        acts = [
            partial((without if e is None else with_entities).act, observations(n, e), None)
            for e in columns.values()
        ]
        say(f"{n} agents", [f"{best(act, 50):.2f}" for act in acts])
    say("update, ms", columns)
    updates = [
        partial((without if e is None else with_entities).update, rollout(e), step=0)
        for e in columns.values()
    ]
    say(f"{N_ROWS} rows", [f"{best(update, 1):.0f}" for update in updates])


if __name__ == "__main__":
    main()
