"""ONNX for a module without `to_onnx`: the operations of one call are recorded and translated.

torch's own exporters write operators that Unity's engines are not known to have, or need a newer
opset. Here each operation of torch becomes operators of `export.contract.SAFE_OPERATORS`, or is
refused. A tensor that the module computes from its weights alone becomes a constant.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import ExportError
from pipeline.nets.onnx_graph import OnnxGraph

# The module is traced with two numbers of rows; a size that differs between the two traces depends
# on the batch size.
_ROWS, _OTHER_ROWS = 3, 2


def trace(graph: OnnxGraph, module: nn.Module, x: str, shape: Sequence[int]) -> str:
    """Add the operations of a module's `forward` to the ONNX graph; return the result's name.

    The module is in evaluation mode, and maps the input `x` [B, *shape] to one tensor; the names of
    its weights begin with `x`.

    Raises:
        ExportError: An operation cannot be translated, or depends on the number of rows.
    """
    other = _Recorder(OnnxGraph(), x)
    other.run(module, torch.zeros(_OTHER_ROWS, *shape))
    return _Recorder(graph, x, iter(other.shapes)).run(module, torch.zeros(_ROWS, *shape))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Adds ONNX operators for each torch operation on a tensor that depends on the input."""

    def __init__(
        self, graph: OnnxGraph, prefix: str, before: Iterator[tuple[int, ...]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.prefix, self.before = graph, prefix, before
        self.shapes: list[tuple[int, ...]] = []
        # The key is a tensor's `id`; the tensor is kept, so that no later tensor gets the same
        # `id`.
        self.names: dict[int, tuple[str, Tensor]] = {}

    def run(self, module: nn.Module, x: Tensor) -> str:
        x = x.to(next((p for p in module.parameters()), x))
        self.names[id(x)] = self.prefix, x
        fast = torch.backends.mha.get_fastpath_enabled()
        # The fast path of attention would be traced as one operation for a whole transformer
        # layer, which has no translation.
        torch.backends.mha.set_fastpath_enabled(value=False)
        try:
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), self:
                return self.name_of(module(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(value=fast)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.y = result = func(*args, **(kwargs or {}))
        parts = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
        if any(id(part) in self.names for part in parts):
            operation = func._schema.name.removeprefix("aten::").removesuffix("_")
            try:
                names = _TRANSLATIONS[operation](self, *args, **(kwargs or {}))
            # A translation takes the arguments that it can translate, and no others.
            except (KeyError, TypeError, ValueError) as error:
                known = "docs/how-to/plugins.md lists the layers that can be"
                raise ExportError(f"it computes {operation}; {known}") from error
            names = names if isinstance(names, list) else [names]
            results = [result] if isinstance(result, Tensor) else result
            for tensor, name in zip(results, names, strict=False):
                self.names[id(tensor)] = name, tensor
        return result

    def name_of(self, value: Any) -> str:
        """Return the name of `value` in the graph.

        A number becomes a constant, and so does a tensor that does not depend on the input.

        Raises:
            ExportError: The shape of such a constant depends on the number of rows.
        """
        if isinstance(value, str):
            return value
        if not isinstance(value, Tensor):
            return self.graph.scalar(float(value))
        if id(value) in self.names:
            return self.names[id(value)][0]
        if -1 in self.sizes(value.shape):
            raise ExportError(
                "a constant has a shape that depends on the number of agents, as after `expand`; "
                "give the constant a fixed shape"
            )
        values = value.float().reshape(value.shape or (1,))
        return self.graph.weight(values, f"{self.prefix}.{len(self.shapes)}")

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        return self.graph.node(operator, [self.name_of(value) for value in inputs], **attributes)

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """Return a shape with -1 in place of the size that depends on the number of rows.

        Raises:
            ExportError: More than one size depends on the number of rows.
        """
        self.shapes.append(tuple(shape))
        before = self.shapes[-1] if self.before is None else next(self.before, ())
        sizes = [n if n == other else -1 for n, other in zip(shape, before, strict=False)]
        if len(before) != len(shape) or sizes.count(-1) > 1:
            raise ExportError(
                "two sizes of a shape depend on the number of agents; only one size may do so"
            )
        return sizes

    def reshape(self, x: Any, *_: Any, y: Any = None) -> str:
        """Append a reshape of x to the shape of y, or else of the operation's result."""
        sizes = self.sizes((self.y if y is None else y).shape)
        return self.graph.reshape(self.name_of(x), sizes, f"{self.prefix}.{len(self.shapes)}")

    def pieces(self, x: Tensor, axis: int = 0, start: int = 0, *_: Any) -> list[str]:
        """Append the results: successive parts of x along an axis, which the results may lack."""
        names, axis = [], axis % x.dim()
        start = max(0, start + x.shape[axis]) if start < 0 else start
        for part in [self.y] if isinstance(self.y, Tensor) else self.y:
            stop = start + (part.shape[axis] if part.dim() == x.dim() else 1)
            cut = self.node("Slice", x, axes=[axis], starts=[start], ends=[stop])
            names.append(cut if part.dim() == x.dim() else self.reshape(cut, y=part))
            start = stop
        return names

    def transpose(self, x: Tensor, one: int = 0, two: int = 1) -> str:
        axes = list(range(x.dim()))
        axes[one], axes[two] = axes[two], axes[one]
        return self.node("Transpose", x, perm=axes)

    def same(self, x: Tensor, *_: Any, **__: Any) -> str:
        if self.y.shape != x.shape:
            raise ExportError("`expand` repeats a tensor")
        return self.name_of(x)

    def softmax(self, x: Tensor, axis: int, *_: Any) -> str:
        # In opset 9 a softmax covers all axes from its axis on, so the axis must be the last.
        if axis not in (-1, x.dim() - 1):
            raise ExportError("a softmax over another axis than the last")
        return self.node("Softmax", x, axis=x.dim() - 1)

    def gelu(self, x: Tensor, *, approximate: str = "none") -> str:
        if approximate != "tanh":
            raise ExportError("gelu needs approximate='tanh'")
        return self.graph.activation("gelu", self.name_of(x))

    def elu(self, x: Tensor, *scales: float) -> str:
        if not {*scales} <= {1}:
            raise ExportError("elu needs alpha=1")
        return self.graph.activation("elu", self.name_of(x))

    def clip(self, x: Tensor, low: Any = None, high: Any = None) -> str:
        limits = {"min": low, "max": high}
        return self.node("Clip", x, **{k: float(v) for k, v in limits.items() if v is not None})

    def reduce(self, operator: str, x: Tensor, axes: Any = None, keepdim: Any = False) -> str:
        axes = [axis % x.dim() for axis in axes or range(x.dim())]
        return self.node(operator, x, axes=axes, keepdims=int(keepdim))

    def convolution(self, x: Tensor, weight: Tensor, bias: Any, *options: Any) -> str:
        stride, padding, dilation, is_transposed, _, groups = options
        if is_transposed:
            raise ExportError("a transposed convolution")
        inputs = [x, weight] if bias is None else [x, weight, bias]
        more = {"dilations": list(dilation), "group": groups}
        return self.slide("Conv", inputs, weight.shape[2:], stride, padding, **more)

    def avg_pool(self, x: Tensor, size: Any, *window: Any) -> str:
        # Exported policies use only operators of ML-Agents' own models, which Unity reads.
        # AveragePool is not one of them, so the average is computed as a convolution.
        weight = torch.eye(x.shape[1])[..., None, None].repeat(1, 1, *size) / math.prod(size)
        return self.slide("Conv", [x, weight], size, *window)

    def slide(self, operator: str, inputs: Any, *window: Any, **more: Any) -> str:
        return self.graph.slide(operator, [self.name_of(x) for x in inputs], *window, **more)

    def batch_norm(self, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> str:
        factor = (var + rest[2]).rsqrt() * (1.0 if weight is None else weight)
        offset = (0.0 if bias is None else bias) - mean * factor
        return self.affine(x, *(t.view(-1, *[1] * (x.dim() - 2)) for t in (factor, offset)))

    def layer_norm(self, x: Tensor, shape: Any, weight: Any, bias: Any, epsilon: float) -> str:
        (_,) = shape
        y = self.graph.layer_norm(self.name_of(x), axis=x.dim() - 1, epsilon=epsilon)
        return self.affine(y, weight, bias)

    def affine(self, x: Any, factor: Any, offset: Any) -> str:
        x = self.name_of(x) if factor is None else self.node("Mul", x, factor)
        return x if offset is None else self.node("Add", x, offset)


def _as(operator: str) -> Callable[..., str]:
    """Return the translation of an operation whose operator has the same inputs."""
    return lambda to, *inputs: to.node(operator, *inputs)


_SAME_INPUTS = "add sub mul div pow exp log relu sigmoid sqrt tanh"
_TRANSLATIONS: dict[str, Callable[..., str | list[str]]] = {
    **{name: _as(name.capitalize()) for name in _SAME_INPUTS.split()},
    **dict.fromkeys(("mm", "bmm"), _as("MatMul")),
    **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "squeeze"), _Recorder.reshape),
    **dict.fromkeys(("alias", "clone", "detach", "expand"), _Recorder.same),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _Recorder.softmax),
    **dict.fromkeys(("t", "transpose"), _Recorder.transpose),
    **dict.fromkeys(("clamp", "hardtanh"), _Recorder.clip),
    **dict.fromkeys(("split", "split_with_sizes"), lambda to, x, _, dim=0: to.pieces(x, dim)),
    **dict.fromkeys(("unbind", "select"), _Recorder.pieces),
    "slice": lambda to, x, dim=0, start=0, _=0: to.pieces(x, dim, start or 0),
    "cat": lambda to, xs, dim=0: to.node("Concat", *xs, axis=dim % to.y.dim()),
    "permute": lambda to, x, dims: to.node("Transpose", x, perm=[n % x.dim() for n in dims]),
    "rsub": lambda to, x, y: to.node("Sub", y, x),
    "neg": lambda to, x: to.node("Mul", x, -1.0),
    "silu": lambda to, x: to.graph.swish(to.name_of(x)),
    "elu": _Recorder.elu,
    "gelu": _Recorder.gelu,
    "leaky_relu": lambda to, x, slope=0.01: to.graph.leaky_relu(to.name_of(x), slope),
    "addmm": lambda to, bias, x, weight: to.node("Gemm", x, weight, bias),
    "convolution": _Recorder.convolution,
    "native_layer_norm": _Recorder.layer_norm,
    "native_batch_norm": _Recorder.batch_norm,
    "max_pool2d_with_indices": lambda to, x, *window: to.slide("MaxPool", [x], *window),
    "avg_pool2d": _Recorder.avg_pool,
    "mean": lambda to, *inputs: to.reduce("ReduceMean", *inputs),
    "sum": lambda to, *inputs: to.reduce("ReduceSum", *inputs),
}
"""Translations by the name of torch's operation; in-place operations use the same entries."""
