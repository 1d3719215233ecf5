"""Networks: initial weights, normalisation, distributions, goal conditioning."""

import math

import numpy as np
import pytest
import torch
from interpreter import python

from pipeline.errors import SettingsError
from pipeline.nets import encoder as encoder_module
from pipeline.nets.distributions import (
    categorical_entropy,
    gaussian_entropy,
    gaussian_log_prob,
    gumbel_scores,
    masked_log_softmax,
)
from pipeline.nets.encoder import HyperLayer
from pipeline.nets.layers import RunningNormalizer, linear
from pipeline.nets.vision import ConvolutionEncoder, observation_encoder
from pipeline.settings.trainer.schema import ENCODERS


def test_dense_weights_have_kaiming_deviation_times_gain_and_zero_bias():
    torch.manual_seed(0)
    layer = linear(400, 300, gain=0.2)
    assert float(layer.weight.detach().std()) == pytest.approx(0.2 / math.sqrt(400), rel=0.02)
    assert float(layer.bias.detach().abs().max()) == 0.0


@pytest.mark.parametrize("sizes", [(1, 7, 30), (30, 7, 1)])
def test_normalizer_uses_mean_and_deviation_of_all_rows_and_one_additional_initial_row(sizes):
    rng = np.random.default_rng(1)
    normalizer = RunningNormalizer(4)
    batches = [
        rng.normal([5, -2, 0, 1e4], [1, 10, 0.1, 0.1], (n, 4)).astype(np.float32) for n in sizes
    ]
    for rows in batches:
        normalizer.update(torch.from_numpy(rows))
    # Far from 0 is more than 5 deviations of the first rows and the imagined row.
    first = batches[0].astype(np.float64)
    center = first.mean(0)
    spread = np.sqrt((((first - center) ** 2).sum(0) + 1) / (len(first) + 1))
    imagined = np.where(np.abs(center) > 5 * spread, center, 0)
    assert {bool(moved) for moved in imagined != 0} == {True, False}
    everything = np.concatenate([first, *batches[1:]])
    n = 1 + len(everything)
    mean = (imagined + everything.sum(0)) / n
    squared = 1 + (imagined - mean) ** 2 + ((everything - mean) ** 2).sum(0)
    x = np.array([[5.5, -20.0, 100.0, 1e4 + 0.1]], dtype=np.float32)
    expected = np.clip((x - mean) / np.sqrt(squared / n), -5, 5)
    # Of 10,000, float32 keeps three digits after the point.
    np.testing.assert_allclose(
        normalizer(torch.from_numpy(x)).numpy(), expected, rtol=1e-4, atol=2e-3
    )


def test_normaliser_that_was_used_before_scales_by_the_statistics_loaded_last():
    used, other = RunningNormalizer(2), RunningNormalizer(2)
    x = torch.tensor([[1.0, -2.0]])
    used(x)
    other.update(torch.tensor([[3.0, 1.0], [5.0, -1.0]]))
    used.load_state_dict(other.state_dict())
    assert torch.equal(used(x), other(x))
    # An opponent loads another snapshot after it has acted.
    other.update(torch.tensor([[9.0, 9.0]]))
    used.load_state_dict(other.state_dict())
    assert torch.equal(used(x), other(x))


def test_gaussian_log_prob_and_entropy_equal_torch_distributions():
    mu, log_sigma = torch.randn(5, 2), torch.tensor([[0.3, -0.7]])
    action = torch.randn(5, 2)
    normal = torch.distributions.Normal(mu, log_sigma.exp())
    log_prob = gaussian_log_prob(action=action, mu=mu, log_sigma=log_sigma)
    torch.testing.assert_close(log_prob, normal.log_prob(action))
    torch.testing.assert_close(gaussian_entropy(log_sigma), normal.entropy().mean(-1)[:1])


def test_categorical_entropy_of_a_uniform_branch_is_the_logarithm_of_its_size():
    log_probs = masked_log_softmax(torch.zeros(1, 4), None)
    assert float(categorical_entropy(log_probs)) == pytest.approx(math.log(4))


def test_drawn_choices_have_the_stated_probabilities():
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    generator = torch.Generator().manual_seed(0)
    waiting = torch.empty(20_000, 3).exponential_(generator=generator)
    drawn = gumbel_scores(probabilities.log().expand(20_000, 3), waiting).argmax(-1)
    frequencies = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(frequencies, probabilities, atol=0.015, rtol=0)


