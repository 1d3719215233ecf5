"""Dense layers with the initial weights that ML-Agents uses, and running normalisers."""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeline import machine
from pipeline.errors import ExportError
from pipeline.nets.onnx_graph import OnnxGraph

# Normalised observations stay within this many standard deviations.
CLIP = 5.0
# oneDNN is faster for a dense layer with at least `_LARGE` multiplications and with at least
# `_WIDE` inputs and outputs.
_LARGE, _WIDE = 6_000_000, 64
# oneDNN compiles a program for each number of rows and keeps 1000 programs, so numbers of rows are
# rounded up to multiples of this.
_ROUND = 256
IS_TRACED = ContextVar("is_traced", default=False)
"""True while a loss is traced, when no branch may depend on a tensor's value."""


def square_root(x: Tensor) -> Tensor:
    """Return the square root of x, the same on every x86-64 CPU.

    Results of torch's `sqrt` are not correctly rounded, and had other last bits on emulated CPUs
    (docs/evidence/kernels.md); these two operations are rounded correctly.
    """
    return x.rsqrt().reciprocal()


def draw_normal(weight: Tensor, std: float) -> None:
    """Fill a weight with normal numbers of mean 0; nothing is done on the device `meta`."""
    # On `meta` torch would import its compiler for the draw, which takes a second.
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def linear(n_in: int, n_out: int, *, gain: float = 1.0) -> nn.Linear:
    """Return a dense layer with Kaiming normal weights (fan in) times `gain`, and zero bias.

    Source: He et al. 2015, arXiv 1502.01852, with the gain of a linear unit: std = gain /
    sqrt(n_in).
    """
    layer = nn.Linear(n_in, n_out)
    # With this deviation, outputs have gain^2 times the mean square of the inputs, for any width.
    draw_normal(layer.weight, gain / math.sqrt(n_in))
    nn.init.zeros_(layer.bias)
    return layer


def dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a dense layer with weight [n_out, n_in] to x [..., n_in]; return [..., n_out].

    torch multiplies matrices with MKL, which does not use AVX-512 on AMD processors, and computes
    convolutions with oneDNN, which uses AVX-512. On these processors a large product is computed as
    a convolution with a kernel of one pixel, twice as fast. Each output is the same sum, added in
    another order if rows are long (docs/explanation/fast-networks.md).
    """
    n_out, n_in = weight.shape
    if not is_for_onednn(x, x.numel() // n_in, n_in, n_out):
        return nn.functional.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, n_in)
    n_rows = image.shape[1]  # `len` would be a constant in a traced program
    n_missing = 0 if IS_TRACED.get() else -n_rows % _ROUND
    if n_missing:
        image = nn.functional.pad(image, (0, 0, 0, 0, 0, n_missing))
    # Channels are the second axis of the shape, but the last axis in memory. Dilation has no effect
    # on a kernel of one pixel, but without dilation torch uses its own code instead of oneDNN.
    image = image.permute(0, 3, 1, 2)
    y = nn.functional.conv2d(image, weight.view(n_out, n_in, 1, 1), bias, dilation=2)
    y = y.permute(0, 2, 3, 1)
    if n_missing:
        y = y[:, :n_rows]
    return y.reshape(*x.shape[:-1], n_out)


def is_for_onednn(x: Tensor, n_rows: int, n_in: int, n_out: int) -> bool:
    """Return whether oneDNN is faster for a product of x [n_rows, n_in] with [n_in, n_out]."""
    is_large = n_rows * n_in * n_out >= _LARGE and min(n_in, n_out) >= _WIDE
    is_float = x.dtype == torch.float32  # float64 in checks of exports
    return is_large and is_float and x.device.type == "cpu" and _is_onednn_faster()


@functools.cache
def _is_onednn_faster() -> bool:
    # On Intel's processors oneDNN is not faster, because MKL uses AVX-512 itself.
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # not in portable mode
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_avx512 and has_onednn and "AMD" in machine.processor()


def xavier(n_in: int, n_out: int) -> nn.Linear:
    """Return a dense layer with Xavier uniform weights (Glorot and Bengio 2010) and zero bias."""
    layer = nn.Linear(n_in, n_out)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def signal_heads(n_in: int, n_signals: int, n_outputs: int = 1) -> nn.Linear:
    """Return a dense layer with `n_outputs` outputs for each signal, one signal after another."""
    layer = xavier(n_in, n_signals * n_outputs)
    # Weights are drawn separately for each signal, because Xavier's bound depends on the number of
    # outputs, and ML-Agents has one layer for each signal.
    for rows in torch.split(layer.weight.data, n_outputs):
        nn.init.xavier_uniform_(rows)
    return layer


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": nn.functional.silu,
    "relu": nn.functional.relu,
    "tanh": torch.tanh,
    "elu": nn.functional.elu,
    "gelu": partial(nn.functional.gelu, approximate="tanh"),
    "leaky_relu": nn.functional.leaky_relu,
}
"""Activation functions by their names in settings; `OnnxGraph.activation` has the same names."""


class DenseLayers(nn.Module):
    """Dense layers of given widths, each followed by an activation function.

    With `layer_norm` each layer is normalised before its activation, by `nn.LayerNorm`.
    """

    def __init__(
        self,
        n_in: int,
        widths: Sequence[int],
        *,
        activation: str = "swish",
        layer_norm: bool = False,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.linears = [linear(a, b, gain=gain) for a, b in pairwise((n_in, *widths))]
        self.layers = nn.ModuleList(self.linears)
        self.norms = nn.ModuleList(map(nn.LayerNorm, widths) if layer_norm else ())
        self.activation = activation
        self._activate = ACTIVATIONS[activation]
        # The list saves look-ups of parameters, which take much of a small layer's time. Its pairs
        # remain valid, because optimizers move a parameter's data, but keep the parameter object.
        self._weights = [(layer.weight, layer.bias) for layer in self.linears]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, n_in] to [B, n_out], the width of the last layer."""
        for index, (weight, bias) in enumerate(self._weights):
            x = dense(x, weight, bias)
            x = self._activate(self.norms[index](x) if self.norms else x)
        return x

    def to_onnx(self, graph: OnnxGraph, x: str, name: str) -> str:
        """Add `forward` to the ONNX graph; the names of weights begin with `name`."""
        for index, layer in enumerate(self.layers):
            x = graph.linear(layer, x, f"{name}.{index}")
            if self.norms:
                scale, shift = self.norms[index].parameters()
                x = graph.layer_norm(x, axis=1)
                x = graph.node("Mul", [x, graph.weight(scale, f"{name}.{index}.scale")])
                x = graph.node("Add", [x, graph.weight(shift, f"{name}.{index}.shift")])
            x = graph.activation(self.activation, x)
        return x


