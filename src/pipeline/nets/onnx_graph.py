"""The ONNX graph of a policy, to which each module adds its operators.

The modules of a policy have a method `to_onnx`: it appends the operators of `forward` to a graph,
and returns the name of the tensor that `forward` would return. Names depend only on the order of
the calls, so that equal weights give equal bytes with every version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.errors import ExportError

if TYPE_CHECKING:
    import onnx
    from torch import Tensor, nn

# Unity's loader reads opset 9 of the default domain only. By default the onnx package writes its
# newest opset.
OPSET = 9
IR_VERSION = 6
BATCH_AXIS = "batch"
# These are the numbers of the element types in onnx.proto.
FLOAT, INT64 = 1, 7
# These are torch's defaults; operators of ONNX have other defaults, or none.
LEAKY_SLOPE = 0.01
LAYER_NORM_EPSILON = 1e-5


class OnnxGraph:
    """Collects nodes and weights; a method that adds one tensor returns the tensor's name.

    Attributes:
        input_shapes: shape of each declared input, without the batch axis.
    """

    def __init__(self) -> None:
        self.input_shapes: dict[str, tuple[int, ...]] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._scalars: dict[float, str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int]) -> str:
        """Declare a float input [batch, *shape]."""
        self.input_shapes[name] = tuple(shape)
        self._inputs.append(_value_info(name, np.float32, (BATCH_AXIS, *shape)))
        return name

    def output(self, name: str, dtype: type[np.generic], shape: Sequence[int]) -> None:
        """Declare the tensor `name` as an output of shape [batch, *shape]."""
        self._outputs.append(_value_info(name, dtype, (BATCH_AXIS, *shape)))

    def constant_output(self, name: str, values: Sequence[Any]) -> None:
        """Declare constant floats as the output `name`, and add them as an initializer `name`."""
        # Every loader of Unity looks for such a constant by its name among the initializers.
        array = np.array(values, dtype=np.float32)
        self.constant(array, name)
        self._outputs.append(_value_info(name, np.float32, array.shape))

    def constant(self, value: AnyArray, name: str) -> str:
        """Add an array to the graph as a constant `name`, of type int64 or float32.

        Raises:
            ExportError: A value is NaN or infinite.
        """
        from onnx import numpy_helper

        # Only two types are written, because Unity's engines convert or refuse all other types.
        dtype: type[np.generic] = np.int64 if value.dtype.kind == "i" else np.float32
        array = np.ascontiguousarray(value, dtype=dtype)
        if not np.isfinite(array).all():
            raise ExportError(
                f"export: {name} holds {int((~np.isfinite(array)).sum())} values that are not "
                "finite; export an earlier checkpoint and lower the learning rate"
            )
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, value: Tensor, name: str) -> str:
        """Add a trained tensor to the graph as a constant; raise the same errors as `constant`."""
        return self.constant(value.detach().cpu().numpy(), name)

    def scalar(self, value: float) -> str:
        """Add a float constant of shape [1] to the graph, once for each value; return its name."""
        if value not in self._scalars:
            name = f"scalar_{len(self._scalars)}"
            self._scalars[value] = self.constant(np.array([value]), name)
        return self._scalars[value]

    def node(
        self, operator: str, inputs: Sequence[str], output: str | None = None, /, **attributes: Any
    ) -> str:
        """Append an operator; without `output` the result is named by operator and position."""
        # The position makes the name unique and equal in every export of the same policy.
        output = output or f"{operator.lower()}_{len(self._nodes)}"
        self.nodes(operator, inputs, [output], **attributes)
        return output

    def nodes(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], /, **attributes: Any
    ) -> None:
        """Append one operator with several outputs, named `outputs`."""
        from onnx import helper

        name = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=name, **attributes))

    def linear(self, layer: nn.Module, x: str, name: str) -> str:
        """Append a dense layer [batch, in] → [batch, out]; the result is called `<name>.out`."""
        weight = self.weight(layer.get_parameter("weight"), f"{name}.weight")
        bias = self.weight(layer.get_parameter("bias"), f"{name}.bias")
        # Gemm takes only matrices; `matmul` is for tensors of rank 3.
        return self.node("Gemm", [x, weight, bias], f"{name}.out", transB=1)

    def matmul(self, x: str, weight: Tensor, name: str) -> str:
        """Append [batch, n, in] · weightᵀ, for a weight [out, in]."""
        return self.node("MatMul", [x, self.weight(weight.T, name)])

    def swish(self, x: str) -> str:
        """Append Swish, x times its sigmoid."""
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def leaky_relu(self, x: str, slope: float = LEAKY_SLOPE) -> str:
        """Append LeakyReLU; the default of `slope` is torch's."""
        return self.node("LeakyRelu", [x], alpha=slope)

    def activation(self, kind: str, x: str) -> str:
        """Append the activation function `kind`, built from operators that Unity's engines have."""
        if kind == "swish":
            return self.swish(x)
        if kind == "leaky_relu":
            return self.leaky_relu(x)
        if kind == "elu":  # relu(x) + exp(min(x, 0)) - 1
            below = self.node("Exp", [self.node("Sub", [x, self.node("Relu", [x])])])
            below = self.node("Sub", [below, self.scalar(1.0)])
            return self.node("Add", [self.node("Relu", [x]), below])
        if kind == "gelu":  # x (1 + tanh(√(2 / π) (x + 0.044715 x³))) / 2
            cube = self.node("Mul", [self.node("Mul", [x, x]), x])
            cube = self.node("Mul", [cube, self.scalar(0.044715)])
            scaled = self.node("Mul", [self.node("Add", [x, cube]), self.scalar(sqrt(2.0 / pi))])
            factor = self.node("Add", [self.node("Tanh", [scaled]), self.scalar(1.0)])
            return self.node("Mul", [self.node("Mul", [x, factor]), self.scalar(0.5)])
        return self.node(kind.capitalize(), [x])  # Relu or Tanh

    def layer_norm(self, x: str, *, axis: int, epsilon: float = LAYER_NORM_EPSILON) -> str:
        """Append (x - mean) / √(variance + epsilon) over the last axis, number `axis`."""
        # Opset 9 has no operator for layer normalisation, so this takes several operators.
        mean = self.node("ReduceMean", [x], axes=[axis], keepdims=1)
        centered = self.node("Sub", [x, mean])
        square = self.node("Mul", [centered, centered])
        variance = self.node("ReduceMean", [square], axes=[axis], keepdims=1)
        shifted = self.node("Add", [variance, self.scalar(epsilon)])
        return self.node("Div", [centered, self.node("Sqrt", [shifted])])

    def slide(
        self,
        operator: str,
        inputs: Sequence[str],
        size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        **more: Any,
    ) -> str:
        """Append `Conv` or `MaxPool` with a window of `size`; by default `stride` is `size`."""
        window = {"kernel_shape": list(size), "strides": list(stride or size)}
        return self.node(operator, inputs, **window, pads=[*padding, *padding], **more)

    def reshape(self, x: str, shape: Sequence[int], name: str) -> str:
        """Append a reshape; the constant `name` has the `shape`, in which -1 is a size to infer."""
        return self.node("Reshape", [x, self.constant(np.array(shape), name)])

    def concat(self, parts: Sequence[str], output: str | None = None) -> str:
        """Join [batch, n_i] tensors, or [batch, n_i, m] tensors, along their second axis."""
        if len(parts) == 1 and output is None:
            return parts[0]
        return self.node("Concat", parts, output, axis=1)

    def model(self, name: str) -> onnx.ModelProto:
        """Return the finished model, called `name`."""
        from onnx import helper

        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=self._constants
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="rl-pipeline",
        )


def _value_info(
    name: str, dtype: type[np.generic], shape: Sequence[int | str]
) -> onnx.ValueInfoProto:
    from onnx import helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, list(shape))
