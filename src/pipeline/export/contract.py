"""The checks of Unity's model loader, and stricter rules for models that are run or published.

`check_model` has the loader's checks, in the loader's order and with its numbers. Some findings end
the check, because later checks depend on them. `model_findings` adds rules for models that this
package runs, `publishing_findings` rules for models that it publishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, isinf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.core.specs import BehaviorSpec
from pipeline.export.layout import (
    ModelDescription,
    data_flaw,
    describe,
    inputs,
    load,
    outputs,
    read_constants,
)

if TYPE_CHECKING:
    import onnx

# Models of ML-Agents' packages 1.x have version 2; models of package 2.0 and later have version 3.
OLDEST_VERSION, NEWEST_VERSION = 2, 3
_ACTION_OUTPUTS = (
    "action",
    "continuous_actions",
    "discrete_actions",
    "deterministic_continuous_actions",
    "deterministic_discrete_actions",
)
# These are the inputs, other than observations, that Unity's package fills or ignores.
_KNOWN_INPUTS = {"action_masks", "recurrent_in", "prev_action", "epsilon", "sequence_length"}
# These are the numbers of axes of each kind of observation.
_VECTOR, _ENTITIES, _VISUAL = 1, 2, 3

# This repeats `OPSET` of `nets`, which modules that only run a model do not import.
_PUBLISHED_OPSET = 9
# Before IR version 4, weights had to be listed as inputs, too.
_PUBLISHED_IR = range(4, 7)
_BATCH_AXIS = "batch"
_OPERATORS = """
    Add ArgMax Cast Clip Concat Constant Conv Div Exp Gemm Identity LSTM LeakyRelu Less Log MatMul
    MaxPool Mul Multinomial Pow RandomNormalLike ReduceMean ReduceSum Relu Reshape Sigmoid Slice
    Softmax Sqrt Squeeze Sub Tanh Transpose Unsqueeze"""
SAFE_OPERATORS = frozenset(_OPERATORS.split())
"""Operators that Unity's inference engines are known to support."""
_CONSTANTS = (
    "version_number",
    "memory_size",
    "continuous_action_output_shape",
    "discrete_action_output_shape",
)
_NONE = np.empty(0)
_OBSERVED = re.compile(r"(obs|visual_observation)_[0-9]+\Z|vector_observation\Z")
# A model may compute at most this number of values for one agent; policies compute a few million.
_MOST_NUMBERS = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault of a model, which breaks a rule of Unity's loader or a rule for published models."""

    severity: Literal["warning", "error"]
    """Severity in the Unity Inspector; at run time only errors stop the model."""
    rule: str
    """Number of the loader's check (2 to 20, v2-a to v2-d), or the name of a publishing rule."""
    message: str
    """Description of the fault."""

    def __str__(self) -> str:
        return f"{self.severity} (rule {self.rule}): {self.message}"


def _warning(rule: str, message: str) -> Finding:
    return Finding(severity="warning", rule=rule, message=message)


def _error(rule: str, message: str) -> Finding:
    return Finding(severity="error", rule=rule, message=message)


class _Model:
    def __init__(self, model: onnx.ModelProto, deterministic: bool = False) -> None:
        self.constants = read_constants(model)
        self.inputs, self.outputs = inputs(model), outputs(model)
        self.deterministic = deterministic

    def number(self, name: str) -> int:
        """Return the first value of the constant `name`; 0 if the model does not have it."""
        # Another rule reports a missing constant, so it counts as 0 here.
        return int(self.constants[name].flat[0]) if name in self.constants else 0

    def total(self, name: str) -> int:
        """Return the sum of the values of the constant `name`; 0 if the model does not have it."""
        return int(self.constants[name].sum()) if name in self.constants else 0

    def has_actions(self, kind: str) -> bool:
        """Return whether the model has a non-empty output with actions of `kind`."""
        expected = f"deterministic_{kind}_actions" if self.deterministic else f"{kind}_actions"
        return expected in self.outputs and self.total(f"{kind}_action_output_shape") > 0


