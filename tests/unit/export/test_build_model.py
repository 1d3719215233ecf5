from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import checker

from pipeline.errors import ExportError
from pipeline.export.layout import describe
from pipeline.export.publish import build_model, model_bytes
from pipeline.export.rules import publishing_findings
from pipeline.nets.squashed import LOG_SIGMA_MAX, LOG_SIGMA_MIN
from pipeline.protocol.specs import ActionSpec

from . import reference

POLICIES = {
    "continuous": {"continuous": 3},
    "continuous without normaliser": {"continuous": 3, "normalize": False},
    "continuous squashed": {"continuous": 2, "squash": True},
    "discrete": {"branches": (3, 4)},
    "one branch": {"branches": (5,)},
    "hybrid": {"continuous": 2, "branches": (2, 3)},
    "goal": {"continuous": 2, "branches": (4,), "goal": True},
    "memory continuous": {"continuous": 2, "memory": 6},
    "memory hybrid with a goal": {
        "continuous": 1,
        "branches": (3, 2),
        "goal": True,
        "memory": 10,
    },
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
    """Random, with at least one action allowed per branch."""
    rng = np.random.default_rng(seed)
    parts = []
    for size in graph.spec.action_spec.discrete_branches:
        part = rng.integers(0, 2, (n_rows, size))
        part[np.arange(n_rows), rng.integers(0, size, n_rows)] = 1
        parts.append(part)
    return np.concatenate(parts, axis=1).astype(np.float32) if parts else None


@pytest.mark.parametrize("n_rows", [1, 7])
def test_deterministic_actions_equal_the_slow_reference(graph, n_rows):
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


def test_model_keeps_the_contract_and_the_publishing_rules(graph):
    model = build_model(graph)
    checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 9)]
    assert publishing_findings(model, graph.spec) == []


def test_names_types_and_shapes_are_those_of_the_contract():
    graph = reference.policy(continuous=2, branches=(2, 3), visual="match3")
    description = describe(build_model(graph))
    tensors = {
        name: (info.dtype, info.shape)
        for name, info in (description.inputs | description.outputs).items()
    }
    assert list(description.inputs) == ["obs_0", "obs_1", "obs_2", "action_masks"]
    assert tensors == {
        "obs_0": ("float32", ("batch", 5)),
        "obs_1": ("float32", ("batch", 2, 5, 6)),
        "obs_2": ("float32", ("batch", 3)),
        "action_masks": ("float32", ("batch", 5)),
        "version_number": ("float32", (1,)),
        "memory_size": ("float32", (1,)),
        "continuous_actions": ("float32", ("batch", 2)),
        "continuous_action_output_shape": ("float32", (1,)),
        "deterministic_continuous_actions": ("float32", ("batch", 2)),
        "discrete_actions": ("int64", ("batch", 2)),
        "discrete_action_output_shape": ("float32", (1, 2)),
        "deterministic_discrete_actions": ("int64", ("batch", 2)),
    }
    assert list(description.outputs) == list(tensors)[4:]
    assert (description.version, description.memory_size) == (3, 0)
    assert (description.continuous_size, description.discrete_branches) == (2, (2, 3))


def test_constants_can_be_fetched_from_a_session():
    graph = reference.policy(branches=(3, 4))
    names = ["version_number", "memory_size", "discrete_action_output_shape"]
    masks = np.ones((1, 7), dtype=np.float32)
    result = reference.run(build_model(graph), names, reference.observations(graph, 1), masks)
    assert [result[name].tolist() for name in names] == [[3.0], [0.0], [[3.0, 4.0]]]


@pytest.mark.parametrize("kind", ["continuous", "continuous squashed"])
def test_sampled_actions_have_the_policys_mean_and_spread(kind):
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


def test_large_actions_are_clipped_to_the_environments_range():
    graph = reference.policy(continuous=2)
    reference.fill(graph.actor.heads.mu, 0.0, [50.0, -50.0])
    names = ["continuous_actions", "deterministic_continuous_actions"]
    result = reference.run(build_model(graph), names, reference.observations(graph, 4))
    for name in names:
        assert (result[name] == [1.0, -1.0]).all()


@pytest.mark.parametrize(("raw", "bound"), [(10.0, 2.0), (-40.0, -20.0)])
def test_squashed_spreads_have_the_bounds_of_training_in_the_file_too(raw, bound):
    """With the same noise, and means of 0, so that the smallest spread shows in float32."""

    def drawn(log_sigma):
        graph = reference.policy(continuous=2, squash=True)
        reference.fill(graph.actor.heads.mu, 0.0, [0.0, 0.0])
        reference.fill(graph.actor.heads.spread, 0.0, [log_sigma, log_sigma])
        obs = reference.observations(graph, 50)
        return reference.run(build_model(graph), ["continuous_actions"], obs, seed=4)

    assert (LOG_SIGMA_MIN, LOG_SIGMA_MAX) == (-20.0, 2.0)
    found = drawn(raw)["continuous_actions"]
    np.testing.assert_array_equal(found, drawn(bound)["continuous_actions"])
    assert (found != drawn(bound - np.sign(raw) * 0.5)["continuous_actions"]).any()
    assert (found != 0.0).any()


