"""The declarations of an ONNX policy: inputs, outputs, constants and actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.errors import ExportError
from pipeline.files import foreign, listed, similar

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message

MEANING = "pipeline.meaning."
"""Prefix of metadata keys with the meaning of a tensor; the tensor's name follows the prefix."""
SPACES_KEY = "pipeline.spaces"
"""Key of the metadata with the environment's spaces."""

Dimension = int | str
_NAMING_FIELDS = {"name", "input", "output", "op_type", "domain", "dim_param", "key"}
# For each element type of policies, by ONNX's number: the bytes of a value, and the field of values
# that are not stored as raw bytes.
_STORED = {
    1: (4, "float_data"),  # float32
    2: (1, "int32_data"),  # uint8
    6: (4, "int32_data"),  # int32
    7: (8, "int64_data"),  # int64
    9: (1, "int32_data"),  # bool
    11: (8, "double_data"),  # float64
}
# Values of these types can be NaN or infinite.
_FLOATS = (1, 11)
# A file may have at most this many parts (nodes, attributes, tensors, axes), and this many nodes
# that no output needs. Usual models have at most 400 parts, and ONNX Runtime takes seconds for
# thousands of unneeded nodes.
_MOST_PARTS, _MOST_UNNEEDED = 100_000, 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A declared input or output."""

    dtype: str
    """NumPy name of the element type, such as float32."""
    shape: tuple[Dimension, ...]
    """Size of each axis: a number, the name of a symbolic axis, or '?' for an axis without a size.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """The declarations of an ONNX policy."""

    version: int | None
    """Value of `version_number`; None if the model does not have it."""
    memory_size: int
    """Number of values in an agent's recurrent memory; 0 without memory."""
    inputs: dict[str, TensorInfo]
    """Declared inputs that are not weights, in file order."""
    outputs: dict[str, TensorInfo]
    """Declared outputs, in file order."""
    continuous_size: int
    """Number of continuous actions."""
    discrete_branches: tuple[int, ...]
    """Branch sizes; for version 2 a single number, the sum of the sizes, which is all the file has.
    """
    opset: int
    """Version of the default operator domain; 0 if it is not imported."""
    ir_version: int
    """Version of the file format."""
    meanings: dict[str, str]
    """Meanings of tensors in the file's metadata, by name; texts of any length."""
    spaces: str = ""
    """Spaces of the environment, from the file's metadata; empty without them."""


def load(source: onnx.ModelProto | Path | str) -> onnx.ModelProto:
    """Return the model `source`, or the model in the file `source`.

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
        near = similar(path)  # the similar file may have another suffix
        near = near if near.endswith(".onnx'?") else ""
        hint = near or listed(path, ".onnx") or "; check the path"
        raise ExportError(f"{path}: cannot be read ({error.strerror}){hint}") from error
    other = foreign(content, own=b"\x08") or (
        "is not an ONNX model; give the .onnx file of a run, or export that policy again"
    )
    model = onnx.ModelProto()
    try:
        # `onnx.load` is not used, because it would read external data from other files.
        model.ParseFromString(content)
    except Exception as error:
        raise ExportError(f"{path}: {other}") from error
    if not model.HasField("graph") or not model.graph.output:
        raise ExportError(f"{path}: {other}")
    flaw = data_flaw(model)
    if flaw is not None:
        raise ExportError(f"{path}: {flaw}; export the policy again")
    return model


def without_metadata(path: Path) -> bytes:
    """Return the bytes of a model without metadata, which are equal for equal networks.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    model = load(path)
    # Metadata has the provenance, which differs between runs with equal weights.
    del model.metadata_props[:]
    return model.SerializeToString(deterministic=True)


def data_flaw(model: onnx.ModelProto) -> str | None:
    """Return a text that says why a model's names or tensors cannot be read; None if they can.

    A tensor's data is compared with its declared sizes before memory of these sizes is allocated.
    """
    import onnx

    n_unneeded = _n_unneeded(model)
    if n_unneeded > _MOST_UNNEEDED:
        return f"no output needs {n_unneeded} of its {len(model.graph.node)} nodes"
    # Sizes are checked before a tensor becomes an array, because an array may take all memory.
    for n_before, part in enumerate(_parts(model)):
        if n_before == _MOST_PARTS:
            return f"it has more than {_MOST_PARTS} parts, which no policy needs"
        if not all(isinstance(text, str) and text.isprintable() for text in _names(part)):
            return "a name in the file is not printable text"
        if not isinstance(part, onnx.TensorProto):
            continue
        # External data is read from a path, which a file from a stranger could choose.
        if part.data_location != part.DEFAULT:
            return f"the weights {part.name!r} are in another file"
        # NumPy refuses a shape such as (0, 2**62), so a size of 0 counts as 1 here.
        largest = 16 * prod(max(1, n) for n in part.dims)
        if min(part.dims, default=0) < 0 or prod(part.dims) != _n_values(part) or largest > maxsize:
            return f"the data of the tensor {part.name!r} do not fit its type and sizes"
        if part.data_type in _FLOATS and not np.isfinite(onnx.numpy_helper.to_array(part)).all():
            return f"the tensor {part.name!r} has numbers that are not finite"
    return None


