import numpy as np
import pytest
import reference
import torch

from pipeline.core.specs import ActionSpec
from pipeline.errors import ExportError
from pipeline.export.layout import describe
from pipeline.export.publish import build_model
from pipeline.nets.squashed import LOG_SIGMA_MAX, LOG_SIGMA_MIN

POLICIES = {
    "continuous": {"continuous": 3},
    "continuous without normaliser": {"continuous": 3, "normalize": False},
    "continuous squashed": {"continuous": 2, "squash": True},
    "discrete": {"branches": (3, 4)},
    "one branch": {"branches": (5,)},
    "hybrid": {"continuous": 2, "branches": (2, 3)},
    "goal": {"continuous": 2, "branches": (4,), "goal": True},
    "memory continuous": {"continuous": 2, "memory": 6},
    "memory hybrid with a goal": {"continuous": 1, "branches": (3, 2), "goal": True, "memory": 10},
    "entities": {"branches": (3,), "entities": ((4, 3),)},
    "two lists of entities, a goal and memory": {
        "continuous": 2,
        "branches": (4,),
        "entities": ((4, 3), (6, 2)),
        "visual": "match3",
        "goal": True,
        "memory": 6,
    },
} | {
    f"visual {kind}": {"continuous": 2, "branches": (3,), "visual": kind}
    for kind in reference.VISUAL_SIDES
}


@pytest.fixture(params=POLICIES.values(), ids=POLICIES)
def graph(request):
    return reference.policy(**request.param)


def random_masks(graph, n_rows, seed=3):
    """Return random masks with at least one allowed choice per branch."""
    rng = np.random.default_rng(seed)
    parts = []
    for size in graph.spec.action_spec.discrete_branches:
        part = rng.integers(0, 2, (n_rows, size))
        part[np.arange(n_rows), rng.integers(0, size, n_rows)] = 1
        parts.append(part)
    return np.concatenate(parts, axis=1).astype(np.float32) if parts else None


@pytest.mark.parametrize("n_rows", [1, 7])
def test_deterministic_actions_equal_the_actions_of_a_slow_implementation(graph, n_rows):
    obs, masks = reference.observations(graph, n_rows), random_masks(graph, n_rows)
    memories = reference.memories(graph, n_rows)
    expected = reference.evaluate(graph, obs, masks, memories)
    kinds = [kind for kind in ("continuous", "discrete") if kind in expected]
    names = [f"deterministic_{kind}_actions" for kind in kinds]
    if memories is not None:
        kinds, names = [*kinds, "memory"], [*names, "recurrent_out"]
        expected["memory"] = expected["memory"][:, None]
    result = reference.run(build_model(graph), names, obs, masks, memory=memories)
    for kind, name in zip(kinds, names, strict=True):
        assert result[name].shape == expected[kind].shape
        np.testing.assert_allclose(result[name], expected[kind], atol=1e-5, rtol=0)


def test_names_types_and_shapes_of_exported_tensors_equal_the_contract():
    graph = reference.policy(
        continuous=2, branches=(2, 3), visual="match3", memory=8, entities=((4, 3),)
    )
    model = build_model(graph)
    description = describe(model)
    tensors = {
        name: (info.dtype, info.shape)
        for name, info in (description.inputs | description.outputs).items()
    }
    assert tensors == {
        "obs_0": ("float32", ("batch", 4, 3)),
        "obs_1": ("float32", ("batch", 5)),
        "obs_2": ("float32", ("batch", 2, 5, 6)),
        "obs_3": ("float32", ("batch", 3)),
        "recurrent_in": ("float32", ("batch", 1, 8)),
        "action_masks": ("float32", ("batch", 5)),
        "version_number": ("float32", (1,)),
        "memory_size": ("float32", (1,)),
        "continuous_actions": ("float32", ("batch", 2)),
        "continuous_action_output_shape": ("float32", (1,)),
        "deterministic_continuous_actions": ("float32", ("batch", 2)),
        "discrete_actions": ("int64", ("batch", 2)),
        "discrete_action_output_shape": ("float32", (1, 2)),
        "deterministic_discrete_actions": ("int64", ("batch", 2)),
        "recurrent_out": ("float32", ("batch", 1, 8)),
    }
    names = [*description.inputs, *description.outputs]
    assert names == list(tensors)
    assert (description.version, description.memory_size) == (3, 8)
    assert (description.continuous_size, description.discrete_branches) == (2, (2, 3))
    constants = {"version_number": [3.0], "memory_size": [8.0]}
    constants["discrete_action_output_shape"] = [[2.0, 3.0]]
    inputs = reference.observations(graph, 1), np.ones((1, 5), np.float32)
    result = reference.run(model, list(constants), *inputs, memory=reference.memories(graph, 1))
    assert {name: result[name].tolist() for name in constants} == constants


