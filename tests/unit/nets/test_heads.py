"""Action heads and value heads equal hand-worked or slow versions."""

import math

import pytest
import torch

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.nets.actor_critic import ActionHeads, Critic
from pipeline.nets.distributions import gaussian_entropy
from pipeline.nets.encoder import Normalizers, ObservationEncoder
from pipeline.nets.group_critic import GroupCritic, GroupLayout
from pipeline.nets.memory import Memory
from pipeline.nets.squashed import SquashedHeads
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

HYBRID = ActionSpec(2, (3, 2))


def with_log_sigma(heads, *values):
    with torch.no_grad():
        heads.log_sigma.copy_(torch.tensor([values]))
    return heads


def test_initial_weights_of_action_heads_have_the_stated_deviations_and_sigma_is_1():
    torch.manual_seed(0)
    heads = ActionHeads(300, ActionSpec(40, (50, 60)))
    gains = [(heads.mu, 0.2), *((branch, 0.1) for branch in heads.branches)]
    for layer, gain in gains:
        deviation = float(layer.weight.detach().std())
        assert deviation == pytest.approx(gain / math.sqrt(300), rel=0.03)
    assert heads.log_sigma.tolist() == [[0.0] * 40]
    squashed = SquashedHeads(300, ActionSpec(40, ()))
    for layer in (squashed.mu, squashed.spread):
        assert float(layer.weight.detach().std()) == pytest.approx(0.2 / math.sqrt(300), rel=0.03)


def test_most_likely_action_is_a_third_of_the_mean_or_the_tanh_of_a_squashed_mean():
    hidden = torch.randn(4, 5)
    heads = ActionHeads(5, HYBRID)
    torch.testing.assert_close(heads.mean_action(hidden), heads.mu(hidden) / 3.0)
    squashed = SquashedHeads(5, HYBRID)
    torch.testing.assert_close(squashed.mean_action(hidden), torch.tanh(squashed.mu(hidden)))
    for kind in (ActionHeads, SquashedHeads):
        assert kind(5, ActionSpec(0, (3,))).mean_action(hidden) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_and_entropy_of_drawn_actions_equal_the_results_of_evaluate(
    deterministic,
):
    torch.manual_seed(0)
    heads = with_log_sigma(ActionHeads(5, HYBRID), 0.3, -0.9)
    hidden, allowed = torch.randn(6, 5), torch.ones(6, 5, dtype=torch.bool)
    allowed[::2, 1] = False
    noise = None if deterministic else heads.noise(6, torch.Generator().manual_seed(1))
    drawn = heads.choose(hidden, allowed, noise)
    log_prob, entropy = heads.evaluate(hidden, drawn.continuous, drawn.discrete, allowed)
    torch.testing.assert_close(drawn.log_prob, log_prob)
    torch.testing.assert_close(drawn.entropy.mean(), entropy)
    assert not (drawn.discrete[::2, 0] == 1).any()
    only_continuous = with_log_sigma(ActionHeads(5, ActionSpec(2, ())), 0.3, -0.9)
    choice = only_continuous.choose(hidden, None, None if noise is None else noise[:1])
    torch.testing.assert_close(choice.entropy, gaussian_entropy(torch.tensor([[0.3, -0.9]])))


def test_squashed_log_sigma_stays_between_minus_twenty_and_two():
    heads = SquashedHeads(1, ActionSpec(2, ()))
    with torch.no_grad():
        heads.spread.weight.copy_(torch.tensor([[1e3], [1.0]]))
    _, log_sigma = heads.gaussian(torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(log_sigma, torch.tensor([[2.0, 1.0], [-20.0, -1.0]]))


@pytest.mark.parametrize("kind", [Critic, GroupCritic])
def test_the_value_head_of_each_signal_has_the_initial_weights_of_a_single_head(kind):
    """Xavier's bound of one layer with 300 heads would be a sixth of a single head's bound."""
    torch.manual_seed(0)
    spec = BehaviorSpec([ObservationSpec.vector(3)], HYBRID)
    critic = kind(spec, NetworkSettings(hidden_units=4), [f"signal {i}" for i in range(300)])
    weight = critic.heads.weight.detach()
    bound = math.sqrt(6.0 / (weight.shape[1] + 1))
    assert 0.98 * bound < float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)


def test_each_gate_of_a_recurrent_layer_with_one_unit_has_the_xavier_bound_of_a_single_gate():
    torch.manual_seed(0)
    bound = math.sqrt(6.0 / 2.0)
    weights = torch.stack([Memory(1, 2).lstm.weight_ih_l0.detach().abs() for _ in range(200)])
    for largest in weights.amax(0):
        assert 0.95 * bound < float(largest) <= bound


def test_the_group_critic_reads_memories_of_members_after_their_observations():
    torch.manual_seed(0)
    settings = NetworkSettings(hidden_units=8, memory=MemorySettings(memory_size=4))
    specs = [BehaviorSpec([ObservationSpec.vector(n)], HYBRID) for n in (3, 7)]
    critic = GroupCritic(specs[0], settings, ["extrinsic"])
    wider = GroupCritic(specs[1], NetworkSettings(hidden_units=8), ["extrinsic"])
    wider.load_state_dict(critic.state_dict())
    obs, memory, actions = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6, 7)
    groups = GroupLayout(size=3, wanted=torch.tensor([0, 1, 3, 4, 6]))
    values = critic([obs], memory, actions, groups)
    assert values.std() > 1e-4
    expected = wider([torch.cat((obs, memory), dim=1)], None, actions, groups)
    torch.testing.assert_close(values, expected)


def test_normalizers_are_truthy_with_a_vector_and_falsy_with_only_an_image_or_if_disabled():
    vector, image = ObservationSpec.vector(3), ObservationSpec.visual(3, 8, 8)
    assert Normalizers([image, vector], enabled=True)
    assert not Normalizers([image], enabled=True)
    assert not Normalizers([image, vector], enabled=False)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_goal_generates_the_weights_of_the_last_layer(num_layers):
    goal = ObservationSpec.vector(2, "goal", ObservationType.GOAL_SIGNAL)
    settings = NetworkSettings(hidden_units=6, num_layers=num_layers)
    body = ObservationEncoder([ObservationSpec.vector(3), goal], settings)
    layers = [name for name in body.state_dict() if name.startswith("dense.") and "bias" in name]
    assert len(layers) == num_layers - 1
    assert body([torch.randn(4, 3), torch.randn(4, 2)]).shape == (4, 6)
