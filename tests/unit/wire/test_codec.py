"""Encoder and three decoders of messages about agents, compared with slow, obvious versions."""

import contextlib
from collections.abc import Callable, Iterator
from operator import setitem

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import decode_actions, decode_list, decode_steps, encode_actions

from pipeline.core.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)
from pipeline.core.steps import (
    DecisionSteps,
    Steps,
    TerminalSteps,
    same_steps,
    steps_from_mapping,
    steps_to_mapping,
)
from pipeline.errors import (
    UnityActionException,
    UnityCommunicationException,
    UnityEnvironmentException,
)
from pipeline.errors import UnityObservationException as ObservationError
from pipeline.wire.codec import actions, decoding, layout_cache, records
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.encoding import brain_parameters, encode_steps
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.layout_cache import Decoder

BRAIN = m.BrainParametersProto(brain_name="b", action_spec={"num_continuous_actions": 1})
OBSERVATIONS = st.sampled_from(
    [
        ObservationSpec.vector(1),
        ObservationSpec.vector(40, "a name", ObservationType.GOAL_SIGNAL),
        ObservationSpec.visual(3, 4, 5),
        ObservationSpec.visual(1, 20, 30, "camera"),
        ObservationSpec.entities(6, 3),
        ObservationSpec.vector(0),
        ObservationSpec.vector(300),
        ObservationSpec((), ()),
    ]
)
ACTIONS = st.sampled_from(
    [ActionSpec(3, ()), ActionSpec(0, (2, 300)), ActionSpec(2, (4,)), ActionSpec(40, (2,) * 140)]
)
SPECS = st.builds(BehaviorSpec, st.lists(OBSERVATIONS, min_size=0, max_size=3), ACTIONS)


def sample(spec: BehaviorSpec, n: int, n_ended: int, seed: int) -> Steps:
    rng = np.random.default_rng(seed)

    def columns(count: int) -> dict:
        shapes = [(count, *o.shape) for o in spec.observation_specs]
        ids, floats = rng.integers(-5, 2**31 - 1, (2, count)), rng.choice([0, -1.5, 2], (2, count))
        return {
            "obs": [rng.normal(size=shape).astype(np.float32) for shape in shapes],
            **dict(zip(("reward", "group_reward"), floats.astype(np.float32), strict=True)),
            **dict(zip(("agent_id", "group_id"), ids.astype(np.int32), strict=True)),
        }

    branches = spec.action_spec.discrete_branches
    mask = [rng.random((n, size)) < 0.5 for size in branches] if branches and n else None
    return (
        DecisionSteps(**columns(n), action_mask=mask),
        TerminalSteps(**columns(n_ended), interrupted=rng.random(n_ended) < 0.5),
    )


def slow_infos(decision: DecisionSteps, terminal: TerminalSteps, spec: BehaviorSpec):
    """Return a message, written agent by agent and field by field: a slow, obvious encoder."""
    out = m.UnityRLOutputProto.ListAgentInfoProto()
    for steps in (terminal, decision):
        for row, agent in enumerate(steps.agent_id):
            info = out.value.add(id=agent, group_id=steps.group_id[row])
            info.reward, info.group_reward = steps.reward[row], steps.group_reward[row]
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
def test_steps_converted_to_plain_values_and_back_are_equal_and_share_no_memory(branches):
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


def slow_observation(message: m.ObservationProto) -> np.ndarray:
    values = np.array(message.float_data.data, np.float32).reshape(tuple(message.shape))
    is_last = list(message.dimension_properties) == [2, 2, 1]
    return values.transpose(2, 0, 1) if is_last else values


def slow_steps(infos, spec: BehaviorSpec) -> Steps:
    """Return a message's steps, read agent by agent: a slow, obvious decoder."""

    def parts(rows) -> dict:
        obs = [np.zeros((len(rows), *o.shape), np.float32) for o in spec.observation_specs]
        for row, info in enumerate(rows):
            for values, message in zip(obs, info.observations, strict=True):
                values[row] = slow_observation(message)
        return {
            "obs": obs,
            "reward": np.array([info.reward for info in rows], np.float32),
            "group_reward": np.array([info.group_reward for info in rows], np.float32),
            "agent_id": np.array([info.id for info in rows], np.int32),
            "group_id": np.array([info.group_id for info in rows], np.int32),
        }

    go_on = [info for info in infos if not info.done]
    ended = [info for info in infos if info.done]
    sizes = spec.action_spec.discrete_branches
    masks = [np.zeros((len(go_on), size), np.bool_) for size in sizes] if sizes and go_on else None
    for row, info in enumerate(go_on if masks else []):
        if len(info.action_mask) == sum(sizes):  # masks of another length are ignored
            ends = np.cumsum(sizes)
            for mask, end, size in zip(masks, ends, sizes, strict=True):
                mask[row] = info.action_mask[end - size : end]
    cut = np.array([info.max_step_reached for info in ended], np.bool_)
    return (
        DecisionSteps(**parts(go_on), action_mask=masks),
        TerminalSteps(**parts(ended), interrupted=cut),
    )


