from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import decode_actions, decode_list, decode_steps, encode_actions

from pipeline.errors import (
    UnityActionException,
    UnityCommunicationException,
    UnityEnvironmentException,
)
from pipeline.errors import UnityObservationException as ObservationError
from pipeline.protocol import actions, layout_cache, vectorized, wire
from pipeline.protocol.decoding import NonFiniteError, behavior_spec_from
from pipeline.protocol.encoding import brain_parameters, encode_steps
from pipeline.protocol.generated import messages as m
from pipeline.protocol.layout_cache import Decoder
from pipeline.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)
from pipeline.protocol.steps import (
    DecisionSteps,
    Steps,
    TerminalSteps,
    same_steps,
    steps_from_mapping,
    steps_to_mapping,
)

BRAIN = m.BrainParametersProto(brain_name="b", action_spec={"num_continuous_actions": 1})
OBSERVATIONS = st.sampled_from(
    [
        ObservationSpec.vector(1),
        ObservationSpec.vector(40, "a name", ObservationType.GOAL_SIGNAL),
        ObservationSpec.visual(3, 4, 5),
        ObservationSpec.visual(1, 20, 30, "camera"),
        ObservationSpec.entities(6, 3),
        ObservationSpec.vector(0),
    ]
)
ACTIONS = st.sampled_from(
    [ActionSpec(3, ()), ActionSpec(0, (2, 300)), ActionSpec(2, (4,)), ActionSpec(40, (2,) * 140)]
)
SPECS = st.builds(BehaviorSpec, st.lists(OBSERVATIONS, min_size=0, max_size=3), ACTIONS)


def sample(spec: BehaviorSpec, n: int, n_ended: int, seed: int) -> Steps:
    rng = np.random.default_rng(seed)

    def obs(count: int) -> list[np.ndarray]:
        shapes = [(count, *o.shape) for o in spec.observation_specs]
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def ids(count: int) -> np.ndarray:
        return rng.integers(-5, 2**31 - 1, count).astype(np.int32)

    def floats(count: int) -> np.ndarray:
        return rng.choice([0.0, -1.5, 2.25], count).astype(np.float32)

    branches = spec.action_spec.discrete_branches
    mask = [rng.random((n, size)) < 0.5 for size in branches] if branches and n else None
    return (
        DecisionSteps(obs(n), floats(n), ids(n), mask, ids(n), floats(n)),
        TerminalSteps(
            obs(n_ended), floats(n_ended), rng.random(n_ended) < 0.5, ids(n_ended), ids(n_ended),
            floats(n_ended),
        ),
    )  # fmt: skip


def slow_infos(decision: DecisionSteps, terminal: TerminalSteps, spec: BehaviorSpec):
    """The obvious way to write a message, field by field."""
    out = m.UnityRLOutputProto.ListAgentInfoProto()
    for steps in (terminal, decision):
        for row in range(len(steps.agent_id)):
            info = out.value.add(
                reward=float(steps.reward[row]),
                id=int(steps.agent_id[row]),
                group_id=int(steps.group_id[row]),
                group_reward=float(steps.group_reward[row]),
            )
            if steps is terminal:
                info.done = True
                info.max_step_reached = bool(terminal.interrupted[row])
            elif decision.action_mask is not None:
                for branch in decision.action_mask:
                    info.action_mask.extend(branch[row].tolist())
            for values, obs in zip(steps.obs, spec.observation_specs, strict=True):
                message = info.observations.add(
                    shape=obs.shape,
                    dimension_properties=[int(p) for p in obs.dimension_property],
                    observation_type=int(obs.observation_type),
                    name=obs.name,
                )
                message.float_data.data.extend(values[row].ravel().tolist())
    return out


