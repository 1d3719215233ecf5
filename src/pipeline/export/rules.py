"""Rules for models that we publish or run, beyond the checks of Unity's loader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite, isinf, prod
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.export.contract import OLDEST_VERSION, Finding, check_model, error
from pipeline.export.layout import data_flaw, describe, inputs, load, outputs, read_constants
from pipeline.protocol.specs import BehaviorSpec

if TYPE_CHECKING:
    import onnx


# Not imported from `nets.onnx_graph`: running a model needs no networks.
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
_OBSERVED = re.compile(r"(obs|visual_observation)_[0-9]+\Z|vector_observation\Z")
MOST_NUMBERS = 1 << 26
"""Numbers that a model may compute for one agent; policies take a few million."""


def model_findings(
    source: onnx.ModelProto | Path | str, spec: BehaviorSpec | None = None
) -> list[Finding]:
    """Return all faults of a model from any exporter; empty when it has none.

    Without the `spec` of the behavior it is to drive, checks that compare the two are left out.

    Raises:
        ExportError: The file cannot be read as ONNX, or a constant of it as numbers.
    """
    model = load(source)
    flaw = data_flaw(model)
    if flaw is not None:
        return [error("publish-data", flaw)]
    findings = check_model(model, spec)
    for rules in (_file_rules, _tensor_rules, _graph_rules, _action_rules, _memory_rules):
        findings += rules(model)
    return list(dict.fromkeys(findings))


def publishing_findings(
    source: onnx.ModelProto | Path | str, spec: BehaviorSpec | None = None
) -> list[Finding]:
    """Return all faults that keep a model from being published for `spec`; empty without any.

    To `model_findings` this adds what exports of earlier packages leave out.
    """
    model = load(source)
    findings = model_findings(model, spec)
    # Otherwise the other checks would read tensors that cannot be read.
    if data_flaw(model) is None:
        findings += check_model(model, spec, deterministic=True)
        findings += _recurrent_batch(model)
    return list(dict.fromkeys(findings))


def _file_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Opset, IR version, ONNX's own checker, and sizes of everything that is computed."""
    from onnx import checker, shape_inference

    opsets = [(entry.domain, entry.version) for entry in model.opset_import]
    if opsets != [("", PUBLISHED_OPSET)]:
        yield error("publish-opset", f"opset imports are {opsets}, not default {PUBLISHED_OPSET}")
    if model.ir_version not in PUBLISHED_IR:
        yield error("publish-ir", f"IR version is {model.ir_version}, not 4 to 6")
    try:
        checker.check_model(model)
        # Sizes of everything that is computed: a small file may ask for huge tensors in between.
        inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    except Exception as problem:  # noqa: BLE001  # it raises several unrelated types
        yield error("publish-checker", f"onnx.checker: {str(problem).strip().splitlines()[0]}")
        return
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]
    if any(min(shape, default=0) < 0 for shape in shapes):
        yield error("publish-size", "a tensor has a negative size")
    # A symbolic axis counts as 1: one agent.
    total = sum(prod(max(size, 1) for size in shape) for shape in shapes)
    if total > MOST_NUMBERS:
        yield error("publish-size", f"{total} numbers for one agent, more than {MOST_NUMBERS}")


