from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from test_codec import BRAIN, sample
from wire_messages import decode_steps

from pipeline.errors import UnityObservationException
from pipeline.protocol.decoding import behavior_spec_from
from pipeline.protocol.encoding import compressed_steps_bytes
from pipeline.protocol.generated import messages as m
from pipeline.protocol.png import decode_png, encode_png
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3)).astype(np.uint8)


def first(images: np.ndarray, count: int) -> np.ndarray:
    channels = np.concatenate(list(images), axis=2).transpose(2, 0, 1)[:count]
    return channels.astype(np.float32) / np.float32(255)


def agent_with(
    data: bytes, shape: tuple[int, ...], mapping=(), *, properties=(1, 2, 2)
) -> m.AgentInfoProto:
    info = m.AgentInfoProto(id=9)
    info.observations.add(
        shape=shape,
        dimension_properties=properties,
        compression_type=m.PNG,
        compressed_data=data,
        compressed_channel_mapping=mapping,
    )
    return info


def test_one_image_becomes_three_channels_in_0_to_1(images):
    np.testing.assert_array_equal(decode_png(png(images[0]), (3, 4, 5)), first(images, 3))


def test_concatenated_images_give_their_first_channels(images):
    data = png(images[0]) + b"between" + png(images[1])
    np.testing.assert_array_equal(decode_png(data, (5, 4, 5)), first(images, 5))


def test_single_channel_is_the_mean_of_the_first_image(images):
    expected = images[0].astype(np.float64).mean(axis=2)[None] / 255
    data = png(images[0]) + png(images[1])
    np.testing.assert_allclose(decode_png(data, (1, 4, 5)), expected, rtol=1e-6)


def test_mapping_averages_drops_and_orders_channels(images):
    data = png(images[0]) + png(images[1])
    image = decode_png(data, (2, 4, 5), [1, 1, -1, 0, -1, 1])
    c = np.concatenate(list(images), axis=2).transpose(2, 0, 1).astype(np.float64) / 255
    np.testing.assert_allclose(image, [c[3], (c[0] + c[1] + c[5]) / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("mapping", "shape", "text"),
    [
        ([0, 1], (2, 4, 5), "has 3 channels, but its channel mapping"),
        ([0, 2, 2], (3, 4, 5), "leaves out a channel"),
        ([0, 0, 0], (3, 4, 5), "has 1 channels where its shape"),
        ([], (4, 4, 5), "has 3 channels where its shape"),
        ([], (3, 5, 4), "PNG of 4x5 pixels where its shape says 5x4"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, mapping, shape, text):
    with pytest.raises(UnityObservationException, match=text):
        decode_png(png(images[0]), shape, mapping)


def test_damaged_images_are_refused(images):
    with pytest.raises(UnityObservationException, match="not a readable PNG"):
        decode_png(png(images[0])[:60], (3, 4, 5))
    with pytest.raises(UnityObservationException, match="holds no PNG image"):
        decode_png(b"nothing", (3, 4, 5))


@pytest.mark.parametrize("properties", [[1, 2, 2], [2, 2, 1]])
def test_compressed_observations_are_decoded_in_both_orders(images, properties):
    shape = (3, 4, 5) if properties[0] == 1 else (4, 5, 3)
    info = agent_with(png(images[0]), shape, properties=properties)
    spec = behavior_spec_from(BRAIN, info)
    decision, _ = decode_steps([info], spec)
    np.testing.assert_array_equal(decision.obs[0][0], first(images, 3))


@pytest.mark.parametrize(
    ("shape", "pixels", "expected"),
    [
        ((4, 5, 3), (4, 5), (3, 4, 5)),  # packages before API 1.5
        ((3, 4, 5), (4, 5), (3, 4, 5)),
        ((3, 3, 3), (3, 3), (3, 3, 3)),
        ((4, 5, 1), (4, 5), (1, 4, 5)),
    ],
)
def test_size_of_an_image_without_properties_tells_where_its_channels_are(shape, pixels, expected):
    image = np.random.default_rng(0).integers(0, 256, (*pixels, 3)).astype(np.uint8)
    info = agent_with(png(image), shape, properties=())
    spec = behavior_spec_from(BRAIN, info)
    assert spec.observation_specs[0].shape == expected
    decision, _ = decode_steps([info, info], spec)
    np.testing.assert_array_equal(decision.obs[0][1], decode_png(png(image), expected))


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\nxxxxIDAT" + b"x" * 20]
)
def test_image_without_properties_and_size_is_refused(data):
    info = agent_with(data, (4, 5, 3), properties=())
    spec = behavior_spec_from(BRAIN, info)
    with pytest.raises(UnityObservationException, match=r"no PNG image|not a readable PNG"):
        decode_steps([info], spec)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_what_is_written_is_read_without_a_mapping(channels):
    rng = np.random.default_rng(channels)
    values = (rng.integers(0, 256, (channels, 4, 5)) / np.float32(255)).astype(np.float32)
    data = encode_png(values)
    assert data.count(b"IHDR") == (1 if channels == 1 else -(-channels // 3))
    np.testing.assert_array_equal(decode_png(data, values.shape), values)


def test_what_a_png_cannot_hold_is_rounded_and_clipped():
    values = np.array([[[-1.0, 0.3, 2.0]]], np.float32)
    expected = np.array([[[0.0, 76 / 255, 1.0]]], np.float32)
    np.testing.assert_allclose(decode_png(encode_png(values), (1, 1, 3)), expected, rtol=1e-6)


@pytest.mark.parametrize("n_stacked", [2, 3])
def test_stacked_gray_cameras_come_out_oldest_first(images, n_stacked):
    gray = np.random.default_rng(1).integers(0, 256, (n_stacked, 4, 5)).astype(np.uint8)
    data = b"".join(png(layer) for layer in gray)
    mapping = np.repeat(np.arange(n_stacked), 3).tolist()
    info = agent_with(data, (n_stacked, 4, 5), mapping)
    decision, _ = decode_steps([info], behavior_spec_from(BRAIN, info))
    np.testing.assert_array_equal(decision.obs[0][0], gray / np.float32(255))


def test_stacked_padded_sensor_drops_its_padding(images):
    stacked = np.concatenate([images[0], images[1]], axis=2).transpose(2, 0, 1)
    mapping = [0, 1, -1, 2, 3, -1]
    info = agent_with(png(images[0]) + png(images[1]), (4, 4, 5), mapping)
    decision, _ = decode_steps([info], behavior_spec_from(BRAIN, info))
    np.testing.assert_array_equal(decision.obs[0][0], stacked[[0, 1, 3, 4]] / np.float32(255))


def test_wrong_mapping_is_one_line_with_agent_and_observation(images):
    info = agent_with(png(images[0]), (3, 4, 5), [0, 1])
    with pytest.raises(UnityObservationException) as caught:
        decode_steps([info], behavior_spec_from(BRAIN, info))
    assert str(caught.value) == (
        "Observation at index=0 for agent with id=9 didn't match the ObservationSpec: a compressed "
        "observation has 3 channels, but its channel mapping [0, 1] is for 2"
    )


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
