import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from test_codec import BRAIN, sample
from test_limits import little_memory
from wire_messages import decode_steps

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import UnityObservationException, UnitySpecificationException
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.encoding import compressed_steps_bytes
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import SIGNATURE, _chunk, decode_png, encode_png


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def bomb(height: int, width: int, second: tuple[int, int] | None = None) -> bytes:
    """Return a PNG whose header declares a size; `second` is the size in a second header."""
    sizes = [(height, width), *([second] if second else [])]
    heads = [_chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0)) for h, w in sizes]
    data = zlib.compress(bytes(1000))
    return SIGNATURE + b"".join(heads) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3)).astype(np.uint8)
ONE, TWO = map(png, PIXELS)
BOTH = ONE + TWO
CHANNELS = np.concatenate(list(PIXELS), axis=2).transpose(2, 0, 1).astype(np.float32) / 255
"""[6, 4, 5] channels of both images."""
GRAY = CHANNELS[:3].mean(axis=0, keepdims=True)
LAYERS = np.random.default_rng(1).integers(0, 256, (3, 4, 5)).astype(np.uint8)
STACKED = b"".join(map(png, LAYERS))
WITH_BOMBS = ONE + bomb(4, 5) * 50
# An observation's bytes, its shape, its channel mapping, and the decoded array.
DECODED = {
    "one image": (ONE, (3, 4, 5), [], CHANNELS[:3]),
    "two images, of which the last channel is too many":
        (ONE + b"between" + TWO, (5, 4, 5), [], CHANNELS[:5]),
    "a single channel, the mean of the first image": (BOTH, (1, 4, 5), [], GRAY),
    "channels that a mapping averages, drops and orders":
        (BOTH, (2, 4, 5), [1, 1, -1, 0, -1, 1], [CHANNELS[3], CHANNELS[[0, 1, 5]].mean(axis=0)]),
    "stacked gray cameras, the oldest first":
        (STACKED, (3, 4, 5), [0, 0, 0, 1, 1, 1, 2, 2, 2], LAYERS / 255),
    "a stacked sensor without its padding":
        (BOTH, (4, 4, 5), [0, 1, -1, 2, 3, -1], CHANNELS[[0, 1, 3, 4]]),
    "images beyond the channels": (WITH_BOMBS, (3, 4, 5), [], CHANNELS[:3]),
    "images beyond the single channel": (WITH_BOMBS, (1, 4, 5), [], GRAY),
}  # fmt: skip


@pytest.mark.parametrize(("data", "shape", "mapping", "expected"), DECODED.values(), ids=DECODED)
def test_decoded_images_have_channel_values_from_0_to_1(data, shape, mapping, expected):
    np.testing.assert_allclose(decode_png(data, shape, mapping), expected, rtol=1e-6)


BIG = 2**31 - 1
SHAPE = (3, 4, 5)
# Pillow raises an IndexError for this image.
LATE = bomb(4, 5)[:-12] + _chunk(b"iCCP", b"k\0") + bomb(4, 5)[-12:]


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow's warning before its error
@pytest.mark.parametrize(
    ("data", "shape", "mapping", "text"),
    [
        (ONE, (2, 4, 5), [0, 1], "has 3 channels, but its channel mapping"),
        (WITH_BOMBS, SHAPE, [0, 1, 2], "has 153 channels, but its channel mapping"),
        (ONE, SHAPE, [0, 2, 2], "leaves out a channel"),
        (ONE, SHAPE, [0, 1, 3], "leaves out a channel"),
        (ONE, SHAPE, [0, -1, 2], "leaves out a channel"),
        (ONE, SHAPE, [-1, -1, -1], "leaves out a channel"),
        (ONE, SHAPE, [0, 1, BIG], "leaves out a channel"),
        (ONE, SHAPE, [BIG] * 3, "leaves out a channel"),
        (ONE, SHAPE, [0, 0, 0], "has 1 channels where its shape"),
        (ONE, (4, 4, 5), [], "has 3 channels where its shape"),
        (ONE, (3, 5, 4), [], "PNG of 4x5 pixels where its shape says 5x4"),
        (ONE[:60], SHAPE, [], "not a readable PNG"),
        (LATE, SHAPE, [], "not a readable PNG"),
        (b"nothing", SHAPE, [], "holds no PNG image"),
        (bomb(30_000, 30_000), SHAPE, [], "not a readable PNG: Image size"),
        (bomb(10_000, 9_000), SHAPE, [], "PNG of 10000x9000 pixels where its shape says 4x5"),
        (bomb(4, 5, second=(9_000, 10_000)), SHAPE, [], "PNG of 9000x10000 pixels where its"),
        (bomb(4, 5, second=(90_000, 10_000)), SHAPE, [], "not a readable PNG: Image size"),
        (bomb(0, 0), SHAPE, [], "not a readable PNG"),
    ],
)
def test_images_that_do_not_fit_the_announced_shape_are_refused_before_decompression(
    data, shape, mapping, text
):
    with little_memory(), pytest.raises(UnityObservationException, match=text):
        decode_png(data, shape, mapping)