def _n_unneeded(model: onnx.ModelProto) -> int:
    """Return the number of nodes on which no output depends."""
    nodes = model.graph.node
    producers = {name: index for index, node in enumerate(nodes) for name in node.output}
    waiting = [value.name for value in model.graph.output]
    needed: set[int] = set()
    while waiting:
        index = producers.get(waiting.pop())
        # Weights and inputs have no producer. Each node is visited only once, because a damaged
        # file may have a cycle of nodes.
        if index is not None and index not in needed:
            needed.add(index)
            waiting.extend(nodes[index].input)
    return len(nodes) - len(needed)


def _parts(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _parts(part)


def _names(message: Message) -> Iterator[str | bytes]:
    """Yield the names in a message; bytes for names that are not UTF-8."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and field.name in _NAMING_FIELDS:
            yield from [value] if isinstance(value, str | bytes) else value


def _n_values(tensor: onnx.TensorProto) -> int:
    """Return the number of values of a tensor; -1 for invalid data."""
    if tensor.data_type not in _STORED or tensor.HasField("segment"):
        return -1
    size, field = _STORED[tensor.data_type]
    # ONNX stores either raw bytes, or a typed field with one entry per value.
    if not tensor.HasField("raw_data"):
        return len(getattr(tensor, field))
    return -1 if len(tensor.raw_data) % size else len(tensor.raw_data) // size


def describe(source: onnx.ModelProto | Path | str) -> ModelDescription:
    """Return the declarations of a policy.

    Raises:
        ExportError: The file cannot be read as ONNX, or a constant cannot be read as numbers.
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
        meanings={
            prop.key.removeprefix(MEANING): prop.value
            for prop in model.metadata_props
            if prop.key.startswith(MEANING) and prop.value.isprintable()
        },
        spaces=next((prop.value for prop in model.metadata_props if prop.key == SPACES_KEY), ""),
    )


def inputs(model: onnx.ModelProto) -> dict[str, TensorInfo]:
    """Return declared inputs without weights, which IR version 3 also lists as inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {v.name: _tensor_info(v) for v in model.graph.input if v.name not in weights}


def outputs(model: onnx.ModelProto) -> dict[str, TensorInfo]:
    """Return declared outputs."""
    return {value.name: _tensor_info(value) for value in model.graph.output}


def read_constants(model: onnx.ModelProto) -> dict[str, AnyArray]:
    """Return the values of declared outputs that do not depend on any input.

    Exporters write them in three forms: an initializer with the output's name, a Constant node, or
    an Identity of either.

    Raises:
        ExportError: A value is not a finite number.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}

    def value(name: str) -> AnyArray | None:
        # The number of look-ups is limited by the number of nodes, because Identity nodes of a
        # damaged file may form a cycle.
        for _ in range(len(producers) + 1):
            if name in weights:
                return numpy_helper.to_array(weights[name])
            node = producers.get(name)
            if node is None or node.op_type not in ("Constant", "Identity"):
                return None
            if node.op_type == "Constant":
                tensor = next((a.t for a in node.attribute if a.name == "value"), None)
                return None if tensor is None else numpy_helper.to_array(tensor)
            name = next(iter(node.input), "")
        return None

    values = {output.name: value(output.name) for output in model.graph.output}
    constants = {name: array for name, array in values.items() if array is not None and array.size}
    for name, array in constants.items():
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise ExportError(
                f"the constant {name} of the model has values that are not finite numbers; "
                "export the policy again"
            )
    return constants


def _actions(constants: dict[str, AnyArray]) -> tuple[int, tuple[int, ...]]:
    """Return the continuous size and the branch sizes, by the present or deprecated constants."""
    sizes = {name: [int(n) for n in value.flat] for name, value in constants.items()}
    continuous = sizes.get("continuous_action_output_shape", [])
    discrete = sizes.get("discrete_action_output_shape", [])
    if not continuous and not discrete:
        # A model of package 1.x has one output for actions, and a constant for their kind.
        size = sizes.get("action_output_shape", [])
        is_continuous = sizes.get("is_continuous_control", [])[:1] == [1]
        continuous, discrete = (size, []) if is_continuous else ([], size)
    # Some exporters write 0 for a kind without actions, so zeros are left out.
    return sum(continuous), tuple(n for n in discrete if n > 0)


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    from onnx import TensorProto, helper

    tensor = value.type.tensor_type
    dtype = "undefined"
    # `onnx.helper` refuses unknown type numbers; their dtype stays "undefined".
    if tensor.elem_type in set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )
    return TensorInfo(dtype=dtype, shape=shape)