def parsed(data: bytes) -> m.UnityRLOutputProto.ListAgentInfoProto:
    return m.UnityRLOutputProto.ListAgentInfoProto.FromString(data)


def other_numbers(data: bytes) -> bytes:
    """Return a message with the same agents and masks, and all nonzero numbers increased by 1."""
    message = parsed(data)
    if message.SerializeToString() != data:  # not protobuf's own encoding
        return data
    for info in message.value:
        info.reward += info.reward != 0
        info.group_reward += info.group_reward != 0
        for obs in info.observations:
            obs.float_data.data[:] = [number + 1 for number in obs.float_data.data]
    return message.SerializeToString()


@contextlib.contextmanager
def all_at_once() -> Iterator[list[int]]:
    """Read lists of any length field by field; yield a list of the exceptions, read by agent."""
    calls = []
    one_by_one = decoding.decode_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_cache, "MANY", 1)
        patch.setattr(layout_cache, "_MAX_AGENT_BYTES", 1 << 20)
        patch.setattr(decoding, "decode_steps", lambda *args: calls.append(1) or one_by_one(*args))
        yield calls


def read_by_all(data: bytes, spec: BehaviorSpec) -> tuple[bool, bool]:
    """Check all decoders; return whether `data` is read field by field, and its layout stored."""
    expected = slow_steps(parsed(data).value, spec)
    assert_same_steps(decode_steps(parsed(data).value, spec, "b"), expected)
    with all_at_once() as calls:
        assert_same_steps(Decoder(spec, "b").decode(data), expected)
    recurring = Decoder(spec, "b")
    other = other_numbers(data)
    assert_same_steps(recurring.decode(other), slow_steps(parsed(other).value, spec))
    assert_same_steps(recurring.decode(data), expected)
    n_cached = recurring.n_cached
    assert_same_steps(recurring.decode(other), slow_steps(parsed(other).value, spec))
    return not calls, n_cached == 1


@settings(max_examples=150)
@given(SPECS, st.integers(0, 5), st.sampled_from([0, 0, 1, 3]), st.integers(0, 99))
def test_encoded_steps_have_the_bytes_of_protobuf_and_all_decoders_read_these_bytes(
    spec, n, n_ended, seed
):
    steps = sample(spec, n, n_ended, seed)
    message = encode_steps(*steps, spec)
    assert message == slow_infos(*steps, spec)
    assert_same_steps(slow_steps(message.value, spec), steps)
    ways = read_by_all(message.SerializeToString(), spec)
    assert ways == (n + n_ended > 0, n > 0 and n_ended == 0)


SPEC = BehaviorSpec(
    [ObservationSpec.vector(3, "an eye"), ObservationSpec.entities(2, 2)], ActionSpec(1, (2, 130))
)


def usual() -> m.UnityRLOutputProto.ListAgentInfoProto:
    """Return a message of six agents, all with rewards."""
    steps = sample(SPEC, 6, 0, seed=1)
    steps[0].reward[:] = steps[0].group_reward[:] = 1.5
    return encode_steps(*steps, SPEC)


def sends(*values, **fields) -> Callable[[m.AgentInfoProto], None]:
    """Return a function that replaces the first observation in an agent info."""

    def spoil(info: m.AgentInfoProto) -> None:
        info.id = 9
        obs = info.observations[0]
        obs.Clear()
        obs.MergeFrom(m.ObservationProto(float_data={"data": values}, **fields))

    return spoil


def gets(**fields) -> Callable[[m.AgentInfoProto], None]:
    return lambda info: [setattr(info, name, value) for name, value in fields.items()]


def has(number: float, *, obs: int, at: int) -> Callable[[m.AgentInfoProto], None]:
    return lambda info: setitem(info.observations[obs].float_data.data, at, number)


