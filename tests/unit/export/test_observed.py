"""An exported policy takes the observations of a Gymnasium environment without changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import pipeline
from pipeline.errors import ExportError
from pipeline.export.layout import ModelDescription, TensorInfo
from pipeline.export.policy import forbidden, rows_of
from pipeline.simulators.bridges.spaces import Observations

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
    """An environment with every kind of observation, the same in each episode, and both actions."""

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
def test_actions_in_a_users_own_loop_equal_the_actions_of_evaluate(tmp_path: Path, kind: str):
    """Bytes of images must be divided by 255, or actions on images differ."""
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
        (action,) = policy.native(policy.act(observation), env.action_space)
        assert env.action_space.contains(action)
        observation, _, is_over, _, _ = env.step(action)
    assert env.played[0] == evaluated.played[0]
    assert len(np.unique(env.played[0], axis=0)) > 5
    with pytest.raises(pipeline.PipelineError, match="has other actions than Discrete"):
        policy.native(policy.act(observation), spaces.Discrete(3))


def described(space, **options) -> tuple[ModelDescription, Observations]:
    """Return the description of a file that was trained on this space, and the bridge's codec."""
    codec = Observations(space, where="mine", **options)
    said = dict(scale.split(": ", 1) for scale in codec.scales)
    names = [f"obs_{index}" for index in range(len(codec.specs))]
    layout = ModelDescription(
        version=3,
        memory_size=0,
        inputs={
            name: TensorInfo(dtype="float32", shape=("batch", *spec.shape))
            for name, spec in zip(names, codec.specs, strict=True)
        },
        outputs={},
        continuous_size=1,
        discrete_branches=(),
        opset=9,
        ir_version=6,
        meanings={
            name: "; ".join([spec.name, *filter(None, [said.get(name)])])
            for name, spec in zip(names, codec.specs, strict=True)
        },
    )
    return layout, codec


@pytest.mark.parametrize(
    "space",
    [
        SPACE,
        SPACE["camera"],
        SPACE["more"],
        spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))),
        spaces.Box(-1, 1, (), np.float32),
        spaces.MultiDiscrete([[2, 3], [4, 2]]),
        spaces.Box(3, 40, (20, 24, 1), np.uint8),
        spaces.Box(-1, 1, (20, 24, 1), np.float32),
        spaces.Dict({"camera": SMALL, "place": SPACE["place"]}),
        spaces.Box(-1, 1, (1, 20, 24), np.float32),
    ],
    ids=str,
)
def test_rows_equal_the_bridges_observations_for_one_and_several_environments(space):
    layout, codec = described(space, visual="always" if space.shape else "auto")
    assert (layout.inputs["obs_0"].shape[1:] == (576,)) == ("(16, 12, 3)" in str(space))
    space.seed(2)
    several = [space.sample() for _ in range(3)]
    expected = codec.empty(3)
    for row, observation in enumerate(several):
        codec.put(expected, row, observation)
        for array, one in zip(expected, rows_of(observation, layout, "p"), strict=True):
            assert array[row : row + 1].tobytes() == one.tobytes()
            assert one.shape == (1, *array.shape[1:])
    # The network's own input.
    for array, same in zip(expected, rows_of(expected, layout, "p"), strict=True):
        assert np.array_equal(array, same)
    # Plain numbers and scaled floats could be of one environment or of several.
    if space.shape in ((), (1, 20, 24)):
        return
    together = gymnasium.vector.utils.concatenate(
        space, several, gymnasium.vector.utils.create_empty_array(space, 3)
    )
    for array, rows in zip(expected, rows_of(together, layout, "p"), strict=True):
        assert array.tobytes() == rows.tobytes()


CAMERA, GEAR = spaces.Box(0, 255, (24, 20, 3), np.uint8), spaces.Discrete(3, start=2)
BLACK = np.zeros((24, 20, 3), np.uint8)
WANTED = r"give an image \[24, 20, 3\] of whole numbers from 0 to 255, or float32 \[N, 3, 24, 20\]"
SMALL_WANTED = r"give whole numbers from 0 to 255, or float32 \[N, 576\]$"


