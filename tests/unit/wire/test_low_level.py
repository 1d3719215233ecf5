"""Specifications, actions and steps of ML-Agents' low-level API."""

from dataclasses import replace

import numpy as np
import pytest
from test_codec import sample

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps, refuse_other_shapes, same_steps

SPEC = BehaviorSpec(
    [ObservationSpec.vector(2, "speeds"), ObservationSpec.visual(3, 4, 5, "camera")],
    ActionSpec(1, (2, 3)),
)
IDS = np.array([7, 3], np.int32)
OBS = [np.arange(4, dtype=np.float32).reshape(2, 2)]
REWARD = np.array([0.5, -1.0], np.float32)
GROUPS = np.array([0, 9], np.int32)
SHARED = np.array([0.0, 2.5], np.float32)
MASKS = [np.array([[True, False], [False, True]])]


def steps(kind):
    if kind is TerminalSteps:
        return TerminalSteps(OBS, REWARD, np.array([True, False]), IDS, GROUPS, SHARED)
    return DecisionSteps(OBS, REWARD, IDS, MASKS, GROUPS, SHARED)


@pytest.mark.parametrize("kind", [DecisionSteps, TerminalSteps])
def test_steps_are_a_mapping_from_agent_ids_to_steps_of_single_agents(kind):
    batch = steps(kind)
    assert (len(batch), list(batch), 3 in batch, 4 in batch) == (2, [7, 3], True, False)
    assert batch.agent_id_to_index == {7: 0, 3: 1}
    assert batch.agent_id_to_index is batch.agent_id_to_index
    step = batch[3]
    assert [values.tolist() for values in step.obs] == [[2.0, 3.0]]
    assert (step.reward, step.agent_id, step.group_id, step.group_reward) == (-1.0, 3, 9, 2.5)
    with pytest.raises(KeyError, match="agent_id 4 is not present"):
        batch[4]
    if kind is TerminalSteps:
        assert [batch[agent].interrupted for agent in (7, 3)] == [True, False]
    else:
        assert [mask.tolist() for mask in batch[7].action_mask] == [[True, False]]
        assert replace(batch, action_mask=None)[7].action_mask is None


@pytest.mark.parametrize("kind", [DecisionSteps, TerminalSteps])
def test_steps_without_agents_have_arrays_in_the_shapes_of_the_specification(kind):
    batch = kind.empty(SPEC)
    assert (len(batch), list(batch)) == (0, [])
    names = [name for name in kind.__init__.__annotations__ if name != "return"]
    arrays = {name: getattr(batch, name) for name in names}
    assert [(array.shape, array.dtype) for array in arrays.pop("obs")] == [
        ((0, 2), np.float32),
        ((0, 3, 4, 5), np.float32),
    ]
    types = {"reward": "f4", "group_reward": "f4", "agent_id": "i4", "group_id": "i4"}
    if kind is DecisionSteps:
        assert arrays.pop("action_mask") is None
    else:
        types["interrupted"] = "?"
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: ((0,), np.dtype(code)) for name, code in types.items()
    }


@pytest.mark.parametrize(
    ("spec", "sizes", "continuous", "discrete"),
    [
        (ActionSpec.create_continuous(1), (1, ()), True, False),
        (ActionSpec.create_continuous(3), (3, ()), True, False),
        (ActionSpec.create_discrete([2, 3]), (0, (2, 3)), False, True),
        (ActionSpec.create_hybrid(1, [2]), (1, (2,)), False, False),
    ],
)
def test_action_specification_makes_actions_with_the_right_shapes_and_dtypes(
    spec, sizes, continuous, discrete
):
    assert spec == sizes
    assert (spec.is_continuous(), spec.is_discrete()) == (continuous, discrete)
    assert spec.discrete_size == len(spec.discrete_branches)
    assert isinstance(spec.discrete_branches, tuple)
    for action in (spec.empty_action(4), spec.random_action(4)):
        assert action.continuous.shape == (4, spec.continuous_size)
        assert action.discrete.shape == (4, spec.discrete_size)
        assert (action.continuous.dtype, action.discrete.dtype) == (np.float32, np.int32)
    assert not spec.empty_action(4).continuous.any()


def test_random_actions_are_in_range_and_equal_for_equal_generators():
    spec = ActionSpec(2, (2, 5))
    first, second = (spec.random_action(500, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first.continuous, second.continuous)
    assert np.array_equal(first.discrete, second.discrete)
    assert (first.discrete.min(0).tolist(), first.discrete.max(0).tolist()) == ([0, 0], [1, 4])
    assert -1.0 <= first.continuous.min() < -0.9
    assert 0.9 < first.continuous.max() < 1.0
    assert len(np.unique(first.continuous)) > 900


def test_action_tuple_with_only_one_kind_of_action_has_an_array_of_width_0_for_the_other_kind():
    continuous, discrete = ActionTuple(np.ones((3, 2))), ActionTuple(discrete=np.ones((3, 1)))
    assert (continuous.discrete.shape, continuous.discrete.dtype) == ((3, 0), np.int32)
    assert (discrete.continuous.shape, discrete.continuous.dtype) == ((3, 0), np.float32)
    assert (continuous.continuous.dtype, discrete.discrete.dtype) == (np.float32, np.int32)
    hybrid = ActionTuple(np.zeros((1, 2)), np.ones((1, 1)))
    hybrid.add_continuous(np.ones((1, 2)))
    assert (hybrid.continuous.tolist(), hybrid.discrete.tolist()) == ([[1.0, 1.0]], [[1]])
    assert ActionTuple().continuous is None


def test_steps_that_differ_in_a_field_are_not_equal_and_wrong_shapes_are_refused():
    one = sample(SPEC, 4, 3, seed=1)
    decision, terminal = sample(SPEC, 4, 3, seed=1)
    assert same_steps(one, (decision, terminal))
    assert not same_steps(one, (replace(decision, action_mask=None), terminal))
    assert not same_steps(one, (decision, TerminalSteps.empty(SPEC)))
    cut = replace(terminal, interrupted=~terminal.interrupted)
    assert not same_steps(one, (decision, cut))
    refuse_other_shapes("B", SPEC, (decision, terminal))
    for part in ("obs", "reward", "group_id", "group_reward", "interrupted"):
        values = getattr(terminal, part)
        shorter = [value[1:] for value in values] if part == "obs" else values[1:]
        with pytest.raises(ValueError, match="the shapes of the steps of B"):
            refuse_other_shapes("B", SPEC, (decision, replace(terminal, **{part: shorter})))
