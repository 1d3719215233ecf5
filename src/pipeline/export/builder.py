"""Writing ONNX nodes one after another, with names that depend on nothing but their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from pipeline.arrays import AnyArray, FloatArray
    from pipeline.export.description import ActivationName, Dense

OPSET = 9
IR_VERSION = 6
LEAKY_SLOPE = 0.01


class GraphBuilder:
    """Collects nodes and weights; each method returns the name of the tensor that it adds."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._scalars: dict[float, str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int]) -> str:
        """Declare a float input [batch, *shape]."""
        self._inputs.append(_value_info(name, np.float32, ("batch", *shape)))
        return name

    def output(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> None:
        """Declare the tensor `name` as an output."""
        self._outputs.append(_value_info(name, dtype, shape))

    def constant_output(self, name: str, value: AnyArray) -> None:
        """Declare a constant output, as an initializer that carries the output's own name."""
        self.constant(value, name)
        self.output(name, np.float32, value.shape)

    def constant(self, value: AnyArray, name: str) -> str:
        """Store an array; float arrays become float32."""
        from onnx import numpy_helper

        array = np.asarray(value)
        dtype: type[np.generic] = np.int64 if array.dtype.kind == "i" else np.float32
        stored = np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)
        self._constants.append(numpy_helper.from_array(stored, name))
        return name

    def scalar(self, value: float) -> str:
        """A float constant of shape [1], stored once per value."""
        if value not in self._scalars:
            name = f"scalar_{len(self._scalars)}"
            self._scalars[value] = self.constant(np.array([value], dtype=np.float32), name)
        return self._scalars[value]

    def node(
        self, operator: str, inputs: Sequence[str], output: str | None = None, /, **attributes: Any
    ) -> str:
        """Append one operator; its output is named after it and its position unless `output`."""
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

    def weight(self, value: AnyArray, name: str, shape: Sequence[int]) -> str:
        """Store a trained array after checking its shape and that every value is finite.

        Raises:
            ExportError: The shape is not `shape`, or a value is NaN or infinite.
        """
        return self.constant(self.checked(value, name, shape), name)

    @staticmethod
    def checked(value: AnyArray, name: str, shape: Sequence[int]) -> FloatArray:
        """A trained array as float32, refused as `weight` does.

        Raises:
            ExportError: The shape is not `shape`, or a value is NaN or infinite.
        """
        array = np.asarray(value, dtype=np.float32)
        if array.shape != tuple(shape):
            raise ExportError(
                f"export: {name} has shape {list(array.shape)}, but {list(shape)} fits what comes "
                "before it; describe the layers in the order in which they run"
            )
        if not np.isfinite(array).all():
            raise ExportError(
                f"export: {name} holds {int((~np.isfinite(array)).sum())} values that are not "
                "finite; export an earlier checkpoint and lower the learning rate"
            )
        return array

    def dense(self, x: str, size: int, layer: Dense, name: str) -> tuple[str, int]:
        """[batch, size] → [batch, out]; gives the tensor, called `<name>.out`, and out."""
        out = len(layer.weight)
        weight = self.weight(layer.weight, f"{name}.weight", (out, size))
        bias = self.weight(layer.bias, f"{name}.bias", (out,))
        return self.node("Gemm", [x, weight, bias], f"{name}.out", transB=1), out

    def activation(self, x: str, name: ActivationName) -> str:
        """Apply an element-wise function."""
        if name == "swish":
            return self.node("Mul", [x, self.node("Sigmoid", [x])])
        if name == "leaky_relu":
            return self.node("LeakyRelu", [x], alpha=LEAKY_SLOPE)
        return self.node(name.capitalize(), [x])

    def concat(self, parts: Sequence[str], output: str | None = None) -> str:
        """Join [batch, n_i] tensors, or [batch, n_i, m] ones, along their second axis."""
        if len(parts) == 1 and output is None:
            return parts[0]
        return self.node("Concat", parts, output, axis=1)

    def model(self, name: str) -> onnx.ModelProto:
        """The finished model."""
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
