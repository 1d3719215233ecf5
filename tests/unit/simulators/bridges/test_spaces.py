import logging

import numpy as np
import pytest
from bridge_toys import numbers_of, wire_of
from gymnasium import spaces

from pipeline.core.specs import ActionTuple
from pipeline.errors import SettingsError, UnityEnvironmentException, UnityObservationException
from pipeline.simulators.bridges.spaces import Actions, Observations

ACTION_SPACES = {
    "box": spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 0.5, 9])),
    "box of rank 2": spaces.Box(-1, 1, (2, 3)),
    "box of whole numbers": spaces.Box(-3, 6, (4,), dtype=np.int32),
    "discrete": spaces.Discrete(5),
    "discrete with start": spaces.Discrete(4, start=-1),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 7]),
    "multi-discrete of rank 2 with start": spaces.MultiDiscrete(
        [[2, 3], [4, 5]], start=[[1, 0], [2, 7]]
    ),
    "multi-binary": spaces.MultiBinary([2, 3]),
    "map": spaces.Dict(
        {
            "steer": spaces.Box(-1, 1, (2,)),
            "gear": spaces.Discrete(3),
            "fire": spaces.MultiBinary(1),
        }
    ),
    "nested": spaces.Tuple(
        (spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 1, ()), "y": spaces.Discrete(3)}))
    ),
}
OBSERVATION_SPACES = {
    "box": spaces.Box(-np.inf, np.inf, (3,), dtype=np.float64),
    "one number": spaces.Box(-5, 5, ()),
    "matrix": spaces.Box(-1, 1, (3, 4)),
    "board": spaces.Box(0, 1, (3, 3, 2), dtype=np.int8),
    "rank 4": spaces.Box(-1, 1, (2, 2, 2, 2)),
    "discrete": spaces.Discrete(6, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 4], start=[0, 1]),
    "multi-binary": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict(
        {
            "b": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
            "a": spaces.Dict({"deep": spaces.MultiBinary(2)}),
        }
    ),
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_actions_of_a_space_round_trip_through_the_actions_of_a_behavior(name):
    space = ACTION_SPACES[name]
    space.seed(3)
    codec = Actions(space, where="toy")
    samples = [space.sample() for _ in range(50)]
    wires = [wire_of(space, sample) for sample in samples]
    native = codec.native(
        ActionTuple(
            np.array([c for c, _ in wires], dtype=np.float32).reshape(50, -1),
            np.array([d for _, d in wires], dtype=np.int32).reshape(50, -1),
        )
    )
    for sample, arrived in zip(samples, native, strict=True):
        assert space.contains(arrived)
        expected, actual = spaces.flatten(space, sample), spaces.flatten(space, arrived)
        assert actual == pytest.approx(expected, abs=1e-6)
    for value in (-7.0, -1.0, 1.0, 7.0):  # the bounds, and values beyond
        continuous = np.full((1, codec.spec.continuous_size), value, dtype=np.float32)
        last = np.array([codec.spec.discrete_branches], dtype=np.int32) - 1
        (action,) = codec.native(ActionTuple(continuous, last))
        assert space.contains(action)


def test_an_unbounded_action_is_refused_unless_a_scale_is_given():
    space = spaces.Box(np.float32([-1, -np.inf, 0]), np.float32([1, np.inf, np.inf]))
    with pytest.raises(SettingsError, match="toy: the action 'action' has no finite bounds in dim"):
        Actions(space, where="toy")
    codec = Actions(space, where="toy", scale=4.0)
    action = np.array([[0.5, -0.5, 0.5], [1, 1, -1]], dtype=np.float32)
    native = codec.native(ActionTuple(action))
    assert np.array_equal(native, [[0.5, -2.0, 2.0], [1.0, 4.0, 0.0]])


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_observations_of_a_space_become_float32_arrays_of_the_same_numbers(name):
    space = OBSERVATION_SPACES[name]
    space.seed(4)
    codec = Observations(space, where="toy")
    samples = [space.sample() for _ in range(20)]
    arrays = codec.empty(20)
    for row, sample in enumerate(samples):
        codec.put(arrays, row, sample)
    for row, sample in enumerate(samples):
        expected = numbers_of(space, sample)
        assert [array[row].ravel().tolist() for array in arrays] == [
            np.float32(numbers).tolist() for numbers in expected
        ]
    assert [array.dtype for array in arrays] == [np.float32] * len(arrays)


def test_parts_of_a_nested_space_keep_their_order_and_are_named_by_their_paths():
    codec = Observations(OBSERVATION_SPACES["nested"], where="toy")
    assert [(spec.name, spec.shape) for spec in codec.specs] == [
        ("a/deep", (2,)),
        ("b/0", (3,)),
        ("b/1", (2,)),
    ]
    # fire, gear and steer; a number and a choice within a tree
    for name, sizes in (("map", (2, (2, 3))), ("nested", (1, (2, 3)))):
        assert Actions(ACTION_SPACES[name], where="toy").spec == sizes


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((40, 30, 3), (2, 0, 1), (3, 40, 30)),
        ((4, 84, 84), (0, 1, 2), (4, 84, 84)),
        ((84, 84), None, (1, 84, 84)),
    ],
)
def test_image_of_bytes_is_observed_with_channels_first_and_values_from_0_to_1(
    shape, axes, expected
):
    space = spaces.Box(0, 255, shape, dtype=np.uint8)
    space.seed(1)
    codec = Observations(space, where="toy")
    assert codec.specs[0].shape == expected
    image = space.sample()
    (array,) = arrays = codec.empty(1)
    codec.put(arrays, 0, image)
    moved = image[None] if axes is None else image.transpose(axes)
    assert np.array_equal(array[0], moved.astype(np.float32) / np.float32(255))


