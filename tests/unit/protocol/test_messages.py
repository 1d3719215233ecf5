"""Borders of what messages and demonstrations may hold, written out byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from test_codec import assert_same_steps, sample
from test_demo import OLD, recording
from wire_messages import decode_actions, decode_list, decode_steps, encode_actions

from pipeline.protocol import actions, decoding, layout_cache, vectorized
from pipeline.protocol.demo import read_demo, writing_demo
from pipeline.protocol.encoding import compressed_steps_bytes, encode_steps
from pipeline.protocol.frames import DATA, PADDED, FrameError, without_padding
from pipeline.protocol.generated import messages as m
from pipeline.protocol.png import encode_png
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec


@pytest.mark.parametrize("size", [25, 26, 27, 4050, 4062, 4063, 4080, 4090, 4096])
def test_lengths_at_the_borders_of_their_varints_are_read_together(size, monkeypatch):
    """Entries of 2^7 k bytes and around 127 * 2^7, where a length takes another byte."""
    spec = BehaviorSpec([ObservationSpec.vector(size)], ActionSpec(1, ()))
    steps = sample(spec, 3, 1, 0)
    message = encode_steps(*steps, spec)
    monkeypatch.setattr(vectorized, "MANY", 1)
    monkeypatch.setattr(vectorized, "_MAX_AGENT_BYTES", 1 << 20)
    monkeypatch.setattr(layout_cache, "decode_steps", None)  # agent by agent nothing would be shown
    assert_same_steps(decode_list(message, spec), steps)


def test_a_mask_that_is_too_short_at_the_end_of_a_message_allows_everything(monkeypatch):
    """Nothing is read behind the message, however many choices there are."""
    spec = BehaviorSpec([], ActionSpec(0, (200_000,)))
    infos = m.UnityRLOutputProto.ListAgentInfoProto()
    for agent in range(3):
        infos.value.add(id=agent, action_mask=[True, False])
    monkeypatch.setattr(vectorized, "MANY", 1)
    together, one_by_one = decode_list(infos, spec), decode_steps(infos.value, spec)
    assert_same_steps(together, one_by_one)
    for decision, _ in (together, one_by_one):
        assert decision.action_mask is None or not any(mask.any() for mask in decision.action_mask)


@pytest.mark.parametrize(
    "spec", [ActionSpec(3, ()), ActionSpec(0, (2, 100)), ActionSpec(2, (4, 5))]
)
def test_actions_of_many_are_read_together(spec, monkeypatch):
    monkeypatch.setattr(actions, "decode_entries", None)
    sent = spec.random_action(7, np.random.default_rng(0))
    decoded = decode_actions(encode_actions(sent, BehaviorSpec([], spec)), spec)
    np.testing.assert_array_equal(decoded.continuous, sent.continuous)
    np.testing.assert_array_equal(decoded.discrete, sent.discrete)


def test_choices_of_more_than_a_byte_are_not_taken_for_smaller_ones():
    """Entries of different forms may together have the length of entries of one form."""
    spec = ActionSpec(0, (300, 300))
    message = m.UnityRLInputProto.ListAgentActionProto()
    for choices in ([128, 1], [1, 299], [127, 0]):
        message.value.add(discrete_actions=choices)
    assert decode_actions(message, spec).discrete.tolist() == [[128, 1], [1, 299], [127, 0]]


def test_images_of_up_to_the_stated_channels_are_sent_as_pngs():
    camera, depth = ObservationSpec.visual(3, 4, 5), ObservationSpec.visual(4, 4, 5)
    spec = BehaviorSpec([ObservationSpec.vector(2), camera, depth], ActionSpec(1, ()))
    decision, terminal = sample(spec, 2, 1, 0)
    message = m.UnityRLOutputProto.ListAgentInfoProto.FromString(
        compressed_steps_bytes(decision, terminal, spec, 3)
    )
    images = [*terminal.obs[1], *decision.obs[1]]  # ended episodes come first
    for info, image in zip(message.value, images, strict=True):
        vector, small, large = info.observations
        assert (small.compression_type, small.compressed_data) == (m.PNG, encode_png(image))
        for raw in (vector, large):
            assert (raw.compression_type, raw.WhichOneof("observation_data")) == (0, "float_data")
    decoded = decode_steps(message.value, spec)
    np.testing.assert_array_equal(decoded[0].obs[0], decision.obs[0])
    np.testing.assert_array_equal(decoded[0].obs[2], decision.obs[2])
    for actual, sent in zip(decoded, (decision, terminal), strict=True):
        np.testing.assert_allclose(actual.obs[1], sent.obs[1].clip(0, 1), atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("payload", "data"),
    [(b"\x00", b""), (b"\x00ab", b"ab"), (b"\x01ab", b"a"), (b"\x02ab", b"")],
)
def test_padding_may_take_all_of_a_frame(payload, data):
    assert without_padding(DATA, PADDED, payload) == data
    assert without_padding(DATA, 0, payload) == payload


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x03ab", b"\xffab"])
def test_padding_may_not_take_more_than_its_frame(payload):
    with pytest.raises(FrameError, match="more padding than it holds"):
        without_padding(DATA, PADDED, payload)


def test_cameras_of_the_first_packages_are_read_in_colour_and_in_grey(tmp_path):
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
    assert [observation_spec.shape for observation_spec in demo.spec.observation_specs] == [
        (3, 4, 5),
        (1, 6, 2),
    ]
    for obs, images in zip(demo.obs, (colour, grey), strict=True):
        np.testing.assert_allclose(obs, images, atol=0.5 / 255 + 1e-6)
    assert demo.reward.tolist() == [0.5] * 3
    assert (demo.done.tolist(), demo.interrupted.tolist()) == ([False, False, True],) * 2


def test_recorded_pairs_are_of_an_agent_without_number_and_group(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
    path = tmp_path / "a.demo"
    with writing_demo(path, "B", spec) as writer:
        writer.append(
            obs=[np.ones((2, 2), np.float32)],
            actions=spec.action_spec.random_action(2, np.random.default_rng(0)),
            reward=np.array([1.0, 2.0], np.float32),
            done=np.array([False, True]),
        )
    data = path.read_bytes()
    infos = [m.AgentInfoActionPairProto.FromString(pair).agent_info for pair in pairs_of(data)]
    assert [(info.id, info.group_id, info.group_reward) for info in infos] == [(0, 0, 0.0)] * 2
    assert [(info.reward, info.done, info.max_step_reached) for info in infos] == [
        (1.0, False, False),
        (2.0, True, False),
    ]


def pairs_of(data: bytes) -> list[bytes]:
    """The records behind a demonstration's header and its behavior, each under 128 bytes."""
    position, records = 33, []
    while position < len(data):
        size = data[position]
        assert size < 128
        records.append(data[position + 1 : position + 1 + size])
        position += 1 + size
    return records[1:]


IMAGE = np.random.default_rng(0).random((3, 2, 4)).astype(np.float32)
LAYOUTS = {
    "channels first": ([3, 2, 4], [1, 2, 2], IMAGE),
    "channels last": ([2, 4, 3], [2, 2, 1], IMAGE.transpose(1, 2, 0)),
}


def images_of(*layouts):
    infos = []
    for number, layout in enumerate(layouts):
        shape, properties, values = LAYOUTS[layout]
        infos.append(m.AgentInfoProto(id=number))
        sent = infos[-1].observations.add(shape=shape, dimension_properties=properties)
        sent.float_data.data.extend(values.ravel().tolist())
    spec = BehaviorSpec([ObservationSpec.visual(3, 2, 4)], ActionSpec(1, ()))
    return decode_steps(infos, spec)[0].obs[0]


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_agents_of_an_image_in_either_layout_are_read_alike(first, second):
    np.testing.assert_array_equal(images_of(first, second), [IMAGE, IMAGE])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_the_same_layout_are_read_together(layout, monkeypatch):
    monkeypatch.setattr(decoding, "_decode_slowly", None)
    np.testing.assert_array_equal(images_of(layout, layout, layout), [IMAGE] * 3)