# A change of one agent; whether the message is read field by field, and its layout stored.
CHANGES = {
    "its episode has ended": (gets(done=True), True, False),
    "a cut that is no end": (gets(max_step_reached=True), True, False),
    "another id": (lambda info: setattr(info, "id", info.id ^ 1), True, True),
    "no reward": (gets(reward=0.0), True, True),
    "no group reward": (gets(group_reward=0.0), True, True),
    "another mask": (lambda a: setitem(a.action_mask, 1, not a.action_mask[1]), True, True),
    "a mask that is too short": (lambda info: info.action_mask.pop(), False, False),
    "no mask": (lambda info: info.ClearField("action_mask"), True, True),
    "an unknown field": (lambda info: info.MergeFromString(b"\xc0\x3e\x01"), False, False),
    "another name": (lambda info: gets(name="an ear")(info.observations[0]), False, False),
    "a large number": (has(3e38, obs=0, at=1), True, False),
}


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize(("change", "at_once", "remembered"), CHANGES.values(), ids=CHANGES)
def test_all_decoders_read_a_message_in_which_one_agent_has_a_changed_field(
    change, at_once, remembered, row
):
    message = usual()
    before = message.SerializeToString()
    change(message.value[row])
    assert read_by_all(message.SerializeToString(), SPEC) == (at_once, remembered)
    decoder = Decoder(SPEC, "b")
    for data in (before, message.SerializeToString(), other_numbers(before)):
        assert decoder.n_cached == 0
        assert_same_steps(decoder.decode(data), slow_steps(parsed(data).value, SPEC))


REFUSED = {
    r"rewards provided had NaN values\. \(behavior b": gets(reward=np.nan),
    r"rewards provided had Infinite values\. \(behavior b": gets(reward=-np.inf),
    r"group_rewards provided had NaN values": gets(group_reward=np.nan),
    r"group_rewards provided had Infinite values": gets(group_reward=np.inf),
    r"observations provided had NaN values\. \(behavior b, .* 'an eye'": has(np.nan, obs=0, at=1),
    r"observations provided had Infinite values\. \(behavior b": has(np.inf, obs=1, at=3),
    r"index=0 for agent with id=9 .*expected the shape \(3,\) but got \(2,\)": sends(
        1, 2, shape=[2]
    ),
    r"index=0 for agent with id=9 .*\(3,\) does not fit the 4 values": sends(1, 2, 3, 4, shape=[3]),
    r"index=0 for agent with id=9 .*got \(3, 1\)": sends(1, 2, 3, shape=[3, 1]),
    r"id=-?\d+ of behavior 'b' sent 1 observations; .* has 2": lambda info: info.observations.pop(),
}


@pytest.mark.parametrize(("text", "change"), REFUSED.items())
def test_all_decoders_refuse_a_message_with_one_invalid_agent(text, change):
    message = usual()
    recurring = Decoder(SPEC, "b")
    recurring.decode(message.SerializeToString())
    change(message.value[4])
    data = message.SerializeToString()
    readers = (
        lambda: decode_steps(message.value, SPEC, "b"),
        lambda: Decoder(SPEC, "b").decode(data),
        lambda: recurring.decode(data),
    )
    for read, at_once in zip(readers, (False, True, False), strict=True):
        way = all_at_once() if at_once else contextlib.nullcontext()
        with way, pytest.raises(ObservationError, match=text) as caught:
            read()
        # ML-Agents raises a RuntimeError for such numbers.
        assert isinstance(caught.value, RuntimeError) == ("provided" in text)


def shuffled() -> bytes:
    message = encode_steps(*sample(SPEC, 5, 3, seed=2), SPEC)
    order = [6, 0, 3, 1, 7, 2, 4, 5]
    infos = [message.value[number] for number in order]
    return m.UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()


def masks(*rows) -> bytes:
    infos = [m.AgentInfoProto(id=number, action_mask=row) for number, row in enumerate(rows)]
    return m.UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()


def vectors(size: int) -> tuple[BehaviorSpec, bytes]:
    """Return a message of a vector; at some sizes, a length in it needs one more byte."""
    spec = BehaviorSpec([ObservationSpec.vector(size)], ActionSpec(1, ()))
    return spec, encode_steps(*sample(spec, 3, 1, 0), spec).SerializeToString()