def check_model(
    source: onnx.ModelProto | Path | str,
    spec: BehaviorSpec | None = None,
    *,
    deterministic: bool = False,
) -> list[Finding]:
    """Return everything that Unity's loader would report for a model.

    Without `spec`, checks that need the behavior are left out; `deterministic` says whether the
    agent has "Deterministic inference" ticked.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    model = _Model(load(source), deterministic)
    # Unity's loader stops at the first finding of rules 2 to 8, and reports nothing after it.
    stop = _stopping_finding(model)
    if stop is not None:
        return [stop]
    findings = list(_version_findings(model))
    # Unity's loader also stops here: without a memory size it cannot check other tensors.
    if model.number("memory_size") == -1:
        return [*findings, _warning("11", "memory_size is -1: the model was saved without it")]
    findings += _presence_findings(model)
    is_v3 = model.number("version_number") >= NEWEST_VERSION
    # Unity's loader only checks models of version 3 for unexpected inputs.
    if is_v3:
        findings += _unexpected_inputs(model, spec)
    if spec is not None:
        findings += (_v3_observations if is_v3 else _v2_observations)(model, spec)
        findings += _actions(model, spec, is_v3=is_v3)
    return sorted(findings, key=lambda x: (int(x.rule) if x.rule.isdigit() else 100, x.rule))


def _stopping_finding(model: _Model) -> Finding | None:
    """Return the first finding of rules 2 to 8, which ends the check; None without a finding."""
    for rule, name in (("2", "version_number"), ("3", "memory_size")):
        if name not in model.constants:
            return _warning(rule, f"required constant {name} is missing")
    if not any(name in model.outputs for name in _ACTION_OUTPUTS):
        return _warning("4", f"no action output among {', '.join(_ACTION_OUTPUTS)}")
    # A model without `continuous_actions` and `discrete_actions` is of package 1.x, which has one
    # output called `action`.
    kinds = [kind for kind in ("continuous", "discrete") if f"{kind}_actions" in model.outputs]
    if not kinds:
        for name in ("action_output_shape", "is_continuous_control"):
            if name not in model.constants:
                return _warning("5", f"deprecated layout without the constant {name}")
    for kind in kinds:
        # Unity's loader has two rules for faults of continuous actions, but only one rule for
        # faults of discrete actions.
        rule = "6" if kind == "continuous" else "8"
        if f"{kind}_action_output_shape" not in model.constants:
            return _warning(rule, f"required constant {kind}_action_output_shape is missing")
        if not model.has_actions(kind):
            expected = "deterministic" if model.deterministic else "sampled"
            rule = "7" if kind == "continuous" else "8"
            return _warning(rule, f"the {expected} {kind} actions are missing or empty")
    return None


def _version_findings(model: _Model) -> Iterator[Finding]:
    """Check rules 9 and 10: the version, and a memory in a model of version 2."""
    version, memory = model.number("version_number"), model.number("memory_size")
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        age = "old; train it again" if version < OLDEST_VERSION else "new; update the package"
        message = f"version_number is {version}, which is too {age} (2 and 3 can be loaded)"
        yield _error("9", message)
    if version == OLDEST_VERSION and memory > 0:
        message = f"a version 2 model with memory_size {memory} cannot be loaded; train it again"
        yield _error("10", message)


def _presence_findings(model: _Model) -> Iterator[Finding]:
    """Check rules 13, 14 and 20: tensors that memory and discrete actions need."""
    if model.number("memory_size") > 0:
        if "recurrent_in" not in model.inputs:
            yield _warning("13", "memory_size is above 0, but there is no input recurrent_in")
        if "recurrent_out" not in model.outputs:
            yield _warning("20", "memory_size is above 0, but there is no output recurrent_out")
    if model.has_actions("discrete") and "action_masks" not in model.inputs:
        yield _warning("14", "there are discrete actions, but no input action_masks")


def _unexpected_inputs(model: _Model, spec: BehaviorSpec | None) -> Iterator[Finding]:
    """Check rule 15: inputs that no sensor fills."""
    count = None if spec is None else len(spec.observation_specs)
    for name in model.inputs:
        # The number has at most six digits and no leading zeros, because `int` must not read a text
        # of any length from a file.
        number = re.fullmatch(r"obs_(0|[1-9][0-9]{0,5})", name)
        is_sensor = number is not None and (count is None or int(number[1]) < count)
        if not is_sensor and name not in _KNOWN_INPUTS:
            yield _warning("15", f"unexpected input {name}: no sensor of the behavior fills it")


def _v3_observations(model: _Model, spec: BehaviorSpec) -> Iterator[Finding]:
    """Check rules 12 and 16: inputs for the sensors, and their shapes."""
    for index, obs in enumerate(spec.observation_specs):
        sensor = f"sensor {index} {list(obs.shape)}"
        yield from _input(model, f"obs_{index}", sensor, obs.shape, missing="12", other="16")


def _v2_observations(model: _Model, spec: BehaviorSpec) -> Iterator[Finding]:
    """Check rules v2-a (one input for all vectors), v2-b (images) and v2-c (lists of entities)."""
    specs = spec.observation_specs
    size = sum(obs.shape[0] for obs in specs if len(obs.shape) == _VECTOR)
    if size or "vector_observation" in model.inputs:
        yield from _input(model, "vector_observation", f"{size} numbers", (size,), missing="v2-a")
    shapes = [obs.shape for obs in specs if len(obs.shape) == _VISUAL]
    for index, shape in enumerate(shapes):
        sensor = f"an image of {list(shape)}"
        yield from _input(model, f"visual_observation_{index}", sensor, shape, missing="v2-b")
    n_inputs = sum(name.startswith("visual_observation_") for name in model.inputs)
    if n_inputs > len(shapes):
        yield _warning("v2-b", f"{n_inputs} visual inputs for {len(shapes)} visual sensors")
    for index, obs in enumerate(specs):
        if len(obs.shape) == _ENTITIES:
            sensor = f"variable-length sensor {index}"
            yield from _input(model, f"obs_{index}", sensor, None, missing="v2-c")


def _input(
    model: _Model,
    name: str,
    sensor: str,
    shape: tuple[int, ...] | None,
    *,
    missing: str,
    other: str = "",
) -> Iterator[Finding]:
    """Yield a finding of rule `missing` for a missing input, of rule `other` for a wrong shape.

    Without `other`, both are findings of rule `missing`.
    """
    if name not in model.inputs:
        yield _warning(missing, f"there is no input {name} for {sensor}")
    # The shape is compared without the batch axis.
    elif shape is not None and (declared := model.inputs[name].shape[1:]) != shape:
        message = f"input {name} has shape {list(declared)}, the sensor {list(shape)}"
        yield _warning(other or missing, message)


def _actions(model: _Model, spec: BehaviorSpec, *, is_v3: bool) -> Iterator[Finding]:
    """Check rules 17 to 19 and v2-d: the actions of the model and of the behavior."""
    action = spec.action_spec
    previous = model.inputs["prev_action"].shape[-1:] if "prev_action" in model.inputs else None
    if previous not in (None, (action.discrete_size,)):
        text = f"prev_action has {list(previous or ())} values for {action.discrete_size} branches"
        yield _warning("17", text)
    if not model.constants.keys() & _CONSTANTS[2:]:
        # A model of package 1.x has one kind of action and the constants of that release.
        size = model.total("action_output_shape")
        is_continuous = model.total("is_continuous_control") > 0
        expected = action.continuous_size if is_continuous else sum(action.discrete_branches)
        if size != expected:
            text = f"action_output_shape is {size}, the behavior has {expected}"
            yield _warning("18" if is_continuous else "v2-d", text)
        return
    continuous = model.total("continuous_action_output_shape")
    if continuous != action.continuous_size:
        text = f"the model gives {continuous} continuous actions, the behavior takes"
        yield _warning("18", f"{text} {action.continuous_size}")
    # The constant has each branch's size in version 3, and the sum of the sizes in version 2; 0
    # means no discrete actions.
    sizes = [int(n) for n in model.constants.get("discrete_action_output_shape", _NONE).flat if n]
    branches = sizes if is_v3 else sum(sizes)
    wanted = list(action.discrete_branches) if is_v3 else sum(action.discrete_branches)
    if branches != wanted:
        text = f"discrete_action_output_shape is {branches}, the behavior has {wanted}"
        yield _warning("19" if is_v3 else "v2-d", text)


def model_findings(
    source: onnx.ModelProto | Path | str, spec: BehaviorSpec | None = None
) -> list[Finding]:
    """Return all faults of a model from any exporter; [] without faults.

    Without a `spec`, checks that compare the model with the behavior are left out.

    Raises:
        ExportError: The file cannot be read as ONNX, or a constant cannot be read as numbers.
    """
    model = load(source)
    flaw = data_flaw(model)
    if flaw is not None:
        return [_error("publish-data", flaw)]
    findings = [*check_model(model, spec), *_file_rules(model), *_tensor_rules(model)]
    layout = describe(model)
    findings += [*_graph_rules(model), *_action_rules(layout), *_memory_rules(layout)]
    return list(dict.fromkeys(findings))


def publishing_findings(
    source: onnx.ModelProto | Path | str, spec: BehaviorSpec | None = None
) -> list[Finding]:
    """Return all faults that prevent a model from being published for `spec`; [] without faults.

    These are the faults that `model_findings` and Unity's loader report, and faults of the memory's
    batch axis.
    """
    model = load(source)
    findings = model_findings(model, spec)
    # If a tensor cannot be read, the other checks would fail at this tensor.
    if data_flaw(model) is None:
        findings += check_model(model, spec, deterministic=True)
        memory = outputs(model).get("recurrent_out")
        # `model_findings` accepts any batch axis of the memory, because in models of earlier
        # packages the axis may have any name or length.
        if memory is not None and memory.shape[:1] != (_BATCH_AXIS,):
            text = f"recurrent_out has shape {list(memory.shape)}, not [batch, …]"
            findings.append(_error("publish-memory", text))
    return list(dict.fromkeys(findings))


def _file_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Check the opset, the IR version and the sizes of all tensors, and run ONNX's own checker."""
    from onnx import checker, shape_inference

    opsets = [(entry.domain, entry.version) for entry in model.opset_import]
    if opsets != [("", _PUBLISHED_OPSET)]:
        yield _error("publish-opset", f"opset imports are {opsets}, not default {_PUBLISHED_OPSET}")
    if model.ir_version not in _PUBLISHED_IR:
        yield _error("publish-ir", f"IR version is {model.ir_version}, not 4 to 6")
    try:
        checker.check_model(model)
        # All intermediate sizes are inferred, because a small file may compute huge tensors.
        inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    except Exception as problem:  # noqa: BLE001  # onnx raises several unrelated types
        yield _error("publish-checker", f"onnx.checker: {str(problem).strip().splitlines()[0]}")
        return
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]
    if any(min(shape, default=0) < 0 for shape in shapes):
        yield _error("publish-size", "a tensor has a negative size")
    # The batch axis is symbolic and has size 0 here; it counts as 1, for one agent.
    total = sum(prod(max(size, 1) for size in shape) for shape in shapes)
    if total > _MOST_NUMBERS:
        text = f"the model computes {total} values for one agent, more than {_MOST_NUMBERS}"
        yield _error("publish-size", text)


