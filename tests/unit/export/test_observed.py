"""What an environment of Gymnasium gives goes into an exported policy as it is."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import pipeline
from pipeline.core.specs import SPACES, ScaledSpec, scales_of
from pipeline.errors import ExportError
from pipeline.export.layout import ModelDescription, TensorInfo
from pipeline.export.observed import EnvironmentForm, network_steps
from pipeline.simulators.bridges.batches import Codec
from pipeline.simulators.bridges.space_text import from_text, to_text

SHORT = {
    "default_settings": {
        "trainer_type": "ppo",
        "max_steps": 32,
        "network_settings": {"hidden_units": 8},
        "hyperparameters": {"batch_size": 16, "buffer_size": 32},
    }
}
SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (24, 20, 3), np.uint8),
        "first": spaces.Box(0, 255, (3, 20, 24), np.uint8),
        "gray": spaces.Box(0, 255, (20, 22), np.uint8),
        "gear": spaces.Discrete(3, start=2),
        "place": spaces.Box(-9, 9, (2, 2), np.float32),
        "more": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4))),
    }
)


SMALL = spaces.Box(0, 255, (16, 12, 3), np.uint8)


class Sights(gymnasium.Env):
    """Every kind of observation, the same in each episode, and actions of both kinds."""

    observation_space = SPACE
    action_space = spaces.Dict(
        {"wheel": spaces.Box(-2, 7, (2,), np.float32), "gear": spaces.Discrete(3, start=5)}
    )

    def __init__(self):
        self.played: list[list] = []

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.observation_space.seed(4)
        self.played.append([])
        return self._seen(), {}

    def step(self, action):
        self.played[-1].append([*action["wheel"], action["gear"]])
        return self._seen(), 1.0, len(self.played[-1]) == 20, False, {}

    def _seen(self):
        allowed = np.array([1, 0, 1], np.int8)
        return {**self.observation_space.sample(), "action_mask": allowed}


Sights.observation_space = spaces.Dict({**SPACE.spaces, "action_mask": spaces.MultiBinary(3)})


@pytest.mark.parametrize("kind", ["onnx", "checkpoint"])
def test_act_in_a_loop_of_the_user_chooses_the_same_actions_as_evaluate(tmp_path: Path, kind: str):
    """Of 200 actions on images of bytes 54 were others: the network took 255 for 1."""
    result = pipeline.train(Sights(), SHORT, seed=1, run_dir=tmp_path)
    path = result.behaviors["Sights"].checkpoint
    if kind == "onnx":
        path = pipeline.export_policy(path, tmp_path)
    evaluated = Sights()
    pipeline.evaluate(path, evaluated, episodes=1)
    env, policy = Sights(), pipeline.load_policy(path)
    observation, _ = env.reset()
    is_over = False
    while not is_over:
        action = policy.act(observation)
        assert env.action_space.contains(action)
        observation, _, is_over, _, _ = env.step(action)
    assert env.played[0] == evaluated.played[0]
    assert len(np.unique(env.played[0], axis=0)) > 5
    for name, instead in (("native", "returns the environment's action"), ("end", "call `reset`")):
        with pytest.raises(AttributeError, match=rf"no '{name}': .*{instead}"):
            getattr(policy, name)


ONE = spaces.Discrete(3)


def form(space, action_space=ONE, *, visual="auto", scale=None) -> tuple[EnvironmentForm, Codec]:
    """The form that a policy of these spaces reads from its file, and the bridge's codec."""
    codec = Codec(space, action_space, where="mine", visual=visual, scale=scale)
    (text,) = [text for text in scales_of(codec.spec) if text.startswith(SPACES)]
    return EnvironmentForm(text.removeprefix(SPACES), "mine"), codec


def together(space, several):
    """What vectorized environments give."""
    empty = gymnasium.vector.utils.create_empty_array(space, len(several))
    return gymnasium.vector.utils.concatenate(space, several, empty)


OBSERVED = [
    SPACE,
    SPACE["camera"],
    SPACE["more"],
    spaces.Discrete(5, start=-2),
    spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(-1, 1, (1, 4), np.float32),
    spaces.MultiDiscrete([[2, 3], [4, 2]]),
    spaces.Box(3, 40, (20, 24, 1), np.uint8),
    spaces.Box(-1, 1, (20, 24, 1), np.float32),
    spaces.Box(np.array([0, 1], np.float32), np.array([3, np.inf], np.float32)),
    spaces.Dict({"camera": SMALL, "place": SPACE["place"]}),
    spaces.Dict({"action_mask": spaces.MultiBinary(3), "observation": SMALL}),
]


