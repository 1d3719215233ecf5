"""ONNX for a module without `to_onnx`: the operations of one call are recorded and translated.

torch's own exporters write operators that Unity's engines are not known to have, or need a newer
opset. Here each operation of torch becomes operators of `export.contract.SAFE_OPERATORS`, or is
refused. A tensor that the module computes from its weights alone becomes a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
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

    Args:
        graph: the graph.
        module: a module in evaluation mode that maps [B, *shape] to one tensor.
        x: name of the input in the graph; the names of weights begin with this name.
        shape: shape of the input, without the batch axis.

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
                y = module(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(value=fast)
        return self.name_of(y)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
        if not any(id(part) in self.names for part in parts):
            return result
        operation = func._schema.name.removeprefix("aten::").removesuffix("_")
        named = {argument.name: argument.default_value for argument in func._schema.arguments}
        named |= {**dict(zip(named, args, strict=False)), **(kwargs or {})}
        a = SimpleNamespace(x=next(iter(named.values())), **named)
        reason, is_fine = _CONDITIONS.get(operation, ("", lambda _: True))
        if operation not in _TRANSLATIONS or not is_fine(a):
            known = "docs/how-to/plugins.md lists the layers that can be exported"
            raise ExportError(reason or f"it computes {operation}; {known}")
        results = list(result) if isinstance(result, tuple | list) else [result]
        names = _TRANSLATIONS[operation](self, result if len(results) > 1 else results[0], a)
        for tensor, name in zip(
            results, [names] if isinstance(names, str) else names, strict=False
        ):
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

    def reshape(self, y: Tensor, x: Any) -> str:
        sizes = self.sizes(y.shape)
        return self.graph.reshape(self.name_of(x), sizes, f"{self.prefix}.{len(self.shapes)}")

    def pieces(self, parts: Sequence[Tensor], x: Tensor, axis: int, start: int = 0) -> list[str]:
        """Append the successive parts of x along an axis, and return their names.

        The tensors `parts` may lack this axis; the first part begins at `start`.
        """
        names, axis = [], axis % x.dim()
        for part in parts:
            stop = start + (part.shape[axis] if part.dim() == x.dim() else 1)
            cut = self.node("Slice", x, axes=[axis], starts=[start], ends=[stop])
            names.append(cut if part.dim() == x.dim() else self.reshape(part, cut))
            start = stop
        return names

    def transpose(self, y: Tensor, a: Any) -> str:
        axes = list(range(y.dim()))
        one, two = getattr(a, "dim0", 0), getattr(a, "dim1", 1)
        axes[one], axes[two] = axes[two], axes[one]
        return self.node("Transpose", a.x, perm=axes)

    def batch_norm(self, _: Any, a: Any) -> str:
        factor = (a.running_var + a.eps).rsqrt() * (1.0 if a.weight is None else a.weight)
        offset = (0.0 if a.bias is None else a.bias) - a.running_mean * factor
        factor, offset = (t.view(-1, *[1] * (a.x.dim() - 2)) for t in (factor, offset))
        return self.node("Add", self.node("Mul", a.x, factor), offset)

    def layer_norm(self, _: Any, a: Any) -> str:
        y = self.graph.layer_norm(self.name_of(a.x), axis=a.x.dim() - 1, epsilon=a.eps)
        y = y if a.weight is None else self.node("Mul", y, a.weight)
        return y if a.bias is None else self.node("Add", y, a.bias)

    def average(self, _: Any, a: Any) -> str:
        """Append an average pooling as a convolution, which all of Unity's engines can import."""
        n, size = a.x.shape[1], a.kernel_size
        weight = torch.eye(n).view(n, n, 1, 1).repeat(1, 1, *size) / torch.Size(size).numel()
        return self.node("Conv", a.x, weight, **_window(size, a))

    def reduce(self, operator: str, a: Any) -> str:
        axes = getattr(a, "dim", None) or range(a.x.dim())
        axes, keeps = [axis % a.x.dim() for axis in axes], getattr(a, "keepdim", False)
        return self.node(operator, a.x, axes=axes, keepdims=int(keeps))


def _window(size: Sequence[int], a: Any) -> dict[str, Any]:
    stride = list(a.stride or size)
    return {"kernel_shape": list(size), "strides": stride, "pads": [*a.padding, *a.padding]}


def _scaled(to: _Recorder, a: Any) -> Any:
    return a.other if a.alpha == 1 else to.node("Mul", a.other, a.alpha)


def _limits(minimum: float | None, maximum: float | None) -> dict[str, float]:
    return {n: float(v) for n, v in (("min", minimum), ("max", maximum)) if v is not None}


_CONDITIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "gelu": ("gelu needs approximate='tanh'", lambda a: a.approximate == "tanh"),
    "elu": ("elu needs alpha=1", lambda a: {a.alpha, a.scale, a.input_scale} == {1}),
    "convolution": ("a transposed convolution", lambda a: not a.transposed),
    "native_layer_norm": (
        "a layer normalisation over several axes",
        lambda a: len(a.normalized_shape) == 1,
    ),
    "max_pool2d_with_indices": (
        "a pooling with dilation or ceil_mode",
        lambda a: not a.ceil_mode and set(a.dilation) == {1},
    ),
    "avg_pool2d": (
        "an average pooling with ceil_mode or count_include_pad=False",
        lambda a: not a.ceil_mode and a.count_include_pad and a.divisor_override is None,
    ),
    # In opset 9 a softmax covers all axes from its axis on, so the axis must be the last.
    **dict.fromkeys(
        ("_softmax", "_safe_softmax"),
        ("a softmax over another axis than the last", lambda a: a.dim in (-1, a.x.dim() - 1)),
    ),
    "slice": ("a slice with a step", lambda a: a.step == 1),
    "expand": (
        "`expand` repeats a tensor",
        lambda a: all(n in (-1, m) for n, m in zip(a.size, a.x.shape, strict=True)),
    ),
    "_to_copy": ("a tensor is converted to another type", lambda a: a.dtype in (None, a.x.dtype)),
}
"""For some operations, by name: the reason for a refusal, and the condition for a translation."""

_UNARY = ("exp", "log", "relu", "sigmoid", "sqrt", "tanh")


def _unary(operator: str) -> Callable[[_Recorder, Any, Any], str]:
    return lambda to, _, a: to.node(operator, a.x)


_TRANSLATIONS: dict[str, Callable[[_Recorder, Any, Any], str | list[str]]] = {
    **{name: _unary(name.capitalize()) for name in _UNARY},
    **dict.fromkeys(("mm", "bmm"), lambda to, _, a: to.node("MatMul", a.x, a.mat2)),
    **dict.fromkeys(
        ("view", "_unsafe_view", "unsqueeze", "squeeze", "_reshape_alias"),
        lambda to, y, a: to.reshape(y, a.x),
    ),
    **dict.fromkeys(
        ("alias", "clone", "detach", "expand", "_to_copy"), lambda to, _, a: to.name_of(a.x)
    ),
    **dict.fromkeys(
        ("_softmax", "_safe_softmax"),
        lambda to, _, a: to.node("Softmax", a.x, axis=a.x.dim() - 1),
    ),
    **dict.fromkeys(("t", "transpose"), _Recorder.transpose),
    **dict.fromkeys(("split", "split_with_sizes"), lambda to, y, a: to.pieces(y, a.x, a.dim)),
    "unbind": lambda to, y, a: to.pieces(y, a.x, a.dim),
    "select": lambda to, y, a: to.pieces([y], a.x, a.dim, a.index % a.x.shape[a.dim])[0],
    "slice": lambda to, y, a: to.pieces(
        [y], a.x, a.dim, slice(a.start, None).indices(a.x.shape[a.dim])[0]
    )[0],
    "cat": lambda to, y, a: to.node("Concat", *a.tensors, axis=a.dim % y.dim()),
    "permute": lambda to, y, a: to.node("Transpose", a.x, perm=[n % y.dim() for n in a.dims]),
    "add": lambda to, _, a: to.node("Add", a.x, _scaled(to, a)),
    "sub": lambda to, _, a: to.node("Sub", a.x, _scaled(to, a)),
    "rsub": lambda to, _, a: to.node("Sub", a.other, a.x),
    "mul": lambda to, _, a: to.node("Mul", a.x, a.other),
    "div": lambda to, _, a: to.node("Div", a.x, a.other),
    "pow": lambda to, _, a: to.node("Pow", a.x, a.exponent),
    "neg": lambda to, _, a: to.node("Mul", a.x, -1.0),
    "silu": lambda to, _, a: to.graph.swish(to.name_of(a.x)),
    "elu": lambda to, _, a: to.graph.activation("elu", to.name_of(a.x)),
    "gelu": lambda to, _, a: to.graph.activation("gelu", to.name_of(a.x)),
    "leaky_relu": lambda to, _, a: to.graph.leaky_relu(to.name_of(a.x), a.negative_slope),
    "clamp": lambda to, _, a: to.node("Clip", a.x, **_limits(a.min, a.max)),
    "hardtanh": lambda to, _, a: to.node("Clip", a.x, **_limits(a.min_val, a.max_val)),
    "addmm": lambda to, _, a: to.node("Gemm", a.mat1, a.mat2, a.x),
    "convolution": lambda to, _, a: to.node(
        "Conv",
        *([a.x, a.weight] if a.bias is None else [a.x, a.weight, a.bias]),
        **_window(a.weight.shape[2:], a),
        dilations=list(a.dilation),
        group=a.groups,
    ),
    "native_layer_norm": _Recorder.layer_norm,
    "native_batch_norm": _Recorder.batch_norm,
    "max_pool2d_with_indices": lambda to, _, a: to.node(
        "MaxPool", a.x, **_window(a.kernel_size, a)
    ),
    "avg_pool2d": _Recorder.average,
    "mean": lambda to, _, a: to.reduce("ReduceMean", a),
    "sum": lambda to, _, a: to.reduce("ReduceSum", a),
}
"""Translations by the name of torch's operation; in-place operations use the same entries."""