def assert_same_steps(actual: Steps, expected: Steps) -> None:
    for left, right in zip(actual, expected, strict=True):
        for field in ("reward", "agent_id", "group_id", "group_reward"):
            np.testing.assert_array_equal(getattr(left, field), getattr(right, field))
            assert getattr(left, field).dtype == getattr(right, field).dtype
        for a, b in zip(left.obs, right.obs, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == np.float32
    np.testing.assert_array_equal(actual[1].interrupted, expected[1].interrupted)
    masks = (actual[0].action_mask, expected[0].action_mask)
    if None in masks:
        assert masks == (None, None)
    else:
        for a, b in zip(*masks, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("branches", [(), (2, 3)])
def test_steps_come_back_from_plain_values_which_are_copies(branches):
    spec = BehaviorSpec(
        [ObservationSpec.vector(4), ObservationSpec.vector(1)], ActionSpec(1, branches)
    )
    steps, expected = sample(spec, 3, 2, seed=0), sample(spec, 3, 2, seed=0)
    back = steps_from_mapping(steps_to_mapping(steps))
    assert_same_steps(back, expected)
    arrays = [*steps[0].obs, *(steps[0].action_mask or ()), steps[0].reward, steps[1].interrupted]
    for array in arrays:
        saved = array.copy()
        array[-1] = ~saved[-1] if saved.dtype == np.bool_ else 7
        assert not same_steps(steps, expected)
        assert_same_steps(back, expected)
        array[:] = saved
        assert same_steps(steps, expected)
    masked = sample(BehaviorSpec(spec.observation_specs, ActionSpec(1, (2,))), 3, 2, seed=0)
    assert same_steps(steps, masked) is False


def in_turn(monkeypatch):
    """Decode lists of any length at once; return an entry for each call of `decode_steps`."""
    calls = []
    monkeypatch.setattr(vectorized, "MANY", 1)
    one_by_one = layout_cache.decode_steps
    monkeypatch.setattr(
        layout_cache, "decode_steps", lambda *args: calls.append(1) or one_by_one(*args)
    )
    return calls


@settings(max_examples=150)
@given(SPECS, st.integers(0, 5), st.integers(0, 3), st.integers(0, 99))
def test_many_agents_are_read_together_as_one_by_one(spec, n, n_ended, seed):
    steps = sample(spec, n, n_ended, seed)
    with pytest.MonkeyPatch.context() as patch:
        calls = in_turn(patch)
        assert_same_steps(decode_list(encode_steps(*steps, spec), spec), steps)
    assert len(calls) == (n + n_ended == 0)


def spoiled(spec, spoil):
    steps = sample(spec, 6, 2, seed=1)
    message = encode_steps(*steps, spec)
    spoil(message.value[4])
    return message


def shortened_names(spec, names):
    """Yield a message of two agents for each name, which is that of their only observation."""
    for name in names:
        infos = m.UnityRLOutputProto.ListAgentInfoProto()
        for agent in range(2):
            obs = infos.value.add(id=agent).observations.add(shape=[1], name=name)
            obs.float_data.data.append(agent)
        yield name, infos


@pytest.mark.parametrize("together", [False, True])
def test_observation_shorter_than_the_announced_name_is_taken_with_one_warning(
    together, caplog, monkeypatch
):
    long = "a name that is longer than an observation of one number"
    spec = BehaviorSpec([ObservationSpec.vector(1, long)], ActionSpec(1, ()))
    if together:
        in_turn(monkeypatch)
    for name, infos in shortened_names(spec, ["", "x", long]):
        for _ in range(2):
            decision, _ = decode_list(infos, spec, f"B{together}")
            assert decision.obs[0].tolist() == [[0], [1]], name
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert all(f"B{together}: an agent calls its observations" in line for line in messages)


@pytest.mark.parametrize("tail", [b"\x10\x05", b"\x15\x80\x80\x80\x80", b"\x1a\x02\x0a\x00"])
@pytest.mark.parametrize(
    "spec",
    [
        BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(1, ())),
        BehaviorSpec([], ActionSpec(1, ())),
    ],
)
def test_unknown_fields_of_a_list_are_passed_over(spec, tail, monkeypatch):
    steps = sample(spec, 3, 0, seed=1)
    message = m.UnityRLOutputProto.ListAgentInfoProto.FromString(
        encode_steps(*steps, spec).SerializeToString() + tail
    )
    in_turn(monkeypatch)
    decoder = Decoder(spec, "b")
    for _ in range(3):
        assert_same_steps(decode_list(message, spec), steps)
        assert_same_steps(decoder.decode(message.SerializeToString()), steps)


def clear_mask(info):
    del info.action_mask[-1]


def turn_off(info):
    del info.action_mask[:]


def unknown_field(info):
    info.MergeFromString(b"\xc0\x3e\x01")


def other_name(info):
    info.observations[0].name = "an ear"


@pytest.mark.parametrize(
    ("spoil", "n_left"), [(clear_mask, 1), (turn_off, 0), (unknown_field, 1), (other_name, 1)]
)
def test_unusual_agents_among_many_are_looked_at_one_by_one(spoil, n_left, monkeypatch):
    spec = BehaviorSpec([ObservationSpec.vector(3, "an eye")], ActionSpec(0, (2, 130)))
    message = spoiled(spec, spoil)
    expected = decode_steps(message.value, spec)
    calls = in_turn(monkeypatch)
    assert_same_steps(decode_list(message, spec), expected)
    assert len(calls) == n_left


@pytest.mark.parametrize("field", ["reward", "group_reward", "observation"])
def test_values_of_many_that_are_not_finite_are_refused(field, monkeypatch):
    def spoil(info):
        if field == "observation":
            info.observations[0].float_data.data[1] = np.nan
        else:
            setattr(info, field, np.nan)

    spec = BehaviorSpec([ObservationSpec.vector(3, "an eye")], ActionSpec(1, ()))
    message = spoiled(spec, spoil)
    assert in_turn(monkeypatch) == []
    with pytest.raises(NonFiniteError, match=r"had NaN values\. \(behavior b"):
        decode_list(message, spec, "b")


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 2, 2)])
@pytest.mark.parametrize(("properties", "axes"), [([1, 2, 2], (0, 1, 2)), ([2, 2, 1], (2, 0, 1))])
def test_images_come_out_channels_first(shape, properties, axes, monkeypatch):
    sent = np.arange(3 * np.prod(shape), dtype=np.float32).reshape(3, *shape)
    infos = m.UnityRLOutputProto.ListAgentInfoProto(
        value=[visual_info(shape, properties, image) for image in sent]
    )
    images = np.stack([image.transpose(axes) for image in sent])
    spec = behavior_spec_from(BRAIN, infos.value[0])
    spatial = DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
    assert spec.observation_specs[0].shape == images.shape[1:]
    assert spec.observation_specs[0].dimension_property == (
        DimensionProperty.NONE, spatial, spatial,
    )  # fmt: skip
    expected = decode_steps(infos.value, spec)
    np.testing.assert_array_equal(expected[0].obs[0], images)
    assert in_turn(monkeypatch) == []
    assert_same_steps(decode_list(infos, spec), expected)