@pytest.mark.parametrize("space", OBSERVED, ids=str)
def test_observations_become_the_same_rows_in_an_exported_policy_as_in_the_gymnasium_bridge(space):
    of_file, codec = form(space, visual="always" if space.shape else "auto")
    space.seed(2)
    several = [space.sample() for _ in range(3)]
    for observation in several if codec.mask_key else ():
        observation[codec.mask_key][:] = 1
    expected = codec.observations.empty(3)
    for row, observation in enumerate(several):
        codec.observations.put(expected, row, observation)
        mask = np.ones(3, np.int8)
        steps, is_batch = of_file.steps(observation, mask)
        assert not is_batch
        assert steps.action_mask is not None
        assert [one.tobytes() for one in steps.obs] == [a[row].tobytes() for a in expected]
    for n in (3, 1):  # one of several is several, too
        steps, is_batch = of_file.steps(together(space, several[:n]), np.ones((n, 3), np.int8))
        assert is_batch
        assert steps.agent_id.tolist() == list(range(n))
        assert [one.tobytes() for one in steps.obs] == [a[:n].tobytes() for a in expected]


ACTED = [
    spaces.Box(-2, 7, (2, 2), np.float32),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-np.inf, np.inf, (2,), np.float64),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 7]]),
    spaces.MultiBinary((2, 2)),
    spaces.Dict({"wheel": spaces.Box(-2, 7, (2,), np.float32), "gear": spaces.Discrete(3)}),
    spaces.Tuple((spaces.Discrete(2), spaces.Dict({"b": spaces.MultiBinary(2), "a": ONE}))),
]


@pytest.mark.parametrize("space", ACTED, ids=str)
def test_actions_are_elements_of_the_action_space_of_the_environment(space):
    of_file, codec = form(spaces.Box(0, 1, (2,)), space, scale=3.0)
    actions = codec.spec.action_spec.random_action(4, np.random.default_rng(0))
    expected = codec.actions.native(actions)
    one = codec.spec.action_spec.random_action(1, np.random.default_rng(1))
    assert space.contains(of_file.native(one, False))
    several = of_file.native(actions, True)
    batch = gymnasium.vector.utils.batch_space(space, 4)
    assert batch.contains(several)
    for one, of_env in zip(expected, gymnasium.vector.utils.iterate(batch, several), strict=True):
        assert str(one) == str(of_env)


class Counted(gymnasium.Env):
    """Ends after three steps; a picture with a mask."""

    observation_space = spaces.Dict(
        {"camera": SPACE["camera"], "action_mask": spaces.MultiBinary(4)}
    )
    action_space = spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.n_steps = 0
        return self.seen(), {}

    def step(self, action):
        assert action[0] == 1
        assert action.dtype == np.int64
        self.n_steps += 1
        return self.seen(), 1.0, self.n_steps == 3, False, {}

    def seen(self):
        image = self.np_random.integers(0, 256, (24, 20, 3), dtype=np.uint8)
        return {"camera": image, "action_mask": np.array([0, 1, 1, 1], np.int8)}


def test_a_policy_with_memory_acts_equally_on_vectorized_and_on_single_environments(tmp_path: Path):
    memory = {"memory_size": 8, "sequence_length": 8}
    network = {"network_settings": {"hidden_units": 8, "memory": memory}}
    settings = {"default_settings": {**SHORT["default_settings"], **network}}
    result = pipeline.train(Counted(), settings, seed=1, run_dir=tmp_path)
    model = pipeline.export_policy(result.behaviors["Counted"].checkpoint, tmp_path)
    policy, alone = pipeline.load_policy(model), pipeline.load_policy(model)
    vector = gymnasium.vector.SyncVectorEnv(
        [Counted] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    observation, _ = vector.reset(seed=5)
    for _ in range(7):
        actions = policy.act(observation)
        assert vector.action_space.contains(actions)
        first = {key: part[0] for key, part in observation.items()}
        assert alone.act(first).tolist() == actions[0].tolist()
        observation, _, terminated, truncated, _ = vector.step(actions)
        policy.reset(terminated | truncated)
        if terminated[0]:
            alone.reset()
    assert policy.onnx._memories.keys() == {0, 1}
    policy.reset([1])
    assert policy.onnx._memories.keys() == {0}
    policy.reset()
    assert not policy.onnx._memories


CAMERA, GEAR = spaces.Box(0, 255, (24, 20, 3), np.uint8), spaces.Discrete(3, start=2)
BLACK = np.zeros((24, 20, 3), np.uint8)
WANTED = r"has the shape .*; give the shape \[24, 20, 3\], or \[N, ...\] with .*; the space is Box"


@pytest.mark.parametrize(
    ("space", "value", "said"),
    [
        (CAMERA, np.full((1, 3, 24, 20), 255.0), WANTED),
        (CAMERA, BLACK[:10], WANTED),
        (CAMERA, None, WANTED),
        (spaces.Box(3, 40, (24, 20, 3), np.uint8), BLACK, "pixel 0, 0, 0 is 0, allowed are 3 to"),
        (GEAR, 5, "the value is 5, allowed are 2 to 4"),
        (spaces.Box(0, 1, (4,)), np.zeros(5), r"has the shape \[5\]; give the shape \[4\]"),
        (spaces.Box(0, 1, (1,)), np.zeros(8), r"has the shape \[8\]; give the shape \[1\]"),
        (SPACE, {"x": 1}, "has no part 'camera'; give an observation of the space"),
        (SPACE, BLACK, "has no part 'camera'"),
    ],
)
def test_observation_of_the_wrong_form_is_refused_in_one_line_that_names_the_right_form(
    space, value, said
):
    of_file, _ = form(space, visual="always" if space.shape else "auto")
    with pytest.raises(pipeline.PipelineError, match=f"^mine: .*{said}") as caught:
        of_file.steps(value, None)
    assert "\n" not in str(caught.value)


def test_action_mask_of_the_wrong_form_is_refused_with_a_message_of_one_line():
    of_file, _ = form(CAMERA, spaces.MultiDiscrete([2, 3]))
    masks = of_file.steps(BLACK, np.array([1, 0, 0, 1, 1], np.int8))[0].action_mask
    assert [part.tolist() for part in masks] == [[[False, True]], [[True, False, False]]]
    with pytest.raises(pipeline.PipelineError, match="mine: the action mask has 2 entries; give 5"):
        of_file.steps(BLACK, np.array([1, 0], np.int8))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"observation": {"box": 3}}', "nonsense"])
