import re

import numpy as np
import pytest

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import (
    delimited_message,
    describe,
    parse_demo,
    read_demo,
    writing_demo,
)
from pipeline.errors import DemonstrationError
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import encode_png

SPEC = BehaviorSpec(
    [ObservationSpec.vector(3, "state"), ObservationSpec.visual(1, 4, 5)], ActionSpec(2, (3,))
)
N = 6


def content(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "obs": [rng.random((N, *o.shape)).astype(np.float32) for o in SPEC.observation_specs],
        "actions": SPEC.action_spec.random_action(N, rng),
        "reward": rng.random(N).astype(np.float32),
        "done": np.array([0, 0, 1, 0, 0, 1], dtype=bool),
        "interrupted": np.array([0, 0, 0, 0, 0, 1], dtype=bool),
        "action_mask": [rng.random((N, 3)) < 0.3],
    }


def written(path, **changes) -> dict:
    values = {**content(), **changes}
    with writing_demo(path, "Walker?team=0", SPEC) as writer:
        writer.append(**values)
    return values


def test_written_demonstration_round_trips(tmp_path):
    values = written(tmp_path / "a.demo")
    demo = read_demo(tmp_path / "a.demo")
    assert demo.behavior_name == "Walker"
    assert demo.spec == SPEC
    actions = values["actions"]
    expected = {**values, "continuous": actions.continuous, "discrete": actions.discrete}
    for name in ("continuous", "discrete", "reward", "done", "interrupted"):
        np.testing.assert_array_equal(getattr(demo, name), expected[name])
    for left, right in zip(
        [*demo.obs, *demo.action_mask], [*values["obs"], *values["action_mask"]], strict=True
    ):
        np.testing.assert_array_equal(left, right)
    assert (demo.metadata.number_steps, demo.metadata.number_episodes) == (N, 3)
    assert demo.metadata.mean_reward == pytest.approx(values["reward"].sum() / 3)
    assert "steps         6" in describe(demo)
    assert "observation 0 state (3,)" in describe(demo)


@pytest.mark.parametrize(
    ("done", "told"),
    [
        # (2 + 8) / 2: the first reward follows no action.
        ([0, 1, 0, 1, 0, 0], "5 per ended episode"),
        ([0, 0, 0, 0, 0, 1], "77 per ended episode"),
        ([0, 0, 0, 0, 0, 0], "77 in all, no episode ended"),
    ],
)
def test_mean_reward_is_the_mean_return_of_the_ended_episodes(tmp_path, done, told):
    rewards = np.array([1, 2, 3, 8, 32, 32], np.float32)
    written(tmp_path / "a.demo", reward=rewards, done=np.array(done, dtype=bool))
    assert f"mean reward   {told} (the header says" in describe(read_demo(tmp_path / "a.demo"))


def test_steps_appended_in_parts_give_the_same_file_and_a_closed_writer_refuses_steps(tmp_path):
    values = written(tmp_path / "a.demo")
    actions = values["actions"]
    with writing_demo(tmp_path / "b.demo", "Walker", SPEC) as writer:
        for part in (slice(0, 2), slice(2, N)):
            writer.append(
                obs=[o[part] for o in values["obs"]],
                actions=ActionTuple(actions.continuous[part], actions.discrete[part]),
                reward=values["reward"][part],
                done=values["done"][part],
                interrupted=values["interrupted"][part],
                action_mask=[values["action_mask"][0][part]],
            )
    with pytest.raises(ValueError, match="closed file"):
        writer.append(**values)
    assert (tmp_path / "a.demo").read_bytes() == (tmp_path / "b.demo").read_bytes()


def test_header_of_a_demonstration_fits_in_32_bytes_with_any_demonstration_name(tmp_path):
    with writing_demo(tmp_path / "a.demo", "b", SPEC, name="Ünï/cø_de " + "long " * 20) as writer:
        writer.append(**content())
    assert (tmp_path / "a.demo").read_bytes()[0] <= 32
    assert read_demo(tmp_path / "a.demo").metadata.demonstration_name == "ncde long long l"