@pytest.mark.parametrize("kind", ["continuous", "continuous squashed"])
def test_sampled_actions_have_the_mean_and_the_spread_of_the_policy(kind):
    graph = quiet(reference.policy(seed=5, **POLICIES[kind]))
    n_draws = 10_000
    obs = [np.repeat(o, n_draws, axis=0) for o in reference.observations(graph, 1)]
    expected = reference.evaluate(graph, [o[:1] for o in obs])
    actions = reference.run(build_model(graph), ["continuous_actions"], obs)["continuous_actions"]
    assert np.abs(actions).max() <= 1.0
    actions = actions.astype(np.float64)
    raw = np.arctanh(actions) if "squash" in POLICIES[kind] else actions * 3
    mu, sigma = expected["mu"][0], expected["sigma"][0]
    assert (np.abs(raw.mean(axis=0) - mu) < 4 * sigma / np.sqrt(n_draws)).all()
    np.testing.assert_allclose(raw.std(axis=0), sigma, rtol=0.03)


def test_large_actions_are_clipped_to_the_range_of_the_environment():
    graph = reference.policy(continuous=2)
    reference.fill(graph.actor.heads.mu, 0.0, [50.0, -50.0])
    names = ["continuous_actions", "deterministic_continuous_actions"]
    result = reference.run(build_model(graph), names, reference.observations(graph, 4))
    for name in names:
        assert (result[name] == [1.0, -1.0]).all()


@pytest.mark.parametrize(("raw", "bound"), [(10.0, 2.0), (-40.0, -20.0)])
def test_exported_squashed_actions_have_the_sigma_bounds_of_training(raw, bound):
    """The noise is the same, and the means are 0, so that float32 can show the smallest sigma."""

    def drawn(log_sigma):
        graph = reference.policy(continuous=2, squash=True)
        reference.fill(graph.actor.heads.mu, 0.0, [0.0, 0.0])
        reference.fill(graph.actor.heads.spread, 0.0, [log_sigma, log_sigma])
        obs = reference.observations(graph, 50)
        return reference.run(build_model(graph), ["continuous_actions"], obs, seed=4)

    assert (LOG_SIGMA_MIN, LOG_SIGMA_MAX) == (-20.0, 2.0)
    actions = drawn(raw)["continuous_actions"]
    np.testing.assert_array_equal(actions, drawn(bound)["continuous_actions"])
    assert (actions != drawn(bound - np.sign(raw) * 0.5)["continuous_actions"]).any()
    assert (actions != 0.0).any()


def quiet(graph):
    """Return the policy with means and sigmas so small that hardly any sample is clipped."""
    heads = graph.actor.heads
    with torch.no_grad():
        heads.mu.weight.mul_(0.1)
        if heads.log_sigma is None:
            heads.spread.weight.mul_(0.1)
            heads.spread.bias.sub_(1.0)
    return graph


def test_sampled_choices_follow_the_masked_probabilities():
    graph = reference.policy(seed=2, branches=(3, 4))
    n_draws = 10_000
    obs = [np.repeat(o, n_draws, axis=0) for o in reference.observations(graph, 1)]
    mask = np.array([[1, 0, 1, 1, 1, 0, 1]], dtype=np.float32)
    p = reference.evaluate(graph, [o[:1] for o in obs], mask)["probabilities"][0]
    actions = reference.run(
        build_model(graph), ["discrete_actions"], obs, np.repeat(mask, n_draws, axis=0)
    )["discrete_actions"]
    counts = [np.bincount(actions[:, 0], minlength=3), np.bincount(actions[:, 1], minlength=4)]
    frequency = np.concatenate(counts) / n_draws
    np.testing.assert_allclose(frequency, p, atol=0.025)
    assert (frequency[mask[0] == 0] == 0).all()


def test_error_for_a_policy_that_cannot_be_exported_gives_the_reason():
    graph = reference.policy(continuous=1, branches=(3,))
    graph.actor.heads.branches[0].weight.data[1, 1] = np.nan
    with pytest.raises(ExportError, match=r"branch\.0\.weight holds 1 values that are not finite"):
        build_model(graph)
    normalizer = graph.normalizers.by_observation["1"]
    for squared in (0.0, -1.0):
        normalizer.squared[2] = squared
        normalizer.forget_scale()
        with pytest.raises(ExportError, match=r"obs_1\.std holds values that are not above 0"):
            build_model(graph)
    graph.spec = graph.spec._replace(action_spec=ActionSpec(0, ()))
    with pytest.raises(ExportError, match="the behavior has no actions"):
        build_model(graph)