@pytest.mark.parametrize(
    ("space", "value", "said"),
    [
        (CAMERA, np.full((1, 3, 24, 20), 255.0), "is float64 .* from 255 to 255; " + WANTED),
        (CAMERA, BLACK.astype(np.float32), WANTED),  # divided already, or not?
        (CAMERA, BLACK[:10], WANTED),
        (CAMERA, np.full((24, 20, 3), 300), WANTED),
        (CAMERA, None, "object"),
        (SMALL, BLACK[:16, :12].astype(np.float32), SMALL_WANTED),
        (SMALL, np.full((16, 12, 3), 300), SMALL_WANTED),
        (GEAR, 5, r"give whole numbers \(2 to 4\), or float32 \[N, 3\]"),
        (spaces.Box(0, 1, (4,)), np.zeros(5), r"is float64 \[5\] .*; give float32 \[N, 4\]"),
        (spaces.Box(0, 1, (1,)), np.zeros(8), r"give float32 \[N, 1\]"),
        (SPACE, {"camera": BLACK, "x": 1}, "has the parts camera, x, the file has camera, first"),
        (SPACE, BLACK, "needs 7 observations, not 1"),
        (spaces.Tuple((GEAR, CAMERA)), [GEAR.start, BLACK[None].repeat(2, 0)], "of .1, 2. agents"),
    ],
)
def test_an_observation_of_another_form_is_refused_with_the_expected_form(space, value, said):
    layout, _ = described(space)
    with pytest.raises(ExportError, match=f"^mine: .*{said}"):
        rows_of(value, layout, "mine")


def test_images_without_a_recorded_scale_must_have_the_networks_form():
    layout, _ = described(CAMERA)
    layout.meanings["obs_0"] = "camera; 0 to 1; bytes were divided by 255"  # of Unity
    form = r"give float32 \[N, 3, 24, 20\], channels first, from 0 to 1$"
    for known in (True, False):
        for value in (BLACK, BLACK[None].transpose(0, 3, 1, 2), BLACK / 255):
            with pytest.raises(ExportError, match=form):
                rows_of(value, layout, "mine")
        right = np.full(
            (2, 3, 24, 20), 1.5, np.float32
        )  # a user's own sensor may send such numbers
        assert rows_of(right, layout, "mine")[0].tobytes() == right.tobytes()
        if known:
            layout.meanings.clear()


def test_masks_may_be_gymnasiums_whole_numbers_or_bools_for_each_branch():
    expected = [[[False, True]], [[True, False, False]]]
    for mask in (
        np.array([1, 0, 0, 1, 1], np.int8),
        (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8)),
        [np.array([[False, True]]), np.array([[True, False, False]])],
    ):
        parts = forbidden(mask, 1, (2, 3), "mine")
        assert [part.tolist() for part in parts] == expected
    for wrong in (np.array([1, 0], np.int8), np.array([True, False, False, True, True])):
        with pytest.raises(ExportError, match="mine: the action mask does not fit"):
            forbidden(wrong, 1, (2, 3), "mine")


def test_a_file_of_package_1_accepts_only_arrays_in_the_environments_order():
    layout = replace(described(CAMERA)[0], version=2)
    for value in ({"camera": BLACK}, BLACK[None], np.zeros(4)):
        with pytest.raises(ExportError, match=r"mine: a file of package 1\.x does not name its"):
            rows_of(value, layout, "mine")
    for value in (np.ones((2, 4)), [np.ones((2, 4)), np.ones((2, 3, 24, 20))]):
        arrays = value if isinstance(value, list) else [value]
        assert [array.tobytes() for array in rows_of(value, layout, "mine")] == [
            array.tobytes() for array in arrays
        ]