def _tensor_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Names of batch axes, element types, and values of constants."""
    declared = outputs(model)
    types = dict(_ACTION_TYPES)
    batched = {name: info for name, info in declared.items() if name in types}
    if describe(model).version == OLDEST_VERSION:  # log probabilities, with any batch declared
        types["discrete_actions"] = "float32"
        batched.pop("discrete_actions", None)
    for name, info in (inputs(model) | batched).items():
        if info.shape[:1] != (BATCH_AXIS,):
            yield error("publish-batch", f"{name} has shape {list(info.shape)}, not [batch, …]")
    typed = {name: info for name, info in inputs(model).items() if _OBSERVED.match(name)}
    types |= dict.fromkeys([*typed, "action_masks", "recurrent_in", "recurrent_out"], "float32")
    for name, info in (inputs(model) | declared).items():
        dtype = types.get(name.removeprefix("deterministic_"), info.dtype)
        if info.dtype != dtype:
            yield error("publish-type", f"{name} is {info.dtype}, not {dtype}")
    for name, value in read_constants(model).items():
        if name in _CONSTANTS and str(value.dtype) != "float32":
            yield error("publish-constant", f"constant {name} is {value.dtype}, not float32")
        # -1 is allowed, as `memory_size` of models that were saved without it.
        elif name in _CONSTANTS and ((value % 1 != 0).any() or (value < -1).any()):
            yield error("publish-constant", f"constant {name} is {value.tolist()}, no whole number")


def _action_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Widths of masks and actions, which the constants give."""
    described = describe(model)
    branches = described.discrete_branches
    masks = described.inputs.get("action_masks")
    if branches and masks is not None and masks.shape[1:] != (sum(branches),):
        yield error("publish-masks", f"action_masks are {list(masks.shape)} for {sum(branches)}")
    if described.version == OLDEST_VERSION:
        return  # which declares any shape
    widths = {"continuous_actions": described.continuous_size, "discrete_actions": len(branches)}
    for kind, width in widths.items():
        if width and kind not in described.outputs:
            yield error("publish-actions", f"there is no output {kind}, but a size of {width}")
        for name in (kind, f"deterministic_{kind}"):
            declared = described.outputs.get(name)
            if declared is not None and declared.shape[1:] != (width,):
                yield error(
                    "publish-actions", f"{name} is {list(declared.shape)}, not [batch, {width}]"
                )


def _memory_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Shapes of memory inputs and outputs; there are none without memory."""
    described = describe(model)
    size = described.memory_size
    for name, declared in (
        ("recurrent_in", described.inputs),
        ("recurrent_out", described.outputs),
    ):
        tensor = declared.get(name)
        if size > 0 and tensor is not None and tensor.shape[1:] != (1, size):
            yield error("publish-memory", f"{name} is {list(tensor.shape)}, not [batch, 1, {size}]")
        if size == 0 and tensor is not None:
            yield error("publish-memory", f"there is {name}, but memory_size is 0")


def _recurrent_batch(model: onnx.ModelProto) -> Iterator[Finding]:
    """Batch axis of the memory output, which earlier packages declare in any form."""
    declared = outputs(model).get("recurrent_out")
    if declared is not None and declared.shape[:1] != (BATCH_AXIS,):
        yield error("publish-memory", f"recurrent_out is {list(declared.shape)}, not [batch, …]")


def _graph_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Operators, their random numbers, and inputs that nothing reads."""
    unknown = sorted(
        # An operator of another domain may have a known name and do something else.
        {n.op_type for n in model.graph.node if n.domain}
        | ({n.op_type for n in model.graph.node} - SAFE_OPERATORS)
    )
    if unknown:
        yield error("publish-operators", f"operators outside the safe vocabulary: {unknown}")
    for node in model.graph.node:
        attrs = {attr.name: attr for attr in node.attribute}
        if node.op_type == "RandomNormalLike" and "scale" in attrs and not attrs["scale"].f > 0.0:
            # ONNX Runtime ends the whole process over such a node.
            yield error("publish-operators", f"random numbers of a spread of {attrs['scale'].f}")
        for attr in node.attribute:
            flaws = [n for n in (attr.f, *attr.floats) if not isfinite(n)]
            # A bound of Clip may be infinite: there is none.
            if flaws and not (node.op_type == "Clip" and isinf(flaws[0])):
                yield error("publish-operators", f"{node.op_type} with {attr.name} {flaws[0]}")
        if node.op_type == "Multinomial" and "sample_size" in attrs and attrs["sample_size"].i != 1:
            yield error("publish-operators", f"{attrs['sample_size'].i} choices at once, not 1")
    used = {name for node in model.graph.node for name in node.input}
    unused = [name for name in inputs(model) if name not in used]
    if unused:
        yield error("publish-unused-input", f"inputs that nothing reads: {unused}")