def _tensor_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Check names of batch axes, element types, and values of constants."""
    given, declared = inputs(model), outputs(model)
    types = {"continuous_actions": "float32", "discrete_actions": "int64"}
    batched = {name: info for name, info in declared.items() if name in types}
    # In version 2 `discrete_actions` are log probabilities with any batch axis.
    if describe(model).version == OLDEST_VERSION:
        types["discrete_actions"] = "float32"
        batched.pop("discrete_actions", None)
    for name, info in (given | batched).items():
        if info.shape[:1] != (_BATCH_AXIS,):
            yield _error("publish-batch", f"{name} has shape {list(info.shape)}, not [batch, …]")
    floats = [*filter(_OBSERVED.match, given), "action_masks", "recurrent_in", "recurrent_out"]
    types |= dict.fromkeys(floats, "float32")
    for name, info in (given | declared).items():
        dtype = types.get(name.removeprefix("deterministic_"), info.dtype)
        if info.dtype != dtype:
            yield _error("publish-type", f"{name} is {info.dtype}, not {dtype}")
    for name, value in read_constants(model).items():
        if name in _CONSTANTS and str(value.dtype) != "float32":
            yield _error("publish-constant", f"constant {name} is {value.dtype}, not float32")
        # Models that were saved without a memory size have -1 as `memory_size`.
        elif name in _CONSTANTS and ((value % 1 != 0).any() or (value < -1).any()):
            text = f"constant {name} is {value.tolist()}, not whole numbers from -1"
            yield _error("publish-constant", text)


def _action_rules(described: ModelDescription) -> Iterator[Finding]:
    """Check the widths of masks and actions against the sizes that the model's constants give."""
    branches = described.discrete_branches
    masks = described.inputs.get("action_masks")
    if branches and masks is not None and masks.shape[1:] != (sum(branches),):
        text = f"action_masks has shape {list(masks.shape)}, not [batch, {sum(branches)}]"
        yield _error("publish-masks", text)
    if described.version == OLDEST_VERSION:
        return  # models of version 2 may declare any shape
    widths = {"continuous_actions": described.continuous_size, "discrete_actions": len(branches)}
    for kind, width in widths.items():
        if width and kind not in described.outputs:
            text = f"there is no output {kind}, but the constants give it a size of {width}"
            yield _error("publish-actions", text)
        for name in (kind, f"deterministic_{kind}"):
            declared = described.outputs.get(name)
            if declared is not None and declared.shape[1:] != (width,):
                text = f"{name} has shape {list(declared.shape)}, not [batch, {width}]"
                yield _error("publish-actions", text)


