from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.algos.finite_checks import refuse_non_finite_rollout
from pipeline.algos.ppo import PPO
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.rollout import Rollout
from pipeline.errors import TrainingError, UnityPolicyException
from pipeline.settings import load_run_settings

SPEC = BehaviorSpec([ObservationSpec.vector(3), ObservationSpec.vector(2)], ActionSpec(2, ()))


@pytest.fixture
def algorithm():
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    params = {"num_epoch": 1, "batch_size": 64}  # or the next minibatch's loss is not finite, too
    behavior = {"trainer_type": "ppo", "hyperparameters": params, "network_settings": network}
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    return PPO(SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def seen(value: float = 0.0) -> list[np.ndarray]:
    obs = [np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32)]
    obs[1][2, 1] = value
    return obs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_error_before_a_decision_names_an_observation_that_is_not_finite(algorithm, value):
    with pytest.raises(UnityPolicyException, match="observation 1 has a number that is not finite"):
        algorithm.act(seen(value), None)


def test_finite_observations_with_overflowing_squares_are_accepted(algorithm):
    assert np.isfinite(algorithm.act(seen(3e38), None).action.continuous).all()


@pytest.mark.parametrize("part", ["mu.bias", "log_sigma"])
def test_a_policy_that_has_diverged_sends_no_action(algorithm, part):
    parameters = dict(algorithm.policy.actor.heads.named_parameters())
    parameters[part].data.view(-1)[1] = torch.nan
    with pytest.raises(UnityPolicyException, match="the policy's action is not finite"):
        algorithm.act(seen(), None)


def rollout(algorithm, n=64):
    obs = [np.ones((n, 3), np.float32), np.ones((n, 2), np.float32)]
    decision = algorithm.act(obs, None)
    return Rollout(
        obs=obs,
        fields={**decision.rows, "reward": np.linspace(0, 1, n, dtype=np.float32)},
        starts=np.zeros(1, np.int64),
        lengths=np.full(1, n),
        terminated=np.zeros(1, np.bool_),
        next_obs=[values[:1] for values in obs],
    )


def test_gradient_that_is_not_finite_stops_the_run_and_names_step_and_tensor(algorithm):
    weight = algorithm.critic.heads.weight
    experience = rollout(algorithm)
    weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(
        TrainingError, match=r"step 640: the PPO gradient of critic\.heads\.weight is not finite"
    ):
        algorithm.update(experience, step=640)


def test_weights_that_are_not_finite_stop_the_run_and_name_step_and_tensor(algorithm, monkeypatch):
    experience = rollout(algorithm)
    step = algorithm.optimizer.step

    def overflows(**options):
        step(**options)
        algorithm.policy.actor.heads.mu.bias.data[1] = torch.inf

    monkeypatch.setattr(algorithm.optimizer, "step", overflows)
    with pytest.raises(
        TrainingError, match=r"step 7: the PPO weight of policy\.actor\.heads\.mu\.bias"
    ):
        algorithm.update(experience, step=7)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_error_names_a_reward_or_last_observation_that_is_not_finite(algorithm, value):
    good = rollout(algorithm)
    refuse_non_finite_rollout(good, step=5)
    good.next_obs[1][0, 1] = value
    with pytest.raises(TrainingError, match="step 5: the environment gave observation 1 that is"):
        refuse_non_finite_rollout(good, step=5)
    good.fields["reward"][3] = value
    with pytest.raises(TrainingError, match="step 5: the environment gave a reward that is not"):
        refuse_non_finite_rollout(good, step=5)