NOTHING = BehaviorSpec([], ActionSpec(1, ()))
TWO = BehaviorSpec([], ActionSpec(0, (2,)))
TAILS = b"\x10\x05", b"\x15\x80\x80\x80\x80", b"\x1a\x02\x0a\x00"
# A specification and a message; whether it is read field by field, and its layout stored.
MESSAGES = {
    "agents that end and go on in any order": (SPEC, shuffled(), True, False),
    "no agents": (
        BehaviorSpec([ObservationSpec.visual(3, 4, 5)], ActionSpec(1, ())), b"", False, False
    ),
    "masks of other lengths": (
        BehaviorSpec([], ActionSpec(0, (2, 2))), masks([1, 0, 0, 1], [], [1, 1]), False, False
    ),
    "masks that are too short at the end of a message": (
        BehaviorSpec([], ActionSpec(0, (200_000,))), masks(*[[True, False]] * 3), False, False
    ),
    # 0x81 0x00 is a valid varint for 1, although no encoder writes it.
    "a flag of two bytes": (TWO, records.delimited(1, b"\x40\x81\x00"), False, False),
    "bits of two bytes": (TWO, records.delimited(1, b"\x5a\x03\x81\x00\x01"), False, False),
    "a bit of two bytes": (TWO, records.delimited(1, b"\x5a\x02\x81\x00"), False, False),
    **{f"vectors of {size}": (*vectors(size), True, False)
       for size in (25, 26, 27, 4050, 4062, 4063, 4080, 4090, 4096)},
    **{f"a list with unknown field {number}": (
           SPEC, usual().SerializeToString() + tail, False, False)
       for number, tail in enumerate(TAILS)},
    **{f"agents of nothing with unknown field {number}": (
           NOTHING, masks((), (), ()) + tail, False, False)
       for number, tail in enumerate(TAILS)},
}  # fmt: skip


@pytest.mark.parametrize(("spec", "data", "at_once", "remembered"), MESSAGES.values(), ids=MESSAGES)
def test_all_decoders_read_messages_with_unusual_fields_and_sizes(spec, data, at_once, remembered):
    assert read_by_all(data, spec) == (at_once, remembered)


def visual_info(properties, image) -> m.AgentInfoProto:
    info = m.AgentInfoProto(id=4)
    obs = info.observations.add(shape=image.shape, dimension_properties=properties)
    obs.float_data.data.extend(image.ravel().tolist())
    return info


@pytest.mark.parametrize(
    ("properties", "shape", "axes"),
    [
        *(([1, 2, 2], shape, (0, 1, 2)) for shape in [(3, 2, 4), (2, 4, 3), (3, 3, 3)]),
        *(([], shape, (0, 1, 2)) for shape in [(3, 2, 4), (2, 4, 3)]),
        *(([0, 0, 0], shape, (0, 1, 2)) for shape in [(3, 2, 4), (2, 4, 3)]),
        *(([2, 2, 1], shape, (2, 0, 1)) for shape in [(2, 3, 4), (2, 2, 2)]),
    ],
)
def test_decoded_images_are_channels_first(properties, shape, axes):
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    infos = [visual_info(properties, image + number) for number in range(3)]
    is_first = axes == (0, 1, 2)
    spec = behavior_spec_from(BRAIN, infos[0])
    none, spatial = DimensionProperty.NONE, DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
    assert spec.observation_specs[0].shape == tuple(shape[axis] for axis in axes)
    assert spec.observation_specs[0].dimension_property == (
        tuple(properties or (0, 0, 0)) if is_first else (none, spatial, spatial)
    )
    data = m.UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
    assert read_by_all(data, spec) == (is_first, is_first)


IMAGE = np.random.default_rng(0).random((3, 2, 4)).astype(np.float32)
FIRST, LAST = visual_info([1, 2, 2], IMAGE), visual_info([2, 2, 1], IMAGE.transpose(1, 2, 0))


@pytest.mark.parametrize("infos", [[FIRST, FIRST], [FIRST, LAST], [LAST, FIRST], [LAST, LAST]])
def test_images_with_channels_first_and_last_are_decoded_to_equal_arrays(infos, monkeypatch):
    spec = BehaviorSpec([ObservationSpec.visual(3, 2, 4)], ActionSpec(1, ()))
    if infos[0] is infos[1]:  # equal messages are read in one table
        monkeypatch.setattr(decoding, "_decode_slowly", None)
    np.testing.assert_array_equal(decode_steps(infos, spec)[0].obs[0], [IMAGE, IMAGE])


@pytest.mark.parametrize("together", [False, True])
def test_observation_without_the_announced_name_is_accepted_with_one_warning(together, caplog):
    long = "a name that is longer than an observation of one number"
    spec = BehaviorSpec([ObservationSpec.vector(1, long)], ActionSpec(1, ()))
    for name in ("", "x", long):
        message = m.UnityRLOutputProto.ListAgentInfoProto()
        for agent in range(2):
            obs = message.value.add(id=agent).observations.add(shape=[1], name=name)
            obs.float_data.data.append(agent)
        for _ in range(2):
            with all_at_once() if together else contextlib.nullcontext():
                decision, _ = decode_list(message, spec, f"B{together}")
            assert decision.obs[0].tolist() == [[0], [1]], name
    assert [record.message for record in caplog.records] == [
        f"Behavior B{together}: an agent calls its observations ['{name}'], the first agent "
        f"['{long}']. They are taken to mean the same, because their shapes agree; check that "
        "the names mean the same."
        for name in ("", "x")
    ]


