import numpy as np
import pytest
import torch
from test_ppo import rollout, trainer_settings

from pipeline.algos.finite_checks import refuse_non_finite_rollout
from pipeline.algos.ppo import PPO
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import TrainingError, UnityPolicyException

SPEC = BehaviorSpec([ObservationSpec.vector(3), ObservationSpec.vector(2)], ActionSpec(2, ()))


@pytest.fixture
def algorithm():
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    settings = trainer_settings(network_settings=network)
    return PPO(SPEC, settings, seed=1, device=torch.device("cpu"))


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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_error_names_a_reward_or_last_observation_that_is_not_finite(value):
    good = rollout(SPEC)
    refuse_non_finite_rollout(good, step=5)
    good.next_obs[1][0, 1] = value
    with pytest.raises(TrainingError, match="step 5: the environment gave observation 1 that is"):
        refuse_non_finite_rollout(good, step=5)
    good.fields["reward"][3] = value
    with pytest.raises(TrainingError, match="step 5: the environment gave a reward that is not"):
        refuse_non_finite_rollout(good, step=5)
