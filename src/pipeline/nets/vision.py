"""Encoders of visual observations [B, C, H, W], by ML-Agents' names.

simple and match3 are ML-Agents' own; nature_cnn: Mnih et al. 2015 (Nature 518); resnet: Espeholt et
al. 2018 (IMPALA), arXiv 1802.01561, figure 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, cast

from torch import Tensor, nn

from pipeline.errors import SettingsError
from pipeline.nets.layers import linear
from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.settings.trainer.schema import ENCODERS

RESNET_CHANNELS = (16, 32, 32)
POOL_SIDE, POOL_STRIDE = 3, 2
# ML-Agents' value of the square root of 2, the gain of a rectified layer (arXiv 1502.01852).
DENSE_GAIN = 1.41
_PACKAGE = "pipeline.nets."


class VisualEncoder(Protocol):
    """A network for images, a `torch.nn.Module`; made from (C, H, W) and its output size."""

    minimum_side: ClassVar[int]
    """Smallest height and width of an image."""

    def __call__(self, image: Tensor, /) -> Tensor:
        """Map [B, C, H, W] to [B, output]."""

    def to_onnx(self, graph: OnnxGraph, image: str) -> str:
        """Add `forward` in ONNX for the tensor called `image`; return the result's name."""


class ConvolutionEncoder(nn.Module):
    """Convolutions with LeakyReLU, then a dense layer with LeakyReLU."""

    minimum_side: ClassVar[int] = 1
    """Computed from `layers` if a subclass does not define it."""
    layers: ClassVar[Sequence[tuple[int, int, int]]] = ()
    """Output channels, kernel size and stride of each convolution, without padding."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        layers = vars(cls).get("layers")
        if "minimum_side" not in vars(cls) and isinstance(layers, tuple | list):
            side = 1
            for _, kernel, stride in reversed(layers):
                # Inverse of the output side (side - kernel) / stride + 1, from the last layer on.
                side = (side - 1) * stride + kernel
            cls.minimum_side = side

    def __init__(self, shape: Sequence[int], output: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutions = nn.ModuleList()
        for out, kernel, stride in self.layers:
            self.convolutions.append(nn.Conv2d(channels, out, kernel, stride))
            channels = out
            # Without padding, as in ML-Agents: rows that a stride does not reach are dropped.
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.dense = linear(channels * height * width, output, gain=DENSE_GAIN)

    def forward(self, image: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, output]."""
        for convolution in self.convolutions:
            image = nn.functional.leaky_relu(convolution(image))
        return nn.functional.leaky_relu(self.dense(image.flatten(1)))

    def to_onnx(self, graph: OnnxGraph, image: str) -> str:
        """Add `forward` in ONNX; weights are named by image and layer number."""
        x, place = image, 0
        for convolution in cast("Iterable[nn.Conv2d]", self.convolutions):
            x = graph.leaky_relu(_convolve(graph, convolution, x, f"{image}.{place}"))
            place += 2  # an activation counts as a layer, too
        x = graph.reshape(x, (-1, self.dense.in_features), f"{image}.{place}.shape")
        return graph.leaky_relu(graph.linear(self.dense, x, f"{image}.{place + 1}"))


class SimpleEncoder(ConvolutionEncoder):
    """`simple`: ML-Agents' default."""

    layers = ((16, 8, 4), (32, 4, 2))


class NatureEncoder(ConvolutionEncoder):
    """`nature_cnn`: Mnih et al. 2015, Nature 518, methods."""

    layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class Match3Encoder(ConvolutionEncoder):
    """`match3`, for the boards of ML-Agents' Match3."""

    layers = ((35, 3, 1), (144, 3, 1))


class FlatEncoder(ConvolutionEncoder):
    """`fully_connected`: a single dense layer."""


class ResidualBlock(nn.Module):
    """Swish, convolution, Swish, convolution, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape."""
        y = self.first(nn.functional.silu(x))
        result: Tensor = x + self.second(nn.functional.silu(y))
        return result

    def to_onnx(self, graph: OnnxGraph, x: str, name: str) -> str:
        """Add `forward` in ONNX; weights are named by `name` and layer number."""
        y = _convolve(graph, self.first, graph.swish(x), f"{name}.1")
        y = _convolve(graph, self.second, graph.swish(y), f"{name}.3")
        return graph.node("Add", [y, x])