def quiet(graph):
    """The same policy with means and spreads so small that next to no sample is clipped."""
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


def test_only_allowed_action_is_chosen_in_both_outputs():
    graph = reference.policy(branches=(3, 4))
    rng = np.random.default_rng(0)
    allowed = np.stack([rng.integers(0, 3, 1000), rng.integers(0, 4, 1000)], axis=1)
    masks = np.concatenate([np.eye(3)[allowed[:, 0]], np.eye(4)[allowed[:, 1]]], axis=1)
    names = ["discrete_actions", "deterministic_discrete_actions"]
    obs = reference.observations(graph, 1000)
    result = reference.run(build_model(graph), names, obs, masks.astype(np.float32))
    for name in names:
        np.testing.assert_array_equal(result[name], allowed)


def test_equal_weights_give_equal_bytes(graph):
    first = model_bytes(build_model(graph))
    assert model_bytes(build_model(graph)) == first
    assert model_bytes(onnx.load_from_string(first)) == first


def test_goal_changes_the_actions_of_a_goal_conditioned_policy():
    graph = reference.policy(continuous=2, goal=True)
    obs = [np.repeat(o, 2, axis=0) for o in reference.observations(graph, 1)]
    obs[-1] = np.eye(2, dtype=np.float32)
    name = "deterministic_continuous_actions"
    actions = reference.run(build_model(graph), [name], obs)[name]
    assert np.abs(actions[0] - actions[1]).max() > 1e-3


def test_entities_have_the_name_type_and_shape_of_the_contract():
    graph = reference.policy(branches=(3,), entities=((4, 3),))
    declared = describe(build_model(graph)).inputs
    assert list(declared) == ["obs_0", "obs_1", "obs_2", "action_masks"]
    assert (declared["obs_0"].dtype, declared["obs_0"].shape) == ("float32", ("batch", 4, 3))
    assert {n.op_type for n in build_model(graph).graph.node} >= {"Pow", "ReduceSum", "Less"}


def test_memory_has_the_names_types_and_shapes_of_the_contract():
    description = describe(build_model(reference.policy(branches=(3,), memory=8)))
    assert list(description.inputs) == ["obs_0", "obs_1", "recurrent_in", "action_masks"]
    assert description.memory_size == 8
    for declared, name in (
        (description.inputs, "recurrent_in"),
        (
            description.outputs,
            "recurrent_out",
        ),
    ):
        assert (declared[name].dtype, declared[name].shape) == ("float32", ("batch", 1, 8))
    assert list(description.outputs)[-1] == "recurrent_out"


def test_memory_fed_back_equals_the_slow_reference_step_by_step():
    graph = reference.policy(continuous=2, memory=6)
    model, obs = build_model(graph), reference.observations(graph, 9)
    names = ["deterministic_continuous_actions", "recurrent_out"]
    fast = slow = np.zeros((1, 6), dtype=np.float32)
    for row in range(9):
        now = [values[row : row + 1] for values in obs]
        result = reference.run(model, names, now, memory=fast)
        expected = reference.evaluate(graph, now, memories=slow)
        np.testing.assert_allclose(result[names[0]], expected["continuous"], atol=1e-5)
        fast, slow = result["recurrent_out"][:, 0], expected["memory"]
    assert np.abs(slow).max() > 0.1


def test_weights_that_are_not_finite_are_refused_by_name():
    graph = reference.policy(branches=(3,))
    graph.actor.heads.branches[0].weight.data[1, 1] = np.nan
    with pytest.raises(ExportError, match=r"branch\.0\.weight holds 1 values that are not finite"):
        build_model(graph)


@pytest.mark.parametrize("squared", [0.0, -1.0])
def test_deviations_that_cannot_be_divided_by_are_refused(squared):
    graph = reference.policy(continuous=1)
    normalizer = graph.normalizers.by_observation["1"]
    normalizer.squared[2] = squared
    normalizer.forget_scale()
    with pytest.raises(ExportError, match=r"obs_1\.std holds values that are not above 0"):
        build_model(graph)


def test_a_behavior_without_actions_is_refused():
    graph = reference.policy(continuous=1)
    graph.spec = graph.spec._replace(action_spec=ActionSpec(0, ()))
    with pytest.raises(ExportError, match="the behavior has no actions"):
        build_model(graph)
