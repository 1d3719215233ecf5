"""Two behaviors in one run learn both, each with settings of its own."""

from __future__ import annotations

import pytest
from pairs import Pair
from toys import Chase, Corridor

import pipeline
from pipeline.envs.in_process import InProcessEnvironment

pytestmark = pytest.mark.learning


def test_two_behaviors_with_different_settings_learn_in_one_run(seed, tmp_path, note):
    common = {"trainer_type": "ppo", "reward_signals": {"extrinsic": {"gamma": 0.95}}}
    behaviors = {
        "One": common
        | {
            "hyperparameters": {"batch_size": 64, "buffer_size": 1024, "learning_rate": 2e-3},
            "network_settings": {"hidden_units": 32, "num_layers": 2},
            "max_steps": 20_000,
            "time_horizon": 32,
        },
        "Two": common
        | {
            "hyperparameters": {
                "batch_size": 128,
                "buffer_size": 768,
                "learning_rate": 3e-3,
                "num_epoch": 4,
            },
            "network_settings": {"hidden_units": 64, "num_layers": 1},
            "max_steps": 40_000,
            "time_horizon": 12,
        },
    }
    result = pipeline.train(
        InProcessEnvironment(Pair(Corridor(seed=seed), Chase(seed=seed))),
        {"behaviors": behaviors},
        seed=seed,
        run_dir=tmp_path,
    ).behaviors
    # who has learned nothing gets about 0.3 in `Corridor` and -6 in `Chase`
    note("two behaviors, discrete", result["One"].mean_reward, wanted=0.9, steps=20_000)
    note("two behaviors, continuous", result["Two"].mean_reward, wanted=-1.0, steps=40_000)
    assert result["One"].mean_reward >= 0.9
    assert result["Two"].mean_reward >= -1.0
    assert result["One"].n_updates < result["Two"].n_updates