@pytest.mark.parametrize("part", ["m.DemonstrationMetaProto", "brain_parameters", None])
def test_recording_that_fails_at_any_time_leaves_no_file(tmp_path, monkeypatch, part):
    def fail(*_args, **_values):
        raise OSError("no space left")

    def record() -> None:
        with writing_demo(tmp_path / "a.demo", "b", SPEC) as writer:
            writer.append(**content())
            if part is None:
                fail()

    if part:
        monkeypatch.setattr(f"pipeline.demos.demo_file.{part}", fail)

    with pytest.raises(OSError, match="no space left"):
        record()
    assert list(tmp_path.iterdir()) == []


def unfinished(path, n_steps=0, **changes) -> bytes:
    """Write a recording whose header has `n_steps`, as before its recorder closed the file."""
    written(path, **changes)
    data = header(api_version=1, number_steps=n_steps) + path.read_bytes()[33:]
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("n_steps", [0, -3])
@pytest.mark.parametrize("copy", [b"", m.DemonstrationMetaProto(api_version=1, number_steps=6)])
def test_file_without_a_positive_number_of_steps_in_its_header_is_read_to_its_end(
    tmp_path, n_steps, copy, caplog
):
    path = tmp_path / "a.demo"
    values = content()
    path.write_bytes(unfinished(path, n_steps) + (copy and copy.SerializeToString()))
    demo = read_demo(path)
    np.testing.assert_array_equal(demo.reward, values["reward"])
    np.testing.assert_array_equal(demo.continuous, values["actions"].continuous)
    assert len(demo) == N
    assert "steps         6" in describe(demo)
    assert not caplog.records


def test_unfinished_demonstration_is_read_and_an_error_names_the_first_damaged_pair_of_a_file(
    tmp_path, caplog
):
    path = tmp_path / "a.demo"
    unfinished(path, n_steps=4)
    assert len(read_demo(path)) == 4, "steps behind the counted ones are not read"
    begun = unfinished(path)
    path.write_bytes(begun[:-10])
    assert len(read_demo(path)) == N - 1
    assert "bytes are not a whole step, and are left out" in caplog.text
    path.write_bytes(begun + b"\x04\x0a\x7fab")
    with pytest.raises(DemonstrationError, match="cut off or damaged at pair 7;"):
        read_demo(path)
    written(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DemonstrationError, match=r"a\.demo: .*cut off or damaged at pair 6 of 6"):
        read_demo(path)
    written(path, reward=np.full(N, np.nan, np.float32))
    said = r"a\.demo: The rewards provided had NaN values\. \(behavior Walker\)"
    with pytest.raises(DemonstrationError, match=said):
        read_demo(path)


def header(**fields) -> bytes:
    data = m.DemonstrationMetaProto(**fields).SerializeToString()
    return (bytes([len(data)]) + data).ljust(33, b"\0")


def recording(path, brain, records, n_steps=None):
    """Write a demonstration file of a brain message and records, and return its path."""
    n = len(records) if n_steps is None else n_steps
    body = b"".join(map(delimited_message, [brain, *records]))
    path.write_bytes(header(api_version=1, number_steps=n) + body)
    return path


OLD = m.BrainParametersProto(
    brain_name="Old",
    vector_action_size_deprecated=[2],
    vector_action_space_type_deprecated=m.continuous,
)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (header(api_version=7, number_steps=1), "unsupported version (7)"),
        (header(api_version=1, number_steps=1), "No BrainParameters found in demonstration file"),
        (header(api_version=1) + b"\x03\x3a\x01b", "has no steps"),
        (b"not a demonstration at all", "this is not a demonstration"),
        (b"", "is empty"),
    ],
)
def test_file_that_is_not_a_demonstration_is_refused(tmp_path, data, text):
    path = tmp_path / "a.demo"
    path.write_bytes(data)
    with pytest.raises(DemonstrationError, match=re.escape(text)):
        read_demo(path)