@settings(max_examples=60)
@given(SPECS, st.integers(0, 5), st.integers(0, 3), st.integers(0, 99))
def test_steps_are_written_as_field_by_field_and_read_back(spec, n, n_ended, seed):
    steps = sample(spec, n, n_ended, seed)
    message = encode_steps(*steps, spec)
    assert message == slow_infos(*steps, spec)
    assert_same_steps(decode_steps(message.value, spec), steps)


@settings(max_examples=60)
@given(ACTIONS, st.integers(0, 5), st.integers(0, 99))
def test_actions_are_written_as_field_by_field_and_read_back(spec, n, seed):
    actions = spec.random_action(n, np.random.default_rng(seed))
    message = encode_actions(actions, BehaviorSpec([], spec))
    expected = m.UnityRLInputProto.ListAgentActionProto()
    for continuous, discrete in zip(actions.continuous, actions.discrete, strict=True):
        expected.value.add(
            vector_actions_deprecated=[*continuous, *discrete],
            continuous_actions=continuous,
            discrete_actions=discrete,
        )
    assert message == expected
    decoded = decode_actions(message, spec)
    np.testing.assert_array_equal(decoded.continuous, actions.continuous)
    np.testing.assert_array_equal(decoded.discrete, actions.discrete)


def test_negative_discrete_actions_survive():
    spec = ActionSpec(0, (3,))
    message = encode_actions(ActionTuple(discrete=np.array([[-1], [2]])), BehaviorSpec([], spec))
    assert decode_actions(message, spec).discrete.tolist() == [[-1], [2]]