class ResnetEncoder(nn.Module):
    """Three stages of convolution, pooling and two residual blocks; then a dense layer and ReLU."""

    minimum_side: ClassVar[int] = 15

    def __init__(self, shape: Sequence[int], output: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutions = nn.ModuleList()
        self.blocks = nn.ModuleList()
        for out in RESNET_CHANNELS:
            self.convolutions.append(nn.Conv2d(channels, out, 3, padding=1))
            self.blocks.extend((ResidualBlock(out), ResidualBlock(out)))
            # Convolutions with padding 1 keep the sides; pooling by 3 with stride 2 halves them.
            channels, height, width = out, (height - 3) // 2 + 1, (width - 3) // 2 + 1
        self.dense = linear(channels * height * width, output, gain=DENSE_GAIN)

    def forward(self, image: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, output]."""
        for stage, convolution in enumerate(self.convolutions):
            image = nn.functional.max_pool2d(convolution(image), POOL_SIDE, stride=POOL_STRIDE)
            image = self.blocks[2 * stage + 1](self.blocks[2 * stage](image))
        return nn.functional.relu(self.dense(nn.functional.silu(image).flatten(1)))

    def to_onnx(self, graph: OnnxGraph, image: str) -> str:
        """Add `forward` in ONNX; weights are named by image and layer number."""
        x, place = image, 0
        blocks = iter(cast("Iterable[ResidualBlock]", self.blocks))
        for convolution in cast("Iterable[nn.Conv2d]", self.convolutions):
            x = _convolve(graph, convolution, x, f"{image}.{place}")
            x = _slide(graph, "MaxPool", [x], side=POOL_SIDE, stride=POOL_STRIDE)
            x = next(blocks).to_onnx(graph, x, f"{image}.{place + 2}")
            x = next(blocks).to_onnx(graph, x, f"{image}.{place + 3}")
            place += 4
        x = graph.swish(x)
        x = graph.reshape(x, (-1, self.dense.in_features), f"{image}.{place + 1}.shape")
        return graph.node("Relu", [graph.linear(self.dense, x, f"{image}.{place + 2}")])


def _convolve(graph: OnnxGraph, layer: nn.Conv2d, x: str, name: str) -> str:
    weight = graph.weight(layer.weight, f"{name}.weight")
    bias = graph.weight(layer.get_parameter("bias"), f"{name}.bias")
    side, stride, padding = layer.kernel_size[0], layer.stride[0], int(layer.padding[0])
    # All kernels here are square, with the same stride and padding on both axes.
    return _slide(graph, "Conv", [x, weight, bias], side=side, stride=stride, padding=padding)


def _slide(
    graph: OnnxGraph,
    operator: str,
    inputs: Sequence[str],
    *,
    side: int,
    stride: int,
    padding: int = 0,
) -> str:
    """Append the operator `Conv` or `MaxPool`, with a square window of `side` pixels."""
    window = {"kernel_shape": [side] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
    return graph.node(operator, inputs, **window)


def visual_encoder(kind: str, shape: Sequence[int], output: int) -> VisualEncoder:
    """Return the encoder called `kind` for images of `shape` (C, H, W).

    Raises:
        SettingsError: The image is too small for this kind, or the encoder cannot be used.
    """
    encoder = ENCODERS.load(kind, package=_PACKAGE)
    _, height, width = shape
    if min(height, width) < encoder.minimum_side:
        # Loaded only for the message, because this may import plug-ins.
        smallest = {name: ENCODERS.load(name, package=_PACKAGE).minimum_side for name in ENCODERS}
        fitting = [name for name, side in smallest.items() if side <= min(height, width)]
        cheap = "; fully_connected computes the least" if "fully_connected" in fitting else ""
        raise SettingsError(
            f"Visual observation resolution ({width}x{height}) is too small for the provided "
            f"EncoderType ({kind}). The min dimension is {encoder.minimum_side}; "
            f"network_settings.vis_encode_type can be one of: {', '.join(fitting)}{cheap}."
        )
    network: VisualEncoder = encoder(shape, output)
    if not hasattr(network, "to_onnx"):  # refused before training instead of at export
        raise SettingsError(
            f"vis_encode_type: the class {type(network).__name__} of {kind!r} has no method "
            "`to_onnx(graph, image)`, by which policies are exported; give it one"
        )
    return network