def test_paths_that_do_not_end_in_demo_or_do_not_exist_are_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DemonstrationError, match=r"not a '\.demo' file"):
        read_demo(tmp_path / "a.txt")
    with pytest.raises(DemonstrationError, match="does not exist"):
        read_demo(tmp_path / "b.demo")
    with (
        pytest.raises(DemonstrationError, match=r"must end in '\.demo'"),
        writing_demo(tmp_path / "a.txt", "b", SPEC),
    ):
        pass


def test_action_in_an_old_recording_belongs_to_the_observation_of_the_previous_step(tmp_path):
    steps = [
        m.OldAgentInfoProto(
            stacked_vector_observation=[k, k + 0.5], stored_vector_actions=[10.0 * k, 1.0], id=1
        )
        for k in range(3)
    ]
    demo = read_demo(recording(tmp_path / "old.demo", OLD, steps))
    assert demo.obs[0].tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert demo.continuous.tolist() == [[10, 1], [20, 1], [0, 0]]


def test_color_and_gray_images_are_read_from_demos_of_the_oldest_mlagents_releases(tmp_path):
    rng = np.random.default_rng(0)
    colour, grey = rng.random((3, 3, 4, 5)), rng.random((3, 1, 6, 2))
    cameras = m.OldBrainParametersProto()
    cameras.camera_resolutions.add(width=5, height=4, gray_scale=False)
    cameras.camera_resolutions.add(width=2, height=6, gray_scale=True)
    infos = [
        m.OldAgentInfoProto(
            visual_observations=[encode_png(image.astype(np.float32)) for image in images],
            stored_vector_actions=[1.0, 2.0],
            reward=0.5,
            done=k == 2,
            max_step_reached=k == 2,
        )
        for k, images in enumerate(zip(colour, grey, strict=True))
    ]
    brain = m.BrainParametersProto.FromString(OLD.SerializeToString() + cameras.SerializeToString())
    demo = read_demo(recording(tmp_path / "old.demo", brain, infos))
    assert [obs_spec.shape for obs_spec in demo.spec.observation_specs] == [(3, 4, 5), (1, 6, 2)]
    for obs, images in zip(demo.obs, (colour, grey), strict=True):
        np.testing.assert_allclose(obs, images, atol=0.5 / 255 + 1e-6)
    assert demo.reward.tolist() == [0.5] * 3
    assert (demo.done.tolist(), demo.interrupted.tolist()) == ([False, False, True],) * 2


def test_demonstration_written_in_parts_counts_the_ended_episodes_of_all_parts(tmp_path):
    """A recorder may set `max_step_reached` in a step in which the episode continues."""
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, (3, 2)))

    def append(writer, first: float, done) -> None:
        n = len(done)
        writer.append(
            obs=[np.full((n, 2), first, np.float32)],
            actions=spec.action_spec.empty_action(n),
            reward=first + np.arange(n, dtype=np.float32),
            done=np.array(done),
        )

    with writing_demo(tmp_path / "a.demo", "B", spec) as writer:
        append(writer, 1, [False, True, True])
        append(writer, 10, [True, False])
    content = parse_demo(tmp_path / "a.demo")
    agents = {(info.id, info.group_id, info.group_reward) for info in content.infos}
    assert agents == {(0, 0, 0.0)}, "a recorded agent has no id and no group"
    assert not any(info.max_step_reached for info in content.infos)
    for row in (2, 4):
        content.infos[row].max_step_reached = True
    with writing_demo(tmp_path / "b.demo", "B", spec) as writer:
        writer.append_messages(content.infos[:3], content.actions[:3])
        writer.append_messages(content.infos[3:], content.actions[3:])
    demo = read_demo(tmp_path / "b.demo")
    # The first reward of an episode follows no action of the episode, so it is not in the return.
    assert demo.returns() == [2, 0, 0]
    assert demo.interrupted.tolist() == [False, False, True, False, False]
    meta = demo.metadata
    assert (meta.number_steps, meta.number_episodes, meta.mean_reward) == (5, 4, 27 / 4)
