"""Every algorithm together with every other part that it may be asked to work with."""

from __future__ import annotations

import pytest
from answers import Answer

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.export.policy import OnnxPolicy
from pipeline.simulators import registry
from pipeline.stages.export import publish
from pipeline.trainer.checkpoints.file import load_checkpoint

pytestmark = pytest.mark.slow

ON_POLICY = {"batch_size": 64, "buffer_size": 512}
OFF_POLICY = {
    "batch_size": 64,
    "buffer_size": 2000,
    "buffer_init_steps": 200,
    "steps_per_update": 20,
    "reward_signal_steps_per_update": 20,
}
ALGORITHMS = {"ppo": ON_POLICY, "poca": ON_POLICY, "sac": OFF_POLICY}
NETWORK = {"hidden_units": 16, "num_layers": 1}
MEMORY = NETWORK | {"memory": {"sequence_length": 4, "memory_size": 8}}


def trained(algorithm, environment, folder, *, steps=2500, **changes):
    (name,) = (qualified.partition("?")[0] for qualified in list(environment.behavior_specs)[:1])
    behavior = {
        "trainer_type": algorithm,
        "hyperparameters": ALGORITHMS[algorithm],
        "network_settings": NETWORK,
        "max_steps": steps,
        "time_horizon": 16,
        "summary_freq": 500,
        **changes,
    }
    result = pipeline.train(
        InProcessEnvironment(environment),
        {"behaviors": {name: behavior}},
        seed=1,
        run_dir=folder,
    ).behaviors[name]
    assert result.steps >= steps
    assert result.n_updates > 1
    publish(result.checkpoint, folder)
    OnnxPolicy(folder / f"{name}.onnx")
    return result


@pytest.mark.parametrize("network", [NETWORK, MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_self_play(algorithm, network, tmp_path):
    games = {"save_steps": 800, "team_change": 1200, "swap_steps": 300, "window": 3}
    pong = registry.make("pong", seed=1)
    result = trained(algorithm, pong, tmp_path, self_play=games, network_settings=network)
    assert result.elo not in (None, 1200.0)


@pytest.mark.parametrize("observation", ["vector", "memory"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_curiosity_and_rnd_beside_the_extrinsic_reward(algorithm, observation, tmp_path):
    signals = {
        "extrinsic": {"gamma": 0.9, "strength": 1.0},
        "curiosity": {"gamma": 0.9, "strength": 0.02},
        "rnd": {"gamma": 0.9, "strength": 0.01},
    }
    network = MEMORY if observation == "memory" else NETWORK
    toy = Answer("hybrid", observation, seed=1, team_size=2)
    result = trained(algorithm, toy, tmp_path, reward_signals=signals, network_settings=network)
    state = load_checkpoint(result.checkpoint)["learner"]["algorithm"]["signals"]
    for name in ("curiosity", "rnd"):
        moments = state[name]["optimizer"]["state"][0]
        assert float(moments["step"]) > 1
        assert moments["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("observation", ["vector", "memory"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learning_in_a_thread(algorithm, observation, tmp_path):
    network = MEMORY if observation == "memory" else NETWORK
    toy = Answer("hybrid", observation, seed=1, team_size=2)
    trained(algorithm, toy, tmp_path, threaded=True, network_settings=network)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_that_share_their_reward(algorithm, tmp_path):
    trained(algorithm, registry.make("push_together", seed=1), tmp_path, steps=1500)