class RunningNormalizer(nn.Module):
    """Scales a vector observation by the mean and variance of all rows seen so far.

    As in ML-Agents, the statistics start with one imagined row of mean 0 and squared deviation 1,
    and results are clipped to five standard deviations. If 0 is so far from the first rows that 0
    would be clipped, the imagined row has the mean of the first rows: a row at 0 would hide the
    differences between the first rows. Buffers are float64, so that small changes count in long
    runs.

    Attributes:
        imagined: [size] mean of the imagined row; it is not saved, because it matters only at the
            start.
    """

    count: Tensor
    mean: Tensor
    squared: Tensor
    imagined: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        # The sum of squared deviations is stored, because new rows can be added to a sum.
        self.register_buffer("squared", torch.ones(size, dtype=torch.float64))
        # `zeros_like` on `meta` would import sympy, which takes half a second.
        imagined = torch.zeros(size, dtype=torch.float64)
        self.register_buffer("imagined", imagined, persistent=False)
        self._scale: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add rows [B, size] to the statistics (Welford 1962, for many rows at once)."""
        rows = rows.to(torch.float64)
        if self.count == 1.0 and len(rows):
            mean = rows.mean(0)
            squared = (rows - mean).square().sum(0)
            self.imagined.copy_(imagined_mean(len(rows), mean, squared))
            # The mean of the one imagined row is moved, and its squared deviation stays 1.
            self.mean.copy_(self.imagined)
        self.count += len(rows)
        before = rows - self.mean
        # `count` already includes the new rows, so this becomes the mean of all rows.
        self.mean += before.sum(0) / self.count
        # Welford's update multiplies deviations from the new mean by deviations from the old mean.
        # Rounding never makes this sum negative, unlike a difference of sums of squares.
        self.squared += ((rows - self.mean) * before).sum(0)
        self._scale = None

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return float32 mean and standard deviation [size], which `forward` uses."""
        # The result is kept until the statistics change, because acting needs it for every message.
        if self._scale is None or self._scale[0].device != self.mean.device:
            deviation = square_root(self.squared / self.count)
            self._scale = self.mean.to(torch.float32), deviation.to(torch.float32)
        return self._scale

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised and clipped x [B, size]."""
        mean, deviation = self.statistics()
        # The difference is a new tensor, so it can be divided and clipped in place.
        return (x - mean).div_(deviation).clamp_(-CLIP, CLIP)

    def to_onnx(self, graph: OnnxGraph, x: str) -> str:
        """Add the operators of `forward` to `graph`; return the name of their result.

        Raises:
            ExportError: A standard deviation is not above 0.
        """
        mean, deviation = self.statistics()
        if not (deviation > 0.0).all():
            raise ExportError(
                f"export: {x}.std holds values that are not above 0: the normaliser's statistics "
                "are damaged; export an earlier checkpoint"
            )
        mean_, std = graph.weight(mean, f"{x}.mean"), graph.weight(deviation, f"{x}.std")
        scaled = graph.node("Div", [graph.node("Sub", [x, mean_]), std])
        return graph.node("Clip", [scaled], min=-CLIP, max=CLIP)

    def forget_scale(self) -> None:
        """Let the next call of `statistics` compute its result again from changed buffers."""
        self._scale = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._scale = None


def imagined_mean(n: Tensor | int, mean: Tensor, squared: Tensor) -> Tensor:
    """Return the mean [size] of a normaliser's imagined row, from n first rows.

    The mean is 0 if 0 is within 5 standard deviations of the first rows, or else the mean of these
    rows. In the first case the imagined row raises the variance of n rows by less than 25 / n of
    the variance. `squared` [size] is the sum of the squared deviations of the first rows.
    """
    # This is the deviation of n + 1 rows, of which the imagined row has squared deviation 1.
    deviation = square_root((squared + 1.0) / (n + 1))
    return torch.where(mean.abs() > CLIP * deviation, mean, 0.0)
