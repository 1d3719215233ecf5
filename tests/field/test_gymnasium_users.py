"""Reports of users who train in environments of Gymnasium."""

import inspect
import logging
from functools import partial
from pathlib import Path

import field_environments
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import pipeline
from pipeline.core.specs import ActionTuple
from pipeline.errors import (
    PipelineError,
    SettingsError,
    UnityEnvironmentException,
    UnityObservationException,
)
from pipeline.simulators.bridges.batches import picture
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator
from pipeline.simulators.bridges.spaces import Actions, Observations


def simulator(*envs, **options):
    return GymnasiumSimulator(id=envs, **options)


def steps_of(sim, choices=None):
    """Return the steps after a reset, or after these actions of the copies."""
    (behavior,) = sim.behavior_specs
    if choices is None:
        return sim.reset()[behavior]
    numbers = np.zeros((len(choices), 0), np.float32)
    return sim.step({behavior: ActionTuple(numbers, np.array(choices, np.int32))})[behavior]


def observed(space, value, **options):
    codec = Observations(space, where="mine", **options)
    (array,) = arrays = codec.empty(1)
    codec.put(arrays, 0, value)
    return array[0]


# Images.


def test_image_of_bytes_0_and_1_keeps_its_contrast():
    """stable-baselines3#1162, stable-baselines#328."""
    decisions, _ = steps_of(simulator(field_environments.ImageOfZeroOne()))
    assert decisions.obs[0].shape == (1, 1, 20, 20)
    assert np.unique(decisions.obs[0]).tolist() == [0.0, 1.0]
    assert decisions.obs[0].sum() == 16


BOUNDS = {
    "gray levels": (np.uint8, 0, 15),
    "offset": (np.uint8, 55, 255),
    "sixteen bits": (np.uint16, 0, 65535),
    "signed": (np.int8, -128, 127),
    "long": (np.int64, -5, 7),
    "float to 255": (np.float32, 0, 255),
    "around zero": (np.float32, -1, 1),
    "doubles": (np.float64, -0.5, 1.5),
}


@pytest.mark.parametrize("shape", [(20, 24, 3), (3, 20, 24)])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_an_image_is_scaled_by_the_bounds_of_its_space(bounds, shape):
    dtype, low, high = BOUNDS[bounds]
    space = spaces.Box(low, high, shape, dtype)
    space.seed(1)
    image = space.sample()
    image.flat[:2] = low, high
    array = observed(space, image, visual="always")
    moved = image if shape[0] == 3 else image.transpose(2, 0, 1)
    expected = (moved.astype(np.float64) - low) / (high - low)
    np.testing.assert_allclose(array, expected, atol=1e-6)
    assert (array.min(), array.max()) == (0, 1)


def test_each_image_channel_is_scaled_by_its_own_bounds():
    low, high = (np.broadcast_to(np.float32(edge), (20, 24, 3)) for edge in ([0, -1, 5], [1, 1, 5]))
    array = observed(spaces.Box(low, high, dtype=np.float32), high, visual="always")
    assert array[:, 0, 0].tolist() == [1, 1, 0]  # a channel whose bounds are equal has one value


def test_two_dimensional_byte_image_is_scaled_by_its_bounds():
    array = observed(spaces.Box(0, 1, (20, 24), np.uint8), np.eye(20, 24), visual="always")
    assert np.array_equal(array, np.eye(20, 24)[None])


def test_pixel_outside_of_the_image_bounds_is_refused():
    image = np.zeros((20, 20, 1), np.uint8)
    image[3, 4, 0] = 255
    with pytest.raises(UnityObservationException, match="pixel 3, 4, 0 is 255, allowed are 0 to 1"):
        observed(field_environments.ImageOfZeroOne.observation_space, image)


AXES = ", because an image has three axes, or two of bytes"