def _memory_rules(described: ModelDescription) -> Iterator[Finding]:
    """Check the shapes of the memory's input and output, which only models with memory have."""
    size = described.memory_size
    for name, tensors in (("in", described.inputs), ("out", described.outputs)):
        tensor = tensors.get(f"recurrent_{name}")
        if tensor is not None and size > 0 and tensor.shape[1:] != (1, size):
            text = f"recurrent_{name} has shape {list(tensor.shape)}, not [batch, 1, {size}]"
            yield _error("publish-memory", text)
        if tensor is not None and size == 0:
            yield _error("publish-memory", f"there is recurrent_{name}, but memory_size is 0")


def _graph_rules(model: onnx.ModelProto) -> Iterator[Finding]:
    """Check the operators and their attributes, and that every input is used."""
    # An operator of another domain is refused even if it has a known name, which may mean something
    # else in that domain.
    nodes = model.graph.node
    unknown = sorted({n.op_type for n in nodes if n.domain or n.op_type not in SAFE_OPERATORS})
    if unknown:
        yield _error("publish-operators", f"operators that Unity may not support: {unknown}")
    for node in nodes:
        for attr in node.attribute:
            text, kind = "", (node.op_type, attr.name)
            flaws = [n for n in (attr.f, *attr.floats) if not isfinite(n)]
            # An infinite bound of Clip means no bound, so it is no fault.
            if flaws and not (node.op_type == "Clip" and isinf(flaws[0])):
                text = f"{node.op_type} has {attr.name} {flaws[0]}, which must be finite"
            # ONNX Runtime aborts the whole process at a scale that is not positive.
            elif kind == ("RandomNormalLike", "scale") and not attr.f > 0.0:
                text = f"RandomNormalLike has scale {attr.f}, which must be above 0"
            elif kind == ("Multinomial", "sample_size") and attr.i != 1:
                text = f"Multinomial has sample_size {attr.i}, not 1"
            if text:
                yield _error("publish-operators", text)
    used = {name for node in nodes for name in node.input}
    unused = [name for name in inputs(model) if name not in used]
    if unused:
        yield _error("publish-unused-input", f"inputs that no operator reads: {unused}")
