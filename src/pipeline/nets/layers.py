"""Dense layers with ML-Agents' initial weights."""

from __future__ import annotations

import functools
import math
from contextvars import ContextVar
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeline import machine
from pipeline.errors import ExportError
from pipeline.nets.onnx_graph import OnnxGraph

# Normalised observations stay within this many standard deviations.
CLIP = 5.0
# Multiplications of a dense layer, and numbers of a row, from which oneDNN's start-up pays off.
_LARGE, _WIDE = 6_000_000, 64
# oneDNN compiles a program for each number of rows, and keeps a thousand: so they are rounded up.
_ROUND = 256
IS_TRACED = ContextVar("is_traced", default=False)
"""True while a loss is traced: its shapes will recur, and no branch may depend on a number."""


def linear(n_in: int, n_out: int, *, gain: float = 1.0) -> nn.Linear:
    """A dense layer whose weights are Kaiming normal (fan in) times `gain`, with zero bias.

    Source: He et al. 2015, arXiv 1502.01852, with a linear unit's gain: std = gain / sqrt(n_in).
    """
    layer = nn.Linear(n_in, n_out)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(n_in))
    nn.init.zeros_(layer.bias)
    return layer


def dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Dense layer: x [..., n_in], weight [n_out, n_in] and bias [n_out] (or none) to [..., n_out].

    torch multiplies matrices with MKL, which does not use AVX-512 on processors of AMD, and
    computes convolutions with oneDNN, which does. On these processors a large product is computed
    as a convolution of one pixel, twice as fast. Each number is the same sum, in another order
    where rows are long.
    """
    n_out, n_in = weight.shape
    if not is_for_onednn(x, x.numel() // n_in, n_in, n_out):
        return nn.functional.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, n_in)
    n_rows = image.shape[1]  # `len` would make it a constant of what is traced
    n_missing = 0 if IS_TRACED.get() else -n_rows % _ROUND
    if n_missing:
        image = nn.functional.pad(image, (0, 0, 0, 0, 0, n_missing))
    # Channels come last. One pixel has nothing to dilate; but without `dilation` torch takes its
    # own kernel.
    image = image.permute(0, 3, 1, 2)
    y = nn.functional.conv2d(image, weight.view(n_out, n_in, 1, 1), bias, dilation=2)
    y = y.permute(0, 2, 3, 1)
    if n_missing:
        y = y[:, :n_rows]
    return y.reshape(*x.shape[:-1], n_out)


def is_for_onednn(x: Tensor, n_rows: int, n_in: int, n_out: int) -> bool:
    """Whether a product of x, of `n_rows` rows, with [n_in, n_out] is faster by oneDNN."""
    is_large = n_rows * n_in * n_out >= _LARGE and min(n_in, n_out) >= _WIDE
    is_float = x.dtype == torch.float32  # an export is proved in float64
    return is_large and is_float and x.device.type == "cpu" and _is_onednn_faster()


@functools.cache
def _is_onednn_faster() -> bool:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # not in a portable run
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_avx512 and has_onednn and "AMD" in machine.processor()


def xavier(n_in: int, n_out: int) -> nn.Linear:
    """A dense layer with Xavier uniform weights and zero bias (Glorot and Bengio 2010)."""
    layer = nn.Linear(n_in, n_out)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def signal_heads(n_in: int, n_signals: int, n_outputs: int = 1) -> nn.Linear:
    """A dense layer with `n_outputs` values of each reward signal, side by side."""
    layer = xavier(n_in, n_signals * n_outputs)
    # Each signal by itself: Xavier's bound depends on the number of outputs, and ML-Agents has a
    # layer for each signal.
    for rows in torch.split(layer.weight.data, n_outputs):
        nn.init.xavier_uniform_(rows)
    return layer


class DenseSwish(nn.Module):
    """`num_layers` dense layers of `hidden_units`, each followed by Swish (x times its sigmoid)."""

    def __init__(self, n_in: int, hidden_units: int, num_layers: int, *, gain: float = 1.0) -> None:
        super().__init__()
        sizes = [n_in, *[hidden_units] * num_layers]
        self.linears = [linear(a, b, gain=gain) for a, b in pairwise(sizes)]
        self.layers = nn.ModuleList(self.linears)
        # Small layers are bound by calls and look-ups. The pairs stay right, because optimizers
        # move a parameter's data and keep the object.
        self._weights = [(layer.weight, layer.bias) for layer in self.linears]

    def forward(self, x: Tensor) -> Tensor:
        """[B, n_in] to [B, hidden_units]."""
        for weight, bias in self._weights:
            x = nn.functional.silu(dense(x, weight, bias))
        return x

    def to_onnx(self, graph: OnnxGraph, x: str, name: str) -> str:
        """`forward` in ONNX; weights are called after `name`."""
        for index, layer in enumerate(self.layers):
            x = graph.swish(graph.linear(layer, x, f"{name}.{index}"))
        return x


class RunningNormalizer(nn.Module):
    """Scales a vector observation by the mean and variance of all rows seen so far.

    Starts with one imagined row of mean 0 and squared deviation 1, and clips to five standard
    deviations, as ML-Agents does. Where the first rows are so far from 0 that it would be clipped,
    the imagined row has their mean instead: from 0 it would hide how they differ. Buffers are
    double so that long runs keep adding small changes.

    Attributes:
        imagined: mean [size] of the imagined row; not saved, because it only matters at the start.
    """

    count: Tensor
    mean: Tensor
    squared: Tensor
    imagined: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        # Squared deviations and not the variance: they can be added to.
        self.register_buffer("squared", torch.ones(size, dtype=torch.float64))
        self.register_buffer("imagined", torch.zeros_like(self.mean), persistent=False)
        self._scale: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows [B, size] into account (Welford 1962, for many rows at once)."""
        rows = rows.to(torch.float64)
        if self.count == 1.0 and len(rows):
            mean = rows.mean(0)
            squared = (rows - mean).square().sum(0)
            self.imagined.copy_(imagined_mean(len(rows), mean, squared))
            self.mean.copy_(self.imagined)
        self.count += len(rows)
        before = rows - self.mean
        # The count has the new rows already, so this is the mean of all.
        self.mean += before.sum(0) / self.count
        # The new mean on one side, the old one on the other: Welford's update, which never gets
        # negative by rounding as a difference of squares does.
        self.squared += ((rows - self.mean) * before).sum(0)
        self._scale = None

    def statistics(self) -> tuple[Tensor, Tensor]:
        """float32 mean and standard deviation [size] used by `forward`."""
        if self._scale is None or self._scale[0].device != self.mean.device:
            deviation = (self.squared / self.count).sqrt()
            self._scale = self.mean.to(torch.float32), deviation.to(torch.float32)
        return self._scale

    def forward(self, x: Tensor) -> Tensor:
        """Normalised and clipped x [B, size]."""
        mean, deviation = self.statistics()
        return (x - mean).div_(deviation).clamp_(-CLIP, CLIP)

    def to_onnx(self, graph: OnnxGraph, x: str) -> str:
        """`forward` in ONNX.

        Raises:
            ExportError: A deviation is not above 0.
        """
        mean, deviation = self.statistics()
        if not (deviation > 0.0).all():
            raise ExportError(
                f"export: {x}.std holds values that are not above 0; the normaliser's statistics "
                "are broken"
            )
        mean_, std = graph.weight(mean, f"{x}.mean"), graph.weight(deviation, f"{x}.std")
        scaled = graph.node("Div", [graph.node("Sub", [x, mean_]), std])
        return graph.node("Clip", [scaled], min=-CLIP, max=CLIP)

    def forget_scale(self) -> None:
        """Compute the scale anew at the next call, because the buffers have been changed."""
        self._scale = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._scale = None


def imagined_mean(n: Tensor | int, mean: Tensor, squared: Tensor) -> Tensor:
    """Mean [size] of a normaliser's imagined row.

    It is 0 where 0 is within the clipped range of the first rows: there a row at 0 adds less to the
    variance of n rows than 25 / n of it.

    Args:
        n: number of first rows.
        mean: [size] of the first rows.
        squared: [size] sum of their squared deviations.
    """
    deviation = ((squared + 1.0) / (n + 1)).sqrt()
    return torch.where(mean.abs() > CLIP * deviation, mean, 0.0)