@pytest.mark.parametrize(
    ("space", "why"),
    [
        (spaces.Box(-np.inf, np.inf, (20, 24, 3)), ", because"),
        (spaces.Box(0, 1, (20, 24)), AXES),
        (spaces.Box(0, 1, (4, 20, 24, 3)), AXES),
    ],
)
def test_observation_of_a_space_that_is_no_image_stays_a_vector_and_the_reason_is_logged(
    caplog, space, why
):
    caplog.set_level(logging.INFO)
    array = observed(space, space.sample(), visual="always")
    assert array.shape == (np.prod(space.shape),)
    (line,) = caplog.messages
    assert f"the observation 'observation' is a vector and not an image{why}" in line


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_])
def test_video_frame_keeps_brightness_of_the_rendered_image(dtype):
    class Drawn(field_environments.Guess):
        def render(self):
            image = np.zeros((4, 4, 3), dtype)
            image[0] = 255 if dtype == np.uint8 else 1
            return image

    drawn = picture(Drawn(), "mine")
    assert drawn.dtype == np.uint8
    assert drawn[:2, 0, 0].tolist() == [255, 0]


# Observations outside of their space.


@pytest.mark.parametrize(
    ("space", "value", "said"),
    [
        (spaces.MultiDiscrete([3, 2]), [3, 0], "part 0 is 3, allowed are 0 to 2"),
        (spaces.MultiDiscrete([3, 2]), [0, -1], "part 1 is -1, allowed are 0 to 1"),
        (spaces.MultiDiscrete([3, 2], start=[1, 5]), [1, 4], "part 1 is 4, allowed are 5 to 6"),
        (spaces.MultiDiscrete([[3, 2]] * 2), [[0, 0], [0, 2]], "part 1, 1 is 2, allowed are 0 to"),
        (spaces.MultiDiscrete([3, 2]), [0.5, 0], "Cannot cast"),
        (spaces.MultiDiscrete([3, 2]), [1], "cannot reshape"),
        (spaces.MultiBinary(3), [0, 2, 1], "part 1 is 2, allowed are 0 to 1"),
        (spaces.MultiBinary([2, 2]), [[0, 1], [-1, 1]], "part 1, 0 is -1, allowed are 0 to 1"),
        (spaces.MultiBinary(2), [0, 0.5], "part 1 is 0.5, allowed are 0 to 1"),
        (spaces.Discrete(3), 3, "the value is 3, allowed are 0 to 2"),
        (spaces.Discrete(3, start=-1), 2, "the value is 2, allowed are -1 to 1"),
        (spaces.Discrete(3), 0.5, "the value is 0.5, allowed are 0 to 2"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_observation_outside_of_its_space_is_refused(space, value, said, nested):
    """stable-baselines#61, ray#23527."""
    value = np.array(value)[()]
    if nested:
        tree = spaces.Dict({"bag": spaces.Tuple((spaces.Discrete(2), space))})
        space, value = tree, {"bag": (0, value)}
    with pytest.raises(UnityObservationException) as refused:
        observed_all(space, value)
    name = "bag/1" if nested else "observation"
    assert f"mine: the observation '{name}' does not fit its space" in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def observed_all(space, value):
    codec = Observations(space, where="mine")
    arrays = codec.empty(1)
    codec.put(arrays, 0, value)
    return [array[0].tolist() for array in arrays]


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.MultiDiscrete([3, 2], start=[1, 5]), np.uint8([3, 5]), [0, 0, 1, 1, 0]),
        (spaces.MultiDiscrete([2, 2]), np.array([True, False]), [0, 1, 1, 0]),
        (spaces.MultiBinary(3), np.array([True, False, True]), [1, 0, 1]),
        (spaces.MultiBinary(2), [0.0, 1.0], [0, 1]),
        (spaces.Discrete(3, start=-1), np.float32(1), [0, 0, 1]),
    ],
)
def test_observation_with_another_dtype_than_its_space_gives_the_same_values(
    space, value, expected
):
    assert observed_all(space, value) == [expected]


