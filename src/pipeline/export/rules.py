"""What a model must keep to before we publish it: stricter than what Unity's loader accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.export.contract import check_model
from pipeline.export.findings import error
from pipeline.export.layout import TensorInfo, describe, inputs, load, outputs, read_constants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx

    from pipeline.export.findings import Finding
    from pipeline.protocol.specs import BehaviorSpec

PUBLISHED_OPSET = 9
PUBLISHED_IR = range(4, 7)
BATCH_AXIS = "batch"
SAFE_OPERATORS = frozenset(
    [
        "Add",
        "ArgMax",
        "Cast",
        "Clip",
        "Concat",
        "Constant",
        "Conv",
        "Div",
        "Exp",
        "Gemm",
        "Identity",
        "LSTM",
        "LeakyRelu",
        "Less",
        "Log",
        "MatMul",
        "MaxPool",
        "Mul",
        "Multinomial",
        "Pow",
        "RandomNormalLike",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Operators of models that Unity's engines are known to run."""

_CONSTANTS = (
    "version_number",
    "memory_size",
    "continuous_action_output_shape",
    "discrete_action_output_shape",
)
_ACTION_TYPES = {"continuous_actions": "float32", "discrete_actions": "int64"}
_MEMORIES = ("recurrent_in", "recurrent_out")


def publishing_findings(source: onnx.ModelProto | Path | str, spec: BehaviorSpec) -> list[Finding]:
    """Everything that keeps a model from being published for `spec`; empty when nothing does.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    model = load(source)
    findings = [*check_model(model, spec), *check_model(model, spec, deterministic=True)]
    findings += _file_rules(model)
    findings += _tensor_rules(model)
    findings += _graph_rules(model)
    findings += _memory_rules(model)
    return list(dict.fromkeys(findings))


def _file_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Opset, IR version, external data, and ONNX's own checker."""
    from onnx import TensorProto, checker

    opsets = [(entry.domain, entry.version) for entry in model.opset_import]
    if opsets != [("", PUBLISHED_OPSET)]:
        yield error("publish-opset", f"opset imports are {opsets}, not default {PUBLISHED_OPSET}")
    if model.ir_version not in PUBLISHED_IR:
        yield error("publish-ir", f"IR version is {model.ir_version}, not 4 to 6")
    external = [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    if external:
        yield error("publish-external-data", f"weights lie outside the file: {external}")
        return
    try:
        checker.check_model(model, full_check=True)
    except Exception as problem:  # noqa: BLE001  # the checker raises several unrelated types
        yield error("publish-checker", f"onnx.checker: {str(problem).strip().splitlines()[0]}")


def _tensor_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Names of batch axes and element types."""
    declared = outputs(model)
    batched = {name: info for name, info in declared.items() if name in _ACTION_TYPES}
    for name, info in (inputs(model) | batched).items():
        if info.shape[:1] != (BATCH_AXIS,):
            yield error("publish-batch", f"{name} has shape {list(info.shape)}, not [batch, …]")
    for name, dtype in _ACTION_TYPES.items():
        for tensor in (name, f"deterministic_{name}"):
            if tensor in declared and declared[tensor].dtype != dtype:
                yield error("publish-type", f"{tensor} is {declared[tensor].dtype}, not {dtype}")
    for name, value in read_constants(model).items():
        if name in _CONSTANTS and str(value.dtype) != "float32":
            yield error("publish-constant", f"constant {name} is {value.dtype}, not float32")


def _memory_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Shape and type of what a recurrent model takes and gives; neither without memory."""
    size = describe(model).memory_size
    wanted = TensorInfo(dtype="float32", shape=(BATCH_AXIS, 1, size))
    for name, declared in zip(_MEMORIES, (inputs(model), outputs(model)), strict=True):
        found = declared.get(name)
        if size > 0 and found is not None and found != wanted:
            message = f"{name} is {found.dtype} {list(found.shape)}, not float32 [batch, 1, {size}]"
            yield error("publish-memory", message)
        if size == 0 and found is not None:
            yield error("publish-memory", f"there is {name}, but memory_size is 0")


def _graph_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Operators, and inputs that nothing reads."""
    unknown = sorted(
        {n.op_type for n in model.graph.node if n.domain}
        | ({n.op_type for n in model.graph.node} - SAFE_OPERATORS)
    )
    if unknown:
        yield error("publish-operators", f"operators outside the safe vocabulary: {unknown}")
    used = {name for node in model.graph.node for name in node.input}
    unused = [name for name in inputs(model) if name not in used]
    if unused:
        yield error("publish-unused-input", f"inputs that nothing reads: {unused}")