def test_small_images_are_observed_as_vectors_unless_the_option_visual_is_always():
    space = spaces.Box(0, 255, (7, 7, 3), dtype=np.uint8)
    assert Observations(space, where="toy").specs[0].shape == (147,)
    assert Observations(space, where="toy", visual="always").specs[0].shape == (3, 7, 7)
    large = spaces.Box(0, 1, (20, 30, 3))
    assert Observations(large, where="toy").specs[0].shape == (3, 20, 30)
    assert Observations(large, where="toy", visual="never").specs[0].shape == (1800,)
    with pytest.raises(SettingsError, match="toy: visual is 'maybe'; choose one of auto"):
        Observations(space, where="toy", visual="maybe")


@pytest.mark.parametrize("shape", [(7, 7, 3), (3, 16, 16), (19, 40)])
def test_small_image_of_bytes_is_observed_as_a_vector_from_0_to_1_and_the_log_says_so(
    shape, caplog
):
    caplog.set_level(logging.INFO)
    space = spaces.Box(0, 255, shape, np.uint8)
    space.seed(1)
    picture = space.sample()
    numbers = {}
    for visual in ("auto", "never"):
        codec = Observations(space, where="toy", visual=visual)
        (numbers[visual],) = arrays = codec.empty(1)
        codec.put(arrays, 0, picture)
        scales = ["obs_0: 0 to 1 stand for 0 to 255"] if visual == "auto" else []
        assert codec.scales == scales
    assert np.array_equal(numbers["auto"][0], picture.ravel() / np.float32(255))
    assert np.array_equal(numbers["never"][0], picture.ravel())  # said to be no picture
    (line,) = caplog.messages
    assert "`visual: always` (`--option visual=always` of" in line


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (128,), np.uint8),
        spaces.Box(0, 15, (6, 7, 2), np.uint8),
        spaces.Box(0, 1, (6, 7, 2), np.int8),
        spaces.Box(0, 255, (4, 4, 3), np.float32),
    ],
    ids=str,
)
def test_observation_of_a_box_space_that_is_not_an_image_is_not_scaled(space, caplog):
    caplog.set_level(logging.INFO)
    codec = Observations(space, where="toy")
    (array,) = arrays = codec.empty(1)
    codec.put(arrays, 0, space.high)
    assert np.array_equal(array[0], space.high.ravel())
    assert not codec.scales
    assert not caplog.messages


REFUSED = {
    "Text": spaces.Text(5),
    "Sequence": spaces.Sequence(spaces.Discrete(2)),
    "Graph": spaces.Graph(spaces.Box(0, 1, (2,)), None),
    "OneOf": spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_for_an_unsupported_space_names_the_space(name):
    tree = spaces.Dict({"fine": spaces.Discrete(2), "bag": spaces.Tuple((REFUSED[name],))})
    for codec, kind in ((Observations, "observation"), (Actions, "action")):
        with pytest.raises(SettingsError) as refused:
            codec(tree, where="toy")
        assert f"toy: the {kind} 'bag/0' is a {name} space, which" in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(SettingsError, match=r"'nothing' is Box.* has no numbers"):
        Observations(spaces.Dict({"nothing": spaces.Box(0, 1, (0,))}), where="toy")
    with pytest.raises(SettingsError, match="has no action"):
        Actions(spaces.Dict({}), where="toy")


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(0, 1, (3,)), np.zeros(4)),
        (spaces.Discrete(3, start=1), 0),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}),
    ],
)
def test_error_for_an_observation_outside_of_the_space_names_the_observation(space, value):
    codec = Observations(space, where="toy")
    with pytest.raises(UnityObservationException, match=r"toy: the observation '.*' does not fit"):
        codec.put(codec.empty(1), 0, value)


def test_zero_in_a_gymnasium_mask_forbids_a_choice():
    codec = Actions(spaces.MultiDiscrete([2, 3]), where="toy")
    split = (np.array([1, 0]), np.array([0, 1, 1], dtype=np.int8))
    for mask in (split, np.concatenate(split)):
        assert codec.forbidden(mask).tolist() == [False, True, True, False, False]
    first, second = codec.masks(np.array([[False, True, True, False, False]]))
    assert first.tolist() == [[False, True]]
    assert second.tolist() == [[True, False, False]]
    for wrong, said in (
        (np.ones(4), "has 4 entries; give 5 entries, 1 for each allowed"),
        (np.array([1, 1, 0, 0, 0]), "forbids every choice of the discrete action 1"),
    ):
        with pytest.raises(UnityEnvironmentException, match=said):
            codec.forbidden(wrong)