def test_actions_of_old_environments_are_read_from_the_deprecated_field():
    message = m.UnityRLInputProto.ListAgentActionProto()
    message.value.add(vector_actions_deprecated=[1.0, 2.0])
    assert decode_actions(message, ActionSpec(2, ())).continuous.tolist() == [[1, 2]]
    assert decode_actions(message, ActionSpec(0, (2, 3))).discrete.tolist() == [[1, 2]]
    with pytest.raises(UnityActionException, match="got 2 continuous and 0 discrete"):
        decode_actions(message, ActionSpec(3, ()))


def test_actions_that_are_no_message_are_the_trainers():
    with pytest.raises(UnityCommunicationException, match="the trainer sent 1 bytes that are"):
        actions.decode_actions(b"\xff", ActionSpec(2, ()))


@pytest.mark.parametrize("choice", [float("nan"), float("inf"), -3e9, 2.0**31])
def test_discrete_actions_of_old_messages_that_are_no_choices_are_refused(choice):
    message = m.UnityRLInputProto.ListAgentActionProto()
    largest = 2**31 - 128  # of the whole numbers below 2^31 that a float32 holds
    message.value.add(vector_actions_deprecated=[largest])
    assert decode_actions(message, ActionSpec(0, (2,))).discrete.tolist() == [[largest]]
    message.value.add(vector_actions_deprecated=[choice])
    with pytest.raises(UnityActionException, match=r"agent number 1 got the discrete actions \["):
        decode_actions(message, ActionSpec(0, (2,)))


def visual_info(shape, properties, values) -> m.AgentInfoProto:
    info = m.AgentInfoProto(id=4)
    obs = info.observations.add(shape=shape, dimension_properties=properties)
    obs.float_data.data.extend(np.ravel(values).tolist())
    return info


@pytest.mark.parametrize("properties", [[1, 2, 2], [], [0, 0, 0]])
@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 4, 3), (3, 3, 3)])
def test_channels_first_images_stay_as_they_are(shape, properties, monkeypatch):
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    info = visual_info(shape, properties, image)
    spec = behavior_spec_from(BRAIN, info)
    assert spec.observation_specs[0].shape == shape
    assert spec.observation_specs[0].dimension_property == tuple(properties or (0, 0, 0))
    expected = decode_steps([info, info], spec)
    np.testing.assert_array_equal(expected[0].obs[0][1], image)
    infos = m.UnityRLOutputProto.ListAgentInfoProto(value=[info, info])
    decoder = Decoder(spec, "b")
    for number in range(3):
        assert_same_steps(decoder.decode(infos.SerializeToString()), expected)
        assert decoder.n_cached == number
    in_turn(monkeypatch)
    assert_same_steps(decode_list(infos, spec), expected)


@pytest.mark.parametrize(
    ("shape", "values", "text"),
    [
        (
            (3,),
            [1, 2, 3],
            r"index=0 for agent with id=9 .*expected the shape \(2,\) but got \(3,\)",
        ),
        ((2,), [1, 2, 3], r"index=0 for agent with id=9 .*\(2,\) does not fit the 3 values"),
        ((2, 1), [1, 2], r"got \(2, 1\)"),
    ],
)
def test_observation_of_another_shape_is_refused_by_agent_and_index(shape, values, text):
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
    good, bad = m.AgentInfoProto(id=8), m.AgentInfoProto(id=9)
    good.observations.add(shape=[2]).float_data.data.extend([1, 2])
    bad.observations.add(shape=shape).float_data.data.extend(values)
    with pytest.raises(ObservationError, match=text):
        decode_steps([good, bad], spec, "b")


