"""Encoders of visual observations [B, C, H, W]: ML-Agents' encoders, and encoders of users.

simple and match3 are defined by ML-Agents; nature_cnn: Mnih et al. 2015 (Nature 518); resnet:
Espeholt et al. 2018 (IMPALA), arXiv 1802.01561, figure 3.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from pipeline.errors import ExportError, SettingsError
from pipeline.nets.layers import linear
from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.nets.traced_onnx import trace
from pipeline.plugins import user_code
from pipeline.settings.trainer.schema import ENCODERS

RESNET_CHANNELS = (16, 32, 32)
POOL_SIDE, POOL_STRIDE = 3, 2
# This is ML-Agents' value of the square root of 2, the gain of a rectified layer (arXiv
# 1502.01852).
DENSE_GAIN = 1.41
_PACKAGE = "pipeline.nets."


class ConvolutionEncoder(nn.Module):
    """Convolutions with LeakyReLU, then a dense layer with LeakyReLU."""

    minimum_side: ClassVar[int] = 1
    """Smallest height and width of an image; computed from `layers` if a subclass has no value."""
    layers: ClassVar[Sequence[tuple[int, int, int]]] = ()
    """Output channels, kernel size and stride of each convolution, without padding."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        layers = vars(cls).get("layers")
        if "minimum_side" not in vars(cls) and isinstance(layers, tuple | list):
            side = 1
            for _, kernel, stride in reversed(layers):
                # A layer's output has the side (side - kernel) / stride + 1. This is solved for the
                # input's side, from the last layer to the first.
                side = (side - 1) * stride + kernel
            cls.minimum_side = side

    def __init__(self, shape: Sequence[int], output: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutions = nn.ModuleList()
        for out, kernel, stride in self.layers:
            self.convolutions.append(nn.Conv2d(channels, out, kernel, stride))
            channels = out
            # The convolutions have no padding, as in ML-Agents, so rows and columns that a stride
            # does not reach are dropped.
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.dense = linear(channels * height * width, output, gain=DENSE_GAIN)

    def forward(self, image: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, output]."""
        for convolution in self.convolutions:
            image = nn.functional.leaky_relu(convolution(image))
        return nn.functional.leaky_relu(self.dense(image.flatten(1)))

    def to_onnx(self, graph: OnnxGraph, image: str) -> str:
        """Add the operators of `forward` to `graph`; weights are named by `image` and layer."""
        x, place = image, 0
        for convolution in cast("Iterable[nn.Conv2d]", self.convolutions):
            x = graph.leaky_relu(_convolve(graph, convolution, x, f"{image}.{place}"))
            place += 2  # an activation counts as a layer, too
        x = graph.reshape(x, (-1, self.dense.in_features), f"{image}.{place}.shape")
        return graph.leaky_relu(graph.linear(self.dense, x, f"{image}.{place + 1}"))


class SimpleEncoder(ConvolutionEncoder):
    """ML-Agents' default encoder, `simple`."""

    layers = ((16, 8, 4), (32, 4, 2))


class NatureEncoder(ConvolutionEncoder):
    """Encoder `nature_cnn`: Mnih et al. 2015, Nature 518, methods."""

    layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class Match3Encoder(ConvolutionEncoder):
    """Encoder `match3`, for the boards of ML-Agents' Match3."""

    layers = ((35, 3, 1), (144, 3, 1))


class FlatEncoder(ConvolutionEncoder):
    """Encoder `fully_connected`: a single dense layer."""


class ResidualBlock(nn.Module):
    """Residual block: the input plus Swish, convolution, Swish and convolution of the input."""

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
        """Add the operators of `forward` to `graph`; weights are named by `name` and layer."""
        y = _convolve(graph, self.first, graph.swish(x), f"{name}.1")
        y = _convolve(graph, self.second, graph.swish(y), f"{name}.3")
        return graph.node("Add", [y, x])


class ResnetEncoder(nn.Module):
    """Encoder `resnet`: three stages with two residual blocks each, then a dense layer and ReLU.

    A stage is a convolution, a pooling, and its residual blocks.
    """

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
        """Add the operators of `forward` to `graph`; weights are named by `image` and layer."""
        x, place = image, 0
        blocks = iter(cast("Iterable[ResidualBlock]", self.blocks))
        for convolution in cast("Iterable[nn.Conv2d]", self.convolutions):
            x = _convolve(graph, convolution, x, f"{image}.{place}")
            x = graph.slide("MaxPool", [x], [POOL_SIDE] * 2, [POOL_STRIDE] * 2)
            x = next(blocks).to_onnx(graph, x, f"{image}.{place + 2}")
            x = next(blocks).to_onnx(graph, x, f"{image}.{place + 3}")
            place += 4
        x = graph.swish(x)
        x = graph.reshape(x, (-1, self.dense.in_features), f"{image}.{place + 1}.shape")
        return graph.node("Relu", [graph.linear(self.dense, x, f"{image}.{place + 2}")])


def _convolve(graph: OnnxGraph, layer: nn.Conv2d, x: str, name: str) -> str:
    weight = graph.weight(layer.weight, f"{name}.weight")
    bias = graph.weight(layer.get_parameter("bias"), f"{name}.bias")
    padding = [int(n) for n in layer.padding]
    return graph.slide("Conv", [x, weight, bias], layer.kernel_size, layer.stride, padding)


class OwnEncoder(nn.Module):
    """Wraps a user's encoder: `Class(shape, output)`, a module from [B, *shape] to [B, output].

    The module is always in evaluation mode, so that acting and learning compute the same. Its ONNX
    operations are recorded from a call, unless the class has `to_onnx`.

    Raises:
        SettingsError: The class cannot be used; the message has the reason.
    """

    def __init__(self, name: str, kind: Any, shape: Sequence[int], output: int) -> None:
        super().__init__()
        self.shape = tuple(shape)
        try:
            with user_code(name, f"fails for observations of shape {list(shape)}"):
                self.network: nn.Module = kind(self.shape, output)
                self.eval()
                self._check(name, output)
        except ExportError as error:
            raise SettingsError(f"{name}: cannot be exported to ONNX: {error}") from error

    @torch.no_grad()
    def _check(self, name: str, output: int) -> None:
        """Refuse a network that has a wrong result or cannot be exported."""
        if not isinstance(self.network, nn.Module):
            raise SettingsError(f"{name}: is not a torch.nn.Module; derive the class from it")
        rows = torch.linspace(-1.0, 1.0, 3 * math.prod(self.shape)).view(3, *self.shape)
        if rows.is_meta:
            return  # tensors on `meta` have no values to check
        y = self.network(rows)
        if not isinstance(y, Tensor) or y.shape != (3, output):
            given = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise SettingsError(
                f"{name}: its forward maps {list(rows.shape)} to {given}, but must give "
                f"[3, {output}]: [batch, the second argument of its constructor]"
            )
        if not torch.allclose(self.network(rows[:1]), y[:1], rtol=1e-3, atol=1e-4):
            raise SettingsError(
                f"{name}: the result for an observation depends on the other observations, or on "
                "chance"
            )
        self.to_onnx(OnnxGraph(), "obs")

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002  # torch has it
        """Keep evaluation mode, whatever `mode` is."""
        return super().train(mode=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, *shape] to [B, output]."""
        y: Tensor = self.network(x)
        return y

    def to_onnx(self, graph: OnnxGraph, x: str) -> str:
        """Add the operators of `forward` for tensor `x` to `graph`; return the result's name."""
        return trace(graph, self.network, x, self.shape)


def observation_encoder(kind: str, shape: Sequence[int], output: int) -> Any:
    """Return the encoder called `kind` for observations of `shape`: (C, H, W), or (n,).

    It is a `torch.nn.Module` that maps [B, *shape] to [B, output], and has a method `to_onnx`.

    Raises:
        SettingsError: The image is too small for this kind, or the encoder cannot be used.
    """
    encoder = ENCODERS.load(kind, package=_PACKAGE)
    if not hasattr(encoder, "to_onnx"):
        return OwnEncoder(kind, encoder, shape, output)
    smaller = min(shape[1:], default=encoder.minimum_side)
    if smaller < encoder.minimum_side:
        height, width = shape[1:]
        # All encoders are loaded only for the message, because loading may import plug-ins.
        smallest = {name: ENCODERS.load(name, package=_PACKAGE).minimum_side for name in ENCODERS}
        fitting = [name for name, side in smallest.items() if side <= smaller]
        cheap = "; fully_connected computes the least" if "fully_connected" in fitting else ""
        raise SettingsError(
            f"Visual observation resolution ({width}x{height}) is too small for the provided "
            f"EncoderType ({kind}). The min dimension is {encoder.minimum_side}; "
            f"network_settings.vis_encode_type can be one of: {', '.join(fitting)}{cheap}."
        )
    return encoder(shape, output)