@settings(max_examples=60)
@given(ACTIONS, st.integers(0, 5), st.integers(0, 99))
def test_encoded_actions_have_the_bytes_of_protobuf_and_round_trip(spec, n, seed):
    actions = spec.random_action(n, np.random.default_rng(seed))
    actions = ActionTuple(actions.continuous, actions.discrete - 1)  # negative choices, too
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


LARGEST = 2**31 - 128  # the largest float32 below 2^31
OLD = "vector_actions_deprecated"


def read_actions(spec: ActionSpec, field: str, *rows: list[float]) -> ActionTuple:
    entries = [{field: row} for row in rows]
    return decode_actions(m.UnityRLInputProto.ListAgentActionProto(value=entries), spec)


@pytest.mark.parametrize(
    ("spec", "field", "rows"),
    [
        # Entries of different lengths in the new field, without the deprecated field.
        (ActionSpec(0, (300, 300)), "discrete_actions", [[128, 1], [1, 299], [127, 0]]),
        (ActionSpec(2, ()), OLD, [[1.0, 2.0]]),  # as old environments read it
        (ActionSpec(0, (2, 3)), OLD, [[1.0, 2.0]]),
        (ActionSpec(0, (2,)), OLD, [[LARGEST]]),
    ],
)
def test_actions_in_old_and_new_fields_are_decoded(spec, field, rows):
    read = read_actions(spec, field, *rows)
    assert (read.discrete if spec.discrete_size else read.continuous).tolist() == rows


@pytest.mark.parametrize("choice", [float("nan"), float("inf"), -3e9, 2.0**31])
def test_invalid_actions_are_refused(choice):
    with pytest.raises(UnityActionException, match=r"agent number 1 got the discrete actions \["):
        read_actions(ActionSpec(0, (2,)), OLD, [LARGEST], [choice])
    with pytest.raises(UnityActionException, match="got 2 continuous and 0 discrete"):
        read_actions(ActionSpec(3, ()), OLD, [1.0, 2.0])
    with pytest.raises(UnityCommunicationException, match="the trainer sent 1 bytes that are"):
        actions.decode_actions(b"\xff", ActionSpec(2, ()))


@pytest.mark.parametrize(
    "spec", [ActionSpec(3, ()), ActionSpec(0, (2, 100)), ActionSpec(2, (4, 5))]
)
def test_actions_of_many_agents_are_decoded_all_at_once(spec, monkeypatch):
    monkeypatch.setattr(actions, "decode_entries", None)
    sent = spec.random_action(7, np.random.default_rng(0))
    decoded = decode_actions(encode_actions(sent, BehaviorSpec([], spec)), spec)
    np.testing.assert_array_equal(decoded.continuous, sent.continuous)
    np.testing.assert_array_equal(decoded.discrete, sent.discrete)


def test_behavior_announcement_round_trips_with_old_and_new_fields():
    info = m.AgentInfoProto()
    for action in (ActionSpec(2, ()), ActionSpec(0, (3, 2))):
        brain = brain_parameters("b", BehaviorSpec([], action), old_fields=True)
        assert behavior_spec_from(brain, info).action_spec == action
        brain.ClearField("action_spec")
        assert behavior_spec_from(brain, info).action_spec == action
    brain.action_spec.num_discrete_actions = 2
    brain.action_spec.discrete_branch_sizes.append(3)
    with pytest.raises(UnityEnvironmentException, match=r"2 discrete actions but .* of 1 branches"):
        behavior_spec_from(brain, info)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",  # a tag that is cut off
        b"\x0a\x05\x3d",  # an agent that is cut off
        b"\x0a\x04\x6a\x02\x0a\x05",  # an observation that is cut off
        b"\x0a\x0c\x50" + b"\xff" * 11,  # an id of more than ten bytes
    ],
)
@pytest.mark.parametrize("many", [1, 256])
def test_bytes_that_are_not_a_message_are_refused(data, many, monkeypatch):
    monkeypatch.setattr(layout_cache, "MANY", many)
    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))
    with pytest.raises(UnityCommunicationException, match="not a message of the protocol"):
        Decoder(spec, "b").decode(data)
