"""What PPO's critic is taught at the end of a trajectory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.algos.ppo import PPO
from pipeline.data.rollout import Rollout
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

SPEC = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_continuous(1))


@pytest.mark.parametrize("terminated", [True, False])
def test_what_follows_the_last_row_counts_unless_the_task_ended(terminated):
    given = {"trainer_type": "ppo", "reward_signals": {"extrinsic": {"gamma": 0.5, "strength": 2}}}
    settings = load_run_settings(None, overrides={"behaviors": {"B": given}}).behaviors["B"]
    algorithm = PPO(SPEC, settings, seed=1, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    following = rng.normal(size=(2, 3)).astype(np.float32)
    rollout = Rollout(
        fields={
            "obs_0": rng.normal(size=(2, 3)).astype(np.float32),
            "continuous": np.zeros((2, 1), np.float32),
            "discrete": np.zeros((2, 0), np.int64),
            "log_prob": np.zeros((2, 1), np.float32),
            "reward": np.array([1.5, -0.5], np.float32),
        },
        starts=np.array([0, 1]),
        lengths=np.array([1, 1]),
        terminated=np.array([terminated, True]),
        next_obs=[following],
    )
    batch = algorithm._rows(rollout)
    with torch.no_grad():
        inputs = [torch.from_numpy(following)]
        later = algorithm.critic(inputs, algorithm.policy.actor(inputs))[:, 0]
    assert float(later[0].abs()) > 0.01
    expected = 2 * 1.5 + (0.0 if terminated else 0.5 * float(later[0]))
    assert float(batch.returns[0, 0]) == pytest.approx(expected, abs=1e-5)
    assert float(batch.returns[1, 0]) == pytest.approx(2 * -0.5, abs=1e-5)