MINIMUM_SIDE = {"simple": 20, "nature_cnn": 36, "match3": 5, "resnet": 15, "fully_connected": 1}


@pytest.mark.parametrize("kind", sorted(ENCODERS.ours))
def test_observation_encoder_accepts_its_smallest_image_and_refuses_a_smaller_image(kind):
    side = MINIMUM_SIDE[kind]
    encoder = observation_encoder(kind, (3, side, side), 16)
    assert encoder(torch.zeros(2, 3, side, side)).shape == (2, 16)
    if side > 1:
        names = ", ".join(name for name in ENCODERS if MINIMUM_SIDE[name] < side)
        names = rf"network_settings\.vis_encode_type can be one of: {names}; fully_connected"
        match = rf"The min dimension is {side}; {names} computes the least\.$"
        with pytest.raises(SettingsError, match=match):
            observation_encoder(kind, (3, side, side - 1), 16)


def test_encoder_inherits_minimum_side_unless_the_subclass_defines_other_layers():
    class Stated(ConvolutionEncoder):
        minimum_side = 50
        layers = ((4, 3, 1),)

    class Child(Stated):
        pass

    class Deeper(Stated):
        layers = ((4, 3, 2), (4, 3, 2))

    assert (Stated.minimum_side, Child.minimum_side, Deeper.minimum_side) == (50, 50, 7)


def test_weights_shared_by_rows_with_equal_goals_give_the_results_of_separate_weights(monkeypatch):
    torch.manual_seed(1)
    layer = HyperLayer(2, 8, 5, 16)
    x = torch.randn(12, 8)
    goal = torch.eye(2)[torch.randint(0, 2, (12,))]
    shared = layer(x, goal)
    monkeypatch.setattr(encoder_module, "FEW_GOALS", 0)
    torch.testing.assert_close(shared, layer(x, goal), atol=1e-6, rtol=1e-5)


def test_the_goal_of_every_row_has_a_separate_derivative_even_if_goals_are_equal():
    torch.manual_seed(1)
    layer = HyperLayer(3, 8, 5, 16)
    x, goal = torch.randn(6, 8), torch.rand(2, 3)[[0, 1, 0, 0, 1, 1]].requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, goal).square().sum(), goal)
    for row in range(len(x)):
        single_goal = goal[row : row + 1].detach().requires_grad_()
        hidden = torch.nn.functional.layer_norm(layer.goal(single_goal), (16,))
        y = x[row] @ layer.weights(hidden).view(8, 5) + layer.bias
        (expected,) = torch.autograd.grad((y * y.sigmoid()).square().sum(), single_goal)
        torch.testing.assert_close(gradient[row], expected[0])


LEARNING = """
import sys
import torch
from pipeline.algos.ppo import PPO
from pipeline.algos.bc import BehavioralCloning
from pipeline.nets.fast.adam import FlatAdam

layer = torch.nn.Linear(2, 1)
optimizer = FlatAdam(layer.parameters(), learning_rate=0.1)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step(max_norm=1.0)
print({"torch._dynamo"} & set(sys.modules))
"""
ON_META = """
import sys
import torch
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.algos.poca import POCA
from pipeline.algos.xqc import XQC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

vector, image = ObservationSpec.vector(4), ObservationSpec.visual(3, 24, 24)
spec = BehaviorSpec([vector, image], ActionSpec(2, (3,)))
network = NetworkSettings(hidden_units=8, normalize=True, memory=MemorySettings(memory_size=8))
with torch.device("meta"):
    for algorithm in (PPO, SAC, POCA):
        algorithm.policy_for(spec, network)
    XQC.policy_for(spec, NetworkSettings(hidden_units=8, normalize=True))
print({"torch._dynamo", "sympy"} & set(sys.modules))
"""


@pytest.mark.parametrize("program", [LEARNING, ON_META], ids=["learning", "networks on meta"])
def test_neither_learning_nor_making_networks_on_meta_imports_the_compiler_of_torch(program):
    """The import takes a second; each export and evaluation makes its networks on `meta` first."""
    assert python("-c", program).stdout.split() == ["set()"]
