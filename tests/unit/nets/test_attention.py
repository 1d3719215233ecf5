"""Variable-length observations: attention equals a slow version; unused rows have no effect."""

import math

import numpy as np
import pytest
import reference
import torch

from pipeline.core.specs import DimensionProperty, ObservationSpec, ObservationType
from pipeline.errors import SettingsError
from pipeline.nets.attention import EntityEncoder, ResidualSelfAttention, is_padding, softmax_short
from pipeline.nets.encoder import ObservationEncoder
from pipeline.settings.trainer.schema import NetworkSettings

ENTITIES, VECTOR = ObservationSpec.entities, ObservationSpec.vector
SMALL = NetworkSettings(hidden_units=16)


def encoder(own_size, entity_sizes, seed=0):
    """Set weights so large that attention is far from uniform, and biases other than 0."""
    torch.manual_seed(seed)
    model = EntityEncoder(own_size, entity_sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0).add_(0.1 * torch.randn_like(parameter))
    return model


def crowd(counts, most, size, seed=1):
    """Return [B, most, size] with the given number of entities per row, then zeros."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (len(counts), most, size))
    values[np.arange(most) >= np.array(counts)[:, None]] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def slowly(model, self_obs, observations):
    """Return outputs by the formulas in float64, one agent and one entity at a time, no padding."""
    lists = zip(*(values.double().numpy() for values in observations), strict=True)
    fixed = [None] * len(observations[0]) if self_obs is None else self_obs.double().numpy()
    agents = zip(fixed, lists, strict=True)
    return np.array([reference.attention(model, own, entities) for own, entities in agents])


CASES = {
    "own numbers": (3, [5], [[0, 1, 4, 6]]),
    "entities only": (0, [5], [[2, 6, 0, 1]]),
    "two lists": (3, [5, 2], [[0, 1, 4, 0], [3, 0, 7, 0]]),
    "two lists of one size": (3, [5, 5], [[0, 1, 4, 0], [3, 0, 7, 0]]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_a_slow_implementation_for_all_positions_of_unused_rows(name):
    own_size, sizes, counts = CASES[name]
    model = encoder(own_size, sizes)
    self_obs = torch.randn(4, own_size) if own_size else None
    observations = [crowd(c, 8, n, seed=i) for i, (c, n) in enumerate(zip(counts, sizes))]  # noqa: B905
    expected = slowly(model, self_obs, observations)
    for order in (torch.arange(8), torch.randperm(8), torch.randperm(8)):
        output = model(self_obs, [values[:, order] for values in observations]).detach().numpy()
        np.testing.assert_allclose(output, expected, atol=2e-5)
    assert np.abs(output[2] - output[1]).max() > 0.1


@pytest.mark.parametrize("counts", [[0, 3, 20], [0, 0, 0], [1, 2, 3]])
def test_unused_rows_do_not_change_results_whether_they_are_computed_or_skipped(
    counts, monkeypatch
):
    """All rows are computed in exported models and on devices other than the CPU."""
    model, self_obs, values = encoder(4, [6]), torch.randn(3, 4), crowd(counts, 20, 6)
    short = model(self_obs, [values])
    longer = model(self_obs, [torch.cat((values, torch.zeros(3, 15, 6)), dim=1)])
    torch.testing.assert_close(longer, short, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr("pipeline.nets.attention._columns_in_use", lambda padding: len(padding[0]))
    torch.testing.assert_close(model(self_obs, [values]), short, atol=1e-6, rtol=1e-5)


def test_an_entity_with_a_sum_of_squares_below_the_threshold_is_an_unused_row():
    values = torch.tensor([[[0.09, 0.0], [0.0, -0.11], [0.08, 0.08], [0.0, 0.0]]])
    assert is_padding(values).tolist() == [[True, False, False, True]]


def test_without_entities_the_results_are_zeros_and_the_gradients_are_finite():
    model = encoder(4, [6])
    self_obs = torch.randn(2, 4, requires_grad=True)
    result = model(self_obs, [torch.zeros(2, 7, 6)])
    assert result.abs().max() == 0.0
    (result.sum() + self_obs.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_every_weight_and_every_entity_has_a_gradient_but_unused_rows_have_none():
    model = encoder(4, [6, 2])
    lists = [crowd([3, 5], 8, 6).requires_grad_(), crowd([2, 0], 4, 2).requires_grad_()]
    y = model(torch.randn(2, 4), lists)
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in model.named_parameters():
        # a key's bias adds the same to all scores of a query, so softmax takes it out
        assert name == "attention.key.bias" or parameter.grad.abs().max() > 1e-6, name
    for values in lists:
        reached = values.grad.abs().sum(-1) > 0
        assert torch.equal(reached, ~is_padding(values.detach()))


def test_gradients_of_attention_equal_numerical_gradients():
    torch.manual_seed(0)
    attention = ResidualSelfAttention(8).double()
    padding = torch.tensor([[False, False, True], [True, True, True]])
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: attention(values, padding), (x,))


def test_function_softmax_short_equals_torch_softmax_in_value_and_first_two_derivatives():
    torch.manual_seed(0)
    scores = (3.0 * torch.randn(2, 4, 3, 5, dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(softmax_short(scores), torch.softmax(scores, -1))
    assert torch.autograd.gradcheck(softmax_short, (scores,))
    assert torch.autograd.gradgradcheck(softmax_short, (scores[0, 0].detach().requires_grad_(),))
    far = torch.tensor([[-2e6, 0.0, 90.0], [-1e6, -1e6, -1e6]])
    torch.testing.assert_close(softmax_short(far), torch.softmax(far, -1))


def test_initial_weights_have_the_stated_deviation_and_zero_bias():
    torch.manual_seed(0)
    model = EntityEncoder(10, [23, 5])
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert float(parameter.detach().abs().max()) == 0.0
        else:
            expected = math.sqrt(0.125 / 128)
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name


def test_encoder_reads_entities_vectors_images_and_goals_and_returns_hidden_units():
    goal = VECTOR(2, "goal", ObservationType.GOAL_SIGNAL)
    specs = [ENTITIES(6, 5), VECTOR(3), ObservationSpec.visual(3, 20, 20), goal, ENTITIES(4, 2)]
    body = ObservationEncoder(specs, SMALL)
    assert body.hyper is not None
    obs = [crowd([2, 6], 6, 5), torch.randn(2, 3), torch.rand(2, 3, 20, 20), torch.eye(2)]
    obs.append(crowd([0, 3], 4, 2))
    before = body(obs)
    assert before.shape == (2, 16)
    for index in range(len(obs)):
        other = [values.clone() for values in obs]
        other[index] = other[index].flip(-1)
        assert (body(other) - before).abs().max() > 1e-6, index


def test_encoder_output_has_vector_observations_first_and_then_the_attention_vector():
    body = ObservationEncoder([ENTITIES(6, 5), VECTOR(3)], NetworkSettings(num_layers=0))
    self_obs, values = torch.randn(2, 3), crowd([2, 6], 6, 5)
    features = body([values, self_obs])
    assert features.shape == (2, body.output_size) == (2, 131)
    torch.testing.assert_close(features[:, :3], self_obs)
    torch.testing.assert_close(features[:, 3:], body.attention(self_obs, [values]))


def test_goals_of_entities_are_ordinary_inputs_and_other_goals_generate_weights():
    wishes = ENTITIES(6, 5, "wishes")._replace(observation_type=ObservationType.GOAL_SIGNAL)
    specs = [VECTOR(3), wishes, VECTOR(2, "goal", ObservationType.GOAL_SIGNAL)]
    assert ObservationEncoder(specs[:2], SMALL).hyper is None
    assert ObservationEncoder(specs[1:2], SMALL)([crowd([0, 6], 6, 5)]).shape == (2, 16)
    body = ObservationEncoder(specs, SMALL)
    assert body.goals == [2]
    obs = [torch.randn(2, 3), crowd([1, 2], 6, 5), torch.eye(2)]
    joined, goal = body.features(obs)
    torch.testing.assert_close(goal, obs[2])
    torch.testing.assert_close(joined[:, 5:], body.attention(joined[:, :5], [obs[1]]))


@pytest.mark.parametrize(
    ("shape", "flags"), [((4, 5), (0, 0)), ((4, 5), (1, 4)), ((4, 5, 6, 7), (1, 2, 2, 2)), ((), ())]
)
def test_error_for_an_unsupported_rank_or_dimension_property_names_the_observation(shape, flags):
    spec = ObservationSpec(shape, tuple(map(DimensionProperty, flags)), name="grid")
    with pytest.raises(SettingsError, match=r"observation 1 \(grid\): Unsupported Sensor with"):
        ObservationEncoder([VECTOR(3), spec], SMALL)
