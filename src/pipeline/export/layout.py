"""What an ONNX policy declares: its inputs, outputs, constants and actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ExportError

if TYPE_CHECKING:
    import onnx

    from pipeline.arrays import AnyArray

Dimension = int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One declared input or output."""

    dtype: str
    """NumPy name of the element type, such as float32."""
    shape: tuple[Dimension, ...]
    """Sizes; a symbolic axis is its name, an axis without size is '?'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a reader needs to know of an ONNX policy before running it."""

    version: int | None
    """`version_number`; None when the model does not carry it."""
    memory_size: int
    """Numbers of recurrent memory per agent; 0 without."""
    inputs: dict[str, TensorInfo]
    """Declared inputs that are not weights, in file order."""
    outputs: dict[str, TensorInfo]
    """Declared outputs, in file order."""
    continuous_size: int
    """Continuous actions; 0 without."""
    discrete_branches: tuple[int, ...]
    """Branch sizes (v3); for v2 models their sum alone, because the file holds no more."""
    opset: int
    """Version of the default operator domain; 0 when it is not imported."""
    ir_version: int
    """Version of the file format."""


def load(source: onnx.ModelProto | Path | str) -> onnx.ModelProto:
    """The model itself, or the one in a file.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    import onnx

    if isinstance(source, onnx.ModelProto):
        return source
    path = Path(source)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExportError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:
        raise ExportError(f"{path}: is not an ONNX file; export the policy again") from error
    if not model.HasField("graph") or not model.graph.output:
        raise ExportError(f"{path}: is not an ONNX file with a graph; export the policy again")
    return model


def describe(source: onnx.ModelProto | Path | str) -> ModelDescription:
    """Summarise a policy.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    model = load(source)
    constants = read_constants(model)
    version = constants.get("version_number")
    continuous, branches = _actions(constants)
    return ModelDescription(
        version=None if version is None else int(version.flat[0]),
        memory_size=int(constants["memory_size"].flat[0]) if "memory_size" in constants else 0,
        inputs=inputs(model),
        outputs=outputs(model),
        continuous_size=continuous,
        discrete_branches=branches,
        opset=next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0),
        ir_version=model.ir_version,
    )


def inputs(model: onnx.ModelProto) -> dict[str, TensorInfo]:
    """Declared inputs, without weights that are listed as inputs too (as IR 3 wanted)."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {v.name: _tensor_info(v) for v in model.graph.input if v.name not in weights}


def outputs(model: onnx.ModelProto) -> dict[str, TensorInfo]:
    """Declared outputs."""
    return {value.name: _tensor_info(value) for value in model.graph.output}


def read_constants(model: onnx.ModelProto) -> dict[str, AnyArray]:
    """Values of the declared outputs that do not depend on any input.

    Exporters write them in three forms: an initializer that carries the output's name, a Constant
    node, or an Identity of either.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}

    def value(name: str) -> AnyArray | None:
        for _ in range(len(producers) + 1):
            if name in weights:
                return numpy_helper.to_array(weights[name])
            node = producers.get(name)
            if node is None or node.op_type not in ("Constant", "Identity"):
                return None
            if node.op_type == "Constant":
                tensor = next((a.t for a in node.attribute if a.name == "value"), None)
                return None if tensor is None else numpy_helper.to_array(tensor)
            name = node.input[0]
        return None

    found = {output.name: value(output.name) for output in model.graph.output}
    return {name: array for name, array in found.items() if array is not None and array.size}


def _actions(constants: dict[str, AnyArray]) -> tuple[int, tuple[int, ...]]:
    """Continuous size and branch sizes, from the shape constants of either layout."""
    continuous = _shape_constant(constants, "continuous_action_output_shape")
    discrete = _shape_constant(constants, "discrete_action_output_shape")
    if not continuous and not discrete and "action_output_shape" in constants:
        size = _shape_constant(constants, "action_output_shape")
        if _shape_constant(constants, "is_continuous_control")[:1] == (1,):
            continuous = size
        else:
            discrete = size
    return sum(continuous), tuple(n for n in discrete if n > 0)


def _shape_constant(constants: dict[str, AnyArray], name: str) -> tuple[int, ...]:
    value = constants.get(name)
    return () if value is None else tuple(int(n) for n in value.reshape(-1))


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    from onnx import TensorProto, helper

    tensor = value.type.tensor_type
    if tensor.elem_type == TensorProto.UNDEFINED:
        dtype = "undefined"
    else:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )
    return TensorInfo(dtype=dtype, shape=shape)