def test_multidiscrete_observation_whose_values_start_at_1_instead_of_0_is_refused():
    """stable-baselines#61, ray#23527."""
    sim = simulator(*(field_environments.OneBasedParts() for _ in range(8)))
    with pytest.raises(UnityObservationException, match="part 0 is 3, allowed are 0 to 2"):
        steps_of(sim)


# The mask inside the observation.


def test_entry_action_mask_of_a_dict_observation_is_used_as_the_action_mask(caplog):
    """ray#9536, ray#20390."""
    caplog.set_level(logging.INFO)
    sim = simulator(*(field_environments.MaskInsideObservation() for _ in range(2)))
    assert caplog.text.count("the observation's 'action_mask' is the action mask, not an in") == 1
    (spec,) = sim.behavior_specs.values()
    assert [(obs.name, obs.shape) for obs in spec.observation_specs] == [("observation", (1,))]
    decisions, _ = steps_of(sim)
    for n_steps in range(1, 12):  # also after the end of an episode
        assert decisions.action_mask[0].tolist() == [[True, True, False]] * 2
        decisions, terminals = steps_of(sim, [[2], [2]])
        assert decisions.reward.tolist() == [1.0 if n_steps % 10 else 0.0] * 2
        assert len(terminals) == (0 if n_steps % 10 else 2)
        assert len(terminals.obs) == 1


