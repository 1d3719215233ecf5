"""Encoders of visual observations [B, C, H, W], by ML-Agents' names.

simple and match3 are ML-Agents' own; nature_cnn: Mnih et al. 2015 (Nature 518); resnet: Espeholt et
al. 2018 (IMPALA), arXiv 1802.01561, figure 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from pipeline.errors import SettingsError
from pipeline.nets.layers import linear

if TYPE_CHECKING:
    from collections.abc import Sequence

# Smallest height and width that each encoder can take.
MINIMUM_SIDE = {"simple": 20, "nature_cnn": 36, "match3": 5, "resnet": 15, "fully_connected": 1}
# Output channels, kernel, stride of each convolution, without padding.
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "simple": ((16, 8, 4), (32, 4, 2)),
    "nature_cnn": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "match3": ((35, 3, 1), (144, 3, 1)),
    "fully_connected": (),
}
RESNET_CHANNELS = (16, 32, 32)
DENSE_GAIN = 1.41


class ConvolutionEncoder(nn.Module):
    """Convolutions with LeakyReLU, then a dense layer with LeakyReLU."""

    def __init__(self, shape: Sequence[int], output: int, kind: str) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutions = nn.ModuleList()
        for out, kernel, stride in CONVOLUTIONS[kind]:
            self.convolutions.append(nn.Conv2d(channels, out, kernel, stride))
            channels = out
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.dense = linear(channels * height * width, output, gain=DENSE_GAIN)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] to [B, output]."""
        for convolution in self.convolutions:
            image = nn.functional.leaky_relu(convolution(image))
        return nn.functional.leaky_relu(self.dense(image.flatten(1)))


class ResidualBlock(nn.Module):
    """Swish, convolution, Swish, convolution, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same shape."""
        y = self.first(nn.functional.silu(x))
        result: Tensor = x + self.second(nn.functional.silu(y))
        return result


class ResnetEncoder(nn.Module):
    """Three stages of convolution, pooling and two residual blocks; then a dense layer, ReLU."""

    def __init__(self, shape: Sequence[int], output: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutions = nn.ModuleList()
        self.blocks = nn.ModuleList()
        for out in RESNET_CHANNELS:
            self.convolutions.append(nn.Conv2d(channels, out, 3, padding=1))
            self.blocks.extend((ResidualBlock(out), ResidualBlock(out)))
            channels, height, width = out, (height - 3) // 2 + 1, (width - 3) // 2 + 1
        self.dense = linear(channels * height * width, output, gain=DENSE_GAIN)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] to [B, output]."""
        for stage, convolution in enumerate(self.convolutions):
            image = nn.functional.max_pool2d(convolution(image), 3, stride=2)
            image = self.blocks[2 * stage + 1](self.blocks[2 * stage](image))
        return nn.functional.relu(self.dense(nn.functional.silu(image).flatten(1)))


def visual_encoder(kind: str, shape: Sequence[int], output: int) -> nn.Module:
    """The encoder called `kind` for images of `shape` (C, H, W).

    Raises:
        SettingsError: The image is too small for this kind.
    """
    _, height, width = shape
    if min(height, width) < MINIMUM_SIDE[kind]:
        fitting = [name for name, side in MINIMUM_SIDE.items() if side <= min(height, width)]
        raise SettingsError(
            f"Visual observation resolution ({width}x{height}) is too small for the provided "
            f"EncoderType ({kind}). The min dimension is {MINIMUM_SIDE[kind]}; vis_encode_type can "
            f"be one of: {', '.join(fitting)}."
        )
    if kind == "resnet":
        return ResnetEncoder(shape, output)
    return ConvolutionEncoder(shape, output, kind)
