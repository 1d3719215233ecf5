"""PNG observations: one or several concatenated images, mapped to channels."""

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.core.specs import FREE_BYTES, refuse_excess
from pipeline.errors import UnityObservationException, brief

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# zlib's compression level; 1 is the fastest.
_LEVEL = 1


def decode_png(data: bytes, shape: tuple[int, int, int], mapping: Sequence[int] = ()) -> FloatArray:
    """Return the observation in `data`: float32 of `shape`, in 0..1.

    Args:
        data: one PNG or several concatenated PNGs; each is decoded to three channels.
        shape: (channels, height, width) of the result.
        mapping: target channel of each decoded channel, -1 to drop it; decoded channels with the
            same target are averaged. If empty, decoded channels are taken in order, or the mean of
            the first image's channels if `shape` has one channel.

    Raises:
        UnityObservationException: The data are not PNGs, or do not fit `shape` or `mapping`.
    """
    count, height, width = shape
    parts = _parts(data)
    if not parts:
        raise UnityObservationException(
            f"a compressed observation of shape {shape} holds no PNG image ({len(data)} bytes)"
        )
    if not mapping:
        # Images for channels that `shape` does not have are not decompressed.
        parts = parts[: -(-count // 3)]
    elif len(mapping) != 3 * len(parts):
        raise UnityObservationException(
            f"a compressed observation has {3 * len(parts)} channels, "
            f"but its channel mapping {brief(mapping)} is for {len(mapping)}"
        )
    n_bytes = 3 * len(parts) * height * width
    if n_bytes > FREE_BYTES:
        refuse_excess(n_bytes, len(data), f"a compressed observation of shape {shape}")
    images = [_image(part, height, width) for part in parts]
    # ML-Agents averages the three decoded channels if an observation has one channel.
    if not mapping and count == 1:
        gray = images[0].astype(np.float32).mean(axis=2, dtype=np.float32)
        return np.asarray(gray / np.float32(255), dtype=np.float32)[None]
    channels = np.concatenate(images, axis=2).transpose(2, 0, 1)
    if not mapping:
        out = channels[:count].astype(np.float32)
    elif list(mapping) == list(range(len(channels))):
        out = channels.astype(np.float32)
    else:
        out = _mapped(channels, mapping)
    if len(out) != count:
        raise UnityObservationException(
            f"a compressed observation has {len(out)} channels where its shape {shape} says {count}"
        )
    return np.divide(out, np.float32(255), out=out)


def png_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width from the first image's header; None if there is no header."""
    start = data.find(SIGNATURE) + len(SIGNATURE)
    head = data[start : start + 16]
    if start < len(SIGNATURE) or len(head) < 16 or head[4:8] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", head, 8)
    return height, width


def encode_png(values: FloatArray) -> bytes:
    """Return `values`, [C, H, W] in 0..1, as concatenated PNGs, in the form of Unity's sensors.

    One gray image for a single channel, else images of three channels each, the last image filled
    up with zeros. Receivers need no channel mapping. Values are rounded to multiples of 1/255.
    """
    channels, height, width = values.shape
    per_image = 1 if channels == 1 else 3
    pixels = np.rint(np.clip(values, 0.0, 1.0) * 255).astype(np.uint8)
    pixels = np.pad(pixels, ((0, -channels % per_image), (0, 0), (0, 0)))
    images = pixels.reshape(-1, per_image, height, width).transpose(0, 2, 3, 1)
    return b"".join(map(_png, images))


def _png(image: AnyArray) -> bytes:
    """Return a PNG of uint8 [H, W, 1 or 3] (PNG specification, third edition, section 5)."""
    height, width, channels = image.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    # Each row of pixels begins with its filter's number; 0 is no filter.
    lines = np.zeros((height, 1 + width * channels), dtype=np.uint8)
    lines[:, 1:] = image.reshape(height, -1)
    data = zlib.compress(lines.tobytes(), _LEVEL)
    return SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def _parts(data: bytes) -> list[bytes]:
    """Return the bytes of each image, found by walking its chunks; other bytes are skipped."""
    parts, stop = [], 0
    while (start := data.find(SIGNATURE, stop)) >= 0:
        stop, kind = start + len(SIGNATURE), b""
        while kind != b"IEND" and stop + 12 <= len(data):
            kind = data[stop + 4 : stop + 8]
            stop += 12 + int.from_bytes(data[stop : stop + 4], "big")
        # An image without a last chunk takes the rest of the data.
        stop = stop if kind == b"IEND" else len(data)
        parts.append(data[start:stop])
    return parts


def _image(data: bytes, height: int, width: int) -> AnyArray:
    """Return the pixels of a PNG, uint8 [height, width, 3]; see `decode_png` for errors."""
    from PIL import Image  # imported here, because only compressed images need Pillow

    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            size = image.size  # the size is in the header, so nothing is decompressed yet
            if size == (width, height):
                return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:  # Pillow has no base class of the errors that damaged files cause
        raise UnityObservationException(
            f"a compressed observation is not a readable PNG: {error}"
        ) from error
    raise UnityObservationException(
        f"a compressed observation has a PNG of {size[1]}x{size[0]} pixels where its shape says "
        f"{height}x{width}"
    )


def _mapped(channels: AnyArray, mapping: Sequence[int]) -> FloatArray:
    """Return the mean of the channels mapped to each target: float32 [targets, H, W] in 0..255."""
    target = np.asarray(mapping)
    used = target[target >= 0]
    # Every target from 0 to the largest must have a channel.
    if not len(used) or len(np.unique(used)) != int(used.max()) + 1:
        raise UnityObservationException(
            f"the channel mapping {brief(mapping)} of a compressed observation leaves out a channel"
        )
    means = [channels[target == k].mean(axis=0, dtype=np.float32) for k in range(used.max() + 1)]
    return np.stack(means)