def test_images_with_only_dropped_channels_are_refused_if_they_need_too_much_memory():
    mapping = [0, 1, 2] + [-1] * 3 * 200
    text = r"compressed observation of shape \(3, 1000, 1000\) would take 603 MB"
    with little_memory(), pytest.raises(UnitySpecificationException, match=text):
        decode_png(bomb(1000, 1000) * 201, (3, 1000, 1000), mapping)


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


@pytest.mark.parametrize(
    ("properties", "shape", "pixels", "expected"),
    [
        ([1, 2, 2], (3, 4, 5), (4, 5), (3, 4, 5)),
        ([2, 2, 1], (4, 5, 3), (4, 5), (3, 4, 5)),
        # Without properties, the size of the PNG shows which axis has the channels.
        ((), (4, 5, 3), (4, 5), (3, 4, 5)),  # packages before API 1.5
        ((), (3, 4, 5), (4, 5), (3, 4, 5)),
        ((), (3, 3, 3), (3, 3), (3, 3, 3)),
        ((), (4, 5, 1), (4, 5), (1, 4, 5)),
    ],
)
def test_pngs_with_channels_first_and_last_are_decoded_to_channels_first(
    properties, shape, pixels, expected
):
    image = np.random.default_rng(0).integers(0, 256, (*pixels, 3)).astype(np.uint8)
    info = agent_with(png(image), shape, properties=properties)
    spec = behavior_spec_from(BRAIN, info)
    assert spec.observation_specs[0].shape == expected
    decision, _ = decode_steps([info, info], spec)
    for obs in decision.obs[0]:
        np.testing.assert_array_equal(obs, decode_png(png(image), expected))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        *(
            (agent_with(data, (4, 5, 3), properties=()), "(holds no PNG image|not a readable PNG)")
            for data in (b"", SIGNATURE, SIGNATURE + b"xxxxIDAT" + b"x" * 20)
        ),
        (
            agent_with(ONE, (3, 4, 5), [0, 1]),
            r"a compressed observation has 3 channels, but its channel mapping \[0, 1\] is for 2$",
        ),
    ],
)
def test_error_for_an_unreadable_image_names_agent_and_observation_in_one_line(info, said):
    text = "^Observation at index=0 for agent with id=9 didn't match the ObservationSpec: .*"
    with pytest.raises(UnityObservationException, match=text + said):
        decode_steps([info], behavior_spec_from(BRAIN, info))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_encoded_images_are_rounded_and_clipped_and_can_be_decoded_without_a_channel_mapping(
    channels,
):
    rng = np.random.default_rng(channels)
    values = (rng.integers(0, 256, (channels, 4, 5)) / np.float32(255)).astype(np.float32)
    data = encode_png(values)
    assert data.count(b"IHDR") == (1 if channels == 1 else -(-channels // 3))
    np.testing.assert_array_equal(decode_png(data, values.shape), values)
    values = np.array([[[-1.0, 0.3, 2.0]]], np.float32)
    expected = np.array([[[0.0, 76 / 255, 1.0]]], np.float32)
    np.testing.assert_allclose(decode_png(encode_png(values), (1, 1, 3)), expected, rtol=1e-6)


def test_images_with_at_most_max_channels_are_sent_as_pngs():
    camera, depth = ObservationSpec.visual(3, 4, 5), ObservationSpec.visual(4, 4, 5)
    spec = BehaviorSpec([ObservationSpec.vector(2), camera, depth], ActionSpec(1, ()))
    decision, terminal = sample(spec, 2, 1, 0)
    message = m.UnityRLOutputProto.ListAgentInfoProto.FromString(
        compressed_steps_bytes(decision, terminal, spec, 3)
    )
    images = [*terminal.obs[1], *decision.obs[1]]  # ended agents come first in a message
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
