"""An encoder of images: a linear map of each small square, then a dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.nets.onnx_graph import OnnxGraph

SIDE, FEATURES = 2, 8


class PatchEncoder(nn.Module):
    """For small images in which a thing's place matters more than its form.

    Args:
        shape: (C, H, W) of the images.
        output: width of the result.
    """

    minimum_side: ClassVar[int] = SIDE

    def __init__(self, shape: Sequence[int], output: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.patches = nn.Conv2d(channels, FEATURES, SIDE, stride=SIDE)
        self.dense = nn.Linear(FEATURES * (height // SIDE) * (width // SIDE), output)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] to [B, output]."""
        patches = nn.functional.relu(self.patches(image))
        return nn.functional.relu(self.dense(patches.flatten(1)))

    def to_onnx(self, graph: OnnxGraph, image: str) -> str:
        """`forward` in ONNX; weights are called after the image."""
        window = {"kernel_shape": [SIDE] * 2, "strides": [SIDE] * 2, "pads": [0] * 4}
        weight = graph.weight(self.patches.weight, f"{image}.patches.weight")
        bias = graph.weight(self.patches.bias, f"{image}.patches.bias")
        x = graph.node("Relu", [graph.node("Conv", [image, weight, bias], **window)])
        x = graph.reshape(x, (-1, self.dense.in_features), f"{image}.shape")
        return graph.node("Relu", [graph.linear(self.dense, x, f"{image}.dense")])