class Masked(field_environments.Guess):
    """Observes `given` whatever the action, and `last` at the end of an episode."""

    def __init__(self, observation_space, action_space, given, last=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.given, self.last = given, last or given

    def observe(self):
        return self.given if self.n_steps < 10 else self.last

    def step(self, action):  # noqa: ARG002  # Gymnasium's form
        self.n_steps += 1
        return self.observe(), 0.0, self.n_steps >= 10, False, {}


def masked(mask_space, action_space, mask, key="observations", mask_key="action_mask", **more):
    """Return a simulator of one environment that observes a number, a mask and `more`."""
    parts = {key: spaces.Box(-2, 2, (1,)), mask_key: mask_space}
    parts |= {name: spaces.Box(-2, 2, (2,)) for name in more}
    given = {key: np.ones(1, np.float32), mask_key: mask, **more}
    return simulator(Masked(spaces.Dict(parts), action_space, given))


@pytest.mark.parametrize("key", ["obs", "observation", "observations"])
@pytest.mark.parametrize("mask_key", ["action_mask", "mask"])
@pytest.mark.parametrize(
    "mask_space",
    [spaces.MultiBinary(2), spaces.Box(0, 1, (2,), np.int8), spaces.Box(0, 1, (2,), np.bool_)],
)
def test_action_mask_is_found_under_each_supported_key_and_in_each_supported_space(
    key, mask_key, mask_space
):
    mask = np.array([0, 1], mask_space.dtype)
    sim = masked(mask_space, spaces.Discrete(2), mask, key, mask_key)
    decisions, _ = steps_of(sim)
    assert [values.tolist() for values in decisions.obs] == [[[1.0]]]
    assert [branch.tolist() for branch in decisions.action_mask] == [[[True, False]]]


BRANCHES = {
    "in one array": (spaces.MultiBinary(5), [1, 0, 0, 1, 1]),
    "a part for each": (
        spaces.Tuple((spaces.MultiBinary(2), spaces.MultiBinary(3))),
        (np.int8([1, 0]), np.int8([0, 1, 1])),
    ),
}


@pytest.mark.parametrize("form", BRANCHES)
def test_action_mask_of_several_branches_is_split_per_branch(form):
    mask_space, mask = BRANCHES[form]
    decisions, _ = steps_of(masked(mask_space, spaces.MultiDiscrete([2, 3]), mask))
    assert [branch.tolist() for branch in decisions.action_mask] == [
        [[False, True]],
        [[True, False, False]],
    ]


def test_action_mask_of_a_nested_action_space_is_flattened():
    actions = spaces.Dict(
        {"move": spaces.Discrete(2), "aim": spaces.Box(-1, 1), "fire": spaces.MultiBinary(1)}
    )
    parts = {"move": spaces.MultiBinary(2), "fire": spaces.MultiBinary(2)}
    mask = {"move": np.int8([0, 1]), "fire": np.int8([1, 0])}
    sim = masked(spaces.Dict(parts), actions, mask)
    (spec,) = sim.behavior_specs.values()
    assert spec.action_spec.discrete_branches == (2, 2)  # aim, fire, move
    env_mask = Actions(actions, where="mine").forbidden({"aim": None, **mask})
    assert env_mask.tolist() == [False, True, True, False]


TREE = spaces.Dict(
    {
        "aim": spaces.Box(-1, 1),
        "arms": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
        "bits": spaces.MultiBinary(3),
        "move": spaces.Discrete(3),
    }
)


def test_action_mask_in_the_form_of_space_sample_allows_the_same_actions_as_space_sample():
    """Each part has the form of its space; None allows all."""
    mask = {
        "aim": None,
        "arms": (np.int8([0, 1]), (np.int8([1, 0]), np.int8([0, 1, 1]))),
        "bits": np.int8([0, 1, 2]),
        "move": None,
    }
    codec = Actions(TREE, where="mine")
    forbidden = codec.forbidden(mask)
    allowed = [set() for _ in codec.spec.discrete_branches]
    for _ in range(200):
        arms, bits, move = (TREE.sample(mask=mask)[key] for key in ("arms", "bits", "move"))
        for branch, choice in enumerate([arms[0], *arms[1], *bits, move]):
            allowed[branch].add(int(choice))
    for branch, part in enumerate(codec.masks(forbidden[None])):
        assert set(np.flatnonzero(~part[0]).tolist()) == allowed[branch]


@pytest.mark.parametrize(
    ("space", "mask", "said"),
    [
        (TREE, {"moves": np.ones(3)}, "has the part 'moves', but the action has ['aim', 'arms',"),
        (TREE, {"arms": (None, None), "bits": None}, "has no part 'move', which the action has;"),
        (TREE["arms"], (np.int8([0, 1]),), "has 1 parts, but the action has 2;"),
        (TREE["arms"], {"a": np.int8([0, 1])}, "has 2 entries; give 7 entries, 1 for each"),
        (TREE["bits"], np.ones(4, np.int8), "has 4 entries; give 6 entries"),
        (spaces.Discrete(3), {"move": np.int8([0, 1])}, "has 2 entries; give 3 entries"),
        (spaces.Discrete(3), [1, 0], "has 2 entries; give 3 entries"),
    ],
)
def test_action_mask_with_a_wrong_structure_or_length_is_refused(space, mask, said):
    with pytest.raises(UnityEnvironmentException, match="mine: the action mask has ") as refused:
        Actions(space, where="mine").forbidden(mask)
    assert said in str(refused.value)
    assert str(refused.value).endswith("in the form that action_space.sample(mask=...) takes.")


def test_action_mask_may_be_a_plain_list():
    assert Actions(TREE["arms"], where="mine").forbidden([1, 0, 1, 1, 0, 0, 1]).tolist() == [
        *(False, True, False, False, True, True, False)
    ]


def test_action_mask_among_several_observations_leaves_the_other_observations_unchanged():
    sim = masked(
        spaces.MultiBinary(2),
        spaces.Discrete(2),
        np.int8([0, 1]),
        key="position",
        wind=np.zeros(2, np.float32),
    )
    (spec,) = sim.behavior_specs.values()
    assert [obs.name for obs in spec.observation_specs] == ["position", "wind"]
    assert steps_of(sim)[0].action_mask[0].tolist() == [[True, False]]


def test_action_mask_of_the_last_observation_of_an_episode_may_forbid_every_action():
    space = field_environments.MaskInsideObservation.observation_space
    given = {"observations": np.ones(1, np.float32), "action_mask": np.int8([1, 1, 0])}
    last = {"observations": np.full(1, 2, np.float32), "action_mask": np.zeros(3, np.int8)}
    sim = simulator(Masked(space, spaces.Discrete(3), given, last))
    steps_of(sim)
    for _ in range(10):
        decisions, terminals = steps_of(sim, [[0]])
    assert terminals.obs[0].tolist() == [[2.0]]
    assert decisions.obs[0].tolist() == [[1.0]]
    assert decisions.action_mask[0].tolist() == [[False, False, True]]


def test_entry_action_mask_of_wrong_size_is_refused_and_entry_mask_stays_an_observation():
    with pytest.raises(SettingsError, match=r"'action_mask' has 6 entries, but .* have 5 choices"):
        masked(spaces.Box(0, 1, (2, 3)), spaces.MultiDiscrete([2, 3]), np.ones((2, 3)))
    image = masked(spaces.Box(0, 1, (2, 3)), spaces.Discrete(2), np.ones((2, 3)), mask_key="mask")
    assert [obs.shape for obs in next(iter(image.behavior_specs.values())).observation_specs] == [
        (6,),
        (1,),
    ]
    steering = masked(spaces.MultiBinary(2), spaces.Box(-1, 1, (2,)), np.int8([1, 1]))
    assert len(next(iter(steering.behavior_specs.values())).observation_specs) == 2


def test_observation_that_lacks_the_action_mask_of_its_space_is_refused():
    space = field_environments.MaskInsideObservation.observation_space
    sim = simulator(Masked(space, spaces.Discrete(3), {"observations": np.ones(1, np.float32)}))
    with pytest.raises(
        UnityObservationException, match="has no part 'action_mask', although its sp"
    ):
        steps_of(sim)


# Actions.


def test_discrete_action_has_numpy_scalar_methods():
    """tf-agents#520."""
    sim = simulator(field_environments.TakesItem())
    steps_of(sim)
    decisions, _ = steps_of(sim, [[1]])
    assert len(decisions) == 1


ACTIONS = {
    "discrete": spaces.Discrete(5, start=3),
    "discrete of 32 bits": spaces.Discrete(5, start=3, dtype=np.int32),
    "map": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
    "nested": spaces.Dict({"a": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))}),
}