def test_file_with_a_broken_description_of_spaces_is_refused_with_a_message_of_one_line(text):
    with pytest.raises(ExportError, match=r"^mine: its description of spaces is broken"):
        EnvironmentForm(text, "mine")


def test_spaces_read_from_text_equal_the_written_spaces_and_a_too_long_space_is_left_out():
    known = {"observation": SPACE, "action": ACTED[-1], "visual": "auto", "scale": None}
    again = from_text(to_text(**known))
    assert again == known
    assert list(again["observation"].spaces) == list(SPACE.spaces)
    assert str(again) == str(known)
    bounds = np.random.default_rng(0).random(9000).astype(np.float32)
    spec = Codec(spaces.Box(-bounds, bounds), ONE, where="", visual="auto", scale=None).spec
    assert isinstance(spec, ScaledSpec)
    assert not [text for text in spec.scales if text.startswith(SPACES)]


def layout_of(*shapes, version=3, branches=()) -> ModelDescription:
    """The description of a file that does not know its environment's spaces."""
    tensors = [TensorInfo(dtype="float32", shape=("batch", *shape)) for shape in shapes]
    return ModelDescription(
        version=version,
        memory_size=0,
        inputs={f"obs_{index}": tensor for index, tensor in enumerate(tensors)},
        outputs={},
        continuous_size=1,
        discrete_branches=branches,
        opset=9,
        ir_version=6,
        meanings={},
    )


def test_policy_file_without_spaces_accepts_network_inputs_and_names_their_shapes_in_errors():
    image, vector = np.full((2, 3, 24, 20), 1.5, np.float32), np.ones((2, 4))
    both = layout_of((3, 24, 20), (4,))
    batch = network_steps([image, vector], None, both, "mine").obs
    assert [a.tobytes() for a in batch] == [a.astype(np.float32).tobytes() for a in (image, vector)]
    single = network_steps((image[0], vector[0]), None, both, "mine").obs
    assert [a.shape for a in single] == [(1, 3, 24, 20), (1, 4)]
    form = (
        r"mine: the observation is .*float32 \[N, 3, 24, 20\], an image channels first from 0 to 1"
        r", float32 \[N, 4\]$"
    )
    for wrong in (image, [image], [image, vector[:1]], [image.astype(np.uint8), vector], {"a": 1}):
        with pytest.raises(ExportError, match=form):
            network_steps(wrong, None, both, "mine")


def test_policy_of_unity_package_1_expects_a_list_of_arrays_in_the_order_of_the_environment():
    old = layout_of((3, 24, 20), version=2)
    for value in ({"camera": BLACK}, BLACK[None], np.zeros(4)):
        with pytest.raises(ExportError, match="arrays in the environment's order"):
            network_steps(value, None, old, "mine")
    for value in (np.ones((2, 4)), [np.ones((2, 4)), np.ones((2, 3, 24, 20))]):
        arrays = value if isinstance(value, list) else [value]
        read = network_steps(value, None, old, "mine").obs
        assert [array.tolist() for array in read] == [array.tolist() for array in arrays]


def test_policy_file_without_spaces_accepts_one_bool_mask_array_for_each_branch():
    right = [np.array([[False, True]]), np.array([[True, False, False]])]
    layout, seen = layout_of((4,), branches=(2, 3)), np.zeros(4)
    assert network_steps(seen, right, layout, "mine").action_mask == right
    assert network_steps(seen, None, layout, "mine").action_mask is None
    for wrong in (right[:1], [part.astype(int) for part in right], np.ones(5, bool)):
        with pytest.raises(ExportError, match="mine: the action mask does not fit"):
            network_steps(seen, wrong, layout, "mine")