def test_agent_with_too_few_observations_is_refused():
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
    with pytest.raises(
        ObservationError, match=r"id=3 of behavior 'b' sent 0 observations; .* has 1"
    ):
        decode_steps([m.AgentInfoProto(id=3)], spec, "b")


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "Infinite")])
def test_values_that_are_not_finite_are_refused(value, kind):
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
    info = m.AgentInfoProto()
    info.observations.add(shape=[2]).float_data.data.extend([0, value])
    with pytest.raises(NonFiniteError, match=f"The observations provided had {kind} values"):
        decode_steps([info], spec)
    for field, noun in (("reward", "rewards"), ("group_reward", "group_rewards")):
        info = m.AgentInfoProto(**{field: value})
        with pytest.raises(RuntimeError, match=f"The {noun} provided had {kind} values"):
            decode_steps([info], BehaviorSpec([], ActionSpec(1, ())))


def test_mask_of_the_wrong_length_allows_everything():
    spec = BehaviorSpec([], ActionSpec(0, (2, 2)))
    infos = [m.AgentInfoProto(action_mask=mask) for mask in ([1, 0, 0, 1], [], [1, 1])]
    masks = decode_steps(infos, spec)[0].action_mask
    assert masks is not None
    assert masks[0].tolist() == [[True, False], [False, False], [False, False]]
    assert masks[1].tolist() == [[False, True], [False, False], [False, False]]


def test_no_agents_give_empty_arrays_of_the_right_rank():
    spec = BehaviorSpec([ObservationSpec.visual(3, 4, 5)], ActionSpec(1, ()))
    decision, terminal = decode_steps([], spec)
    assert decision.obs[0].shape == terminal.obs[0].shape == (0, 3, 4, 5)


def test_behavior_announcement_round_trips_in_both_ages():
    info = m.AgentInfoProto()
    for action in (ActionSpec(2, ()), ActionSpec(0, (3, 2))):
        brain = brain_parameters("b", BehaviorSpec([], action), old_fields=True)
        assert behavior_spec_from(brain, info).action_spec == action
        brain.ClearField("action_spec")
        assert behavior_spec_from(brain, info).action_spec == action


def test_branch_sizes_that_contradict_the_count_are_refused():
    brain = m.BrainParametersProto(brain_name="b")
    brain.action_spec.num_discrete_actions = 2
    brain.action_spec.discrete_branch_sizes.append(3)
    with pytest.raises(UnityEnvironmentException, match=r"2 discrete actions but .* of 1 branches"):
        behavior_spec_from(brain, m.AgentInfoProto())


@pytest.mark.parametrize("shape", [(), (0,), (3,), (300,), (3, 4, 5)])
def test_header_of_an_observation_is_what_protobuf_writes_before_the_numbers(shape):
    values = np.ones(shape if shape else (1,), np.float32)
    message = m.ObservationProto(shape=shape, float_data={"data": values.ravel().tolist()})
    numbers = values.tobytes()
    assert message.SerializeToString() == wire.observation_header(shape) + numbers


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",  # no tag
        b"\x0a\x05\x3d",  # an agent that is cut off
        b"\x0a\x04\x6a\x02\x0a\x05",  # an observation that is cut off
        b"\x0a\x0c\x50" + b"\xff" * 11,  # an id of more than ten bytes
    ],
)
@pytest.mark.parametrize("many", [1, 256])
def test_bytes_that_are_no_message_are_refused(data, many, monkeypatch):
    monkeypatch.setattr(vectorized, "MANY", many)
    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))
    with pytest.raises(UnityCommunicationException, match="not a message of the protocol"):
        Decoder(spec, "b").decode(data)


def test_bits_of_masks_and_flags_that_take_two_bytes_are_read_as_protobuf_reads_them(monkeypatch):
    """0x81 0x00 is a valid varint for 1, though nobody writes it."""
    monkeypatch.setattr(vectorized, "MANY", 1)
    spec = BehaviorSpec([], ActionSpec(0, (2,)))
    for body in (b"\x40\x81\x00", b"\x5a\x03\x81\x00\x01", b"\x5a\x02\x81\x00"):
        data = wire.delimited(1, body)
        message = m.UnityRLOutputProto.ListAgentInfoProto.FromString(data)
        assert_same_steps(Decoder(spec, "b").decode(data), decode_steps(message.value, spec))