def types_of(action):
    if isinstance(action, dict):
        return {key: types_of(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(map(types_of, action))
    return type(action), action.dtype


@pytest.mark.parametrize("name", ACTIONS)
def test_environment_receives_actions_with_the_types_of_a_space_sample(name):
    space = ACTIONS[name]
    codec = Actions(space, where="mine")
    for action in codec.native(codec.spec.random_action(3, np.random.default_rng(0))):
        assert types_of(action) == types_of(space.sample())
        assert space.contains(action)


# What an environment returns.


FIVE = "5 values: observation, reward, terminated, truncated, info;"
RETURNED = {
    "GymBefore26": ("step", "returns 4 values", FIVE),
    "RewardIsArray": ("step", "returns array([1.]) as reward", "one number;"),
    "NoInfo": ("step", "returns None as info", "a dict;"),
    "NoReward": ("step", "returns None as reward", "one number;"),
    "EndIsArray": (
        "step",
        "returns array([False,  True]) as terminated",
        "True or False;",
    ),
    "ResetBefore26": (
        "reset",
        "returns one ndarray",
        "2 values: observation, info;",
    ),
    "ResetWithoutSeed": (
        "reset",
        "takes no 'seed'",
        "reset(*, seed=None, options=None);",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_error_about_a_wrong_return_value_names_the_method_and_gives_the_line_of_the_method(name):
    kind, (method, given, asked) = getattr(field_environments, name), RETURNED[name]
    sim = simulator(kind())
    with pytest.raises(UnityEnvironmentException) as refused:
        list(map(partial(steps_of, sim), (None, [[0]], [[1]])))
    file, line = inspect.getsourcefile(kind), inspect.getsourcelines(getattr(kind, method))[1]
    place = f"({Path(file).name}:{line})"
    given = given.replace("[False,  True]", "[False, True]")
    assert str(refused.value) == (
        f"{name}: {method}() {place} {given}, and Gymnasium asks for {asked} repair the environment"
    )


def test_error_about_a_wrapped_environment_with_an_old_step_gives_the_place_of_the_step():
    sim = simulator(TimeLimit(field_environments.GymBefore26(), 5))
    steps_of(sim)
    with pytest.raises(UnityEnvironmentException, match=r"GymBefore26: step\(\) \(field_envi") as e:
        steps_of(sim, [[0]])
    assert "returns another number of values (not enough values to unpack (expected" in str(e.value)


def test_exception_of_the_environment_is_raised_unchanged():
    sim = simulator(field_environments.Fails())
    steps_of(sim)
    with pytest.raises(ValueError, match=r"^mine$"):
        steps_of(sim, [[0]])


def of_both(value):
    return {"x": value, "y": value}


GOOD = (of_both(np.zeros(1)), of_both(0.0), of_both(False), of_both(False), of_both({}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"returned": GOOD[:4]},
            "returns 4 values, and PettingZoo asks for 5 values: obse",
        ),
        ({"returned": (*GOOD[:4], None)}, "returns None as infos, and PettingZoo asks for a dict"),
        ({"returned": (*GOOD[:4], of_both(None))}, "the info of an agent is None, but PettingZoo"),
        (
            {"returned": (GOOD[0], {"x": None, "y": 0.0}, *GOOD[2:])},
            "returns {'x': None, 'y': 0.0} as rewards, and PettingZoo asks for one number for each",
        ),
        ({"begun": GOOD[0]}, "returns one dict, and PettingZoo asks for 2 values: observations, i"),
        ({"begun": (GOOD[0], None)}, "returns None as infos, and PettingZoo asks for a dict with"),
    ],
)
def test_wrong_return_value_of_a_pettingzoo_environment_is_reported(changes, said):
    env = field_environments.Pair()
    vars(env).update({"returned": GOOD} | changes)
    sim = PettingZooSimulator(id=[env])
    if "returned" in changes:
        sim.reset()
    one = ActionTuple(np.zeros((1, 0)), np.zeros((1, 1), np.int32))
    with pytest.raises(UnityEnvironmentException) as refused:
        sim.reset() if "begun" in changes else sim.step(dict.fromkeys(sim.behavior_specs, one))
    assert said in str(refused.value)


def test_missing_reward_of_a_turn_based_environment_is_reported():
    class NoTurnReward(field_environments.FirstMayFold):
        def last(self, observe=True):
            return super().last(observe)[0], None, False, False, {}

    sim = PettingZooSimulator(id=[NoTurnReward()])
    with pytest.raises(UnityEnvironmentException, match=r"last\(\) .* returns None as reward, and"):
        sim.reset()


def test_error_about_an_environment_that_calls_sys_exit_gives_the_line_of_the_call(tmp_path):
    env, settings = field_environments.Exits(), {"default_settings": {}}
    said = r"it calls sys\.exit\('no license'\) \(field_environments\.py:"
    with pytest.raises(UnityEnvironmentException, match=said):
        pipeline.train(env, settings, seed=1, run_dir=tmp_path / "run")
    said = r":ExitsAtOnce: fails: it calls sys\.exit\(1\) \(field_environments\.py:\d+\)$"
    with pytest.raises(SettingsError, match=said):
        pipeline.make_env("field_environments:ExitsAtOnce")
    for name in ("Exits", "ExitsAtOnce"):
        with pytest.raises(PipelineError, match=r"it calls sys\.exit\(.*\) \(field_environments"):
            pipeline.build_env(f"field_environments:{name}", tmp_path / name)
