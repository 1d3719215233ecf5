"""A learner keeps up with agents that leave their group early, come late, and change their ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.simulators import registry
from pipeline.trainer.learner import Learner


@pytest.mark.parametrize(
    ("name", "behavior", "n_agents"),
    [("couriers", "Couriers", 5), ("push_together", "PushTogether", 6)],
)
def test_every_decision_becomes_one_row_and_no_slot_is_lost(name, behavior, n_agents, quick):
    settings = quick(behavior, max_steps=100_000, time_horizon=16).for_behavior(behavior)
    qualified = f"{behavior}?team=0"
    with WorkerSet(
        [InProcessEnvironment(registry.make(name, seed=2, n_agents=n_agents))]
    ) as workers:
        workers.reset()
        learner = Learner(
            behavior,
            workers.behavior_specs[qualified],
            settings,
            seed=1,
            device=torch.device("cpu"),
        )
        n_decisions, ids = 0, set()
        for _ in range(600):
            steps = workers.get_steps(qualified)
            decided = learner.decide(steps)
            workers.set_actions(qualified, decided.actions)
            learner.absorb(steps, team=qualified)
            learner.remember(steps, decided, team=qualified)
            ids |= set(steps[0][0].agent_id.tolist())
            n_decisions += len(steps[0][0])
            workers.step()
    trajectories = learner.trajectories
    n_open = int(trajectories._cursor.sum() + trajectories._waiting.sum())
    assert trajectories.n_closed + n_open == n_decisions
    assert learner.slots.n_slots <= n_agents
    assert len(ids) >= 2 * n_agents
    rollout = trajectories.rollout()
    assert rollout.terminated.sum() >= n_agents
    assert np.isfinite(rollout.fields["reward"]).all()
