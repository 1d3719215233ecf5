"""The checks that Unity makes when a model is assigned to an agent, as a list of findings.

The order and the rule numbers are those of the loader: some findings end the check, because what
comes after has no meaning without them. `export.rules` adds the stricter rules for publishing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.export.layout import TensorInfo, inputs, load, outputs, read_constants
from pipeline.protocol.specs import BehaviorSpec

if TYPE_CHECKING:
    import onnx

    from pipeline.arrays import AnyArray

OLDEST_VERSION, NEWEST_VERSION = 2, 3
_ACTION_OUTPUTS = (
    "action",
    "continuous_actions",
    "discrete_actions",
    "deterministic_continuous_actions",
    "deterministic_discrete_actions",
)
# Inputs that the package fills, or tolerates, beside those of sensors.
_KNOWN_INPUTS = {"action_masks", "recurrent_in", "prev_action", "epsilon", "sequence_length"}
# Ranks of the shapes of observations.
_VECTOR, _ENTITIES, _VISUAL = 1, 2, 3
Severity = Literal["warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing about a model that the loader, or publishing, objects to."""

    severity: Severity
    """As the Unity Inspector shows it; at run time only errors stop the model."""
    rule: str
    """Number of the loader's check (2 to 20, v2-a to v2-d), or the name of a publishing rule."""
    message: str
    """What is wrong."""

    def __str__(self) -> str:
        return f"{self.severity} (rule {self.rule}): {self.message}"


def warning(rule: str, message: str) -> Finding:
    """A finding that the Inspector shows in yellow."""
    return Finding(severity="warning", rule=rule, message=message)


def error(rule: str, message: str) -> Finding:
    """A finding that stops the model."""
    return Finding(severity="error", rule=rule, message=message)


class _Model:
    """The parts of a model that the checks look at."""

    def __init__(self, model: onnx.ModelProto, spec: BehaviorSpec | None, deterministic: bool):
        self.constants: dict[str, AnyArray] = read_constants(model)
        self.inputs: dict[str, TensorInfo] = inputs(model)
        self.outputs: dict[str, TensorInfo] = outputs(model)
        self.spec = spec
        self.deterministic = deterministic

    def number(self, name: str, default: int = 0) -> int:
        """First value of a constant."""
        return int(self.constants[name].flat[0]) if name in self.constants else default

    def total(self, name: str) -> int:
        """Sum of a constant; 0 when it is absent."""
        return int(self.constants[name].sum()) if name in self.constants else 0

    def has_actions(self, kind: str) -> bool:
        """Whether the tensor that inference fetches for `kind` exists and is not empty."""
        expected = f"deterministic_{kind}_actions" if self.deterministic else f"{kind}_actions"
        return expected in self.outputs and self.total(f"{kind}_action_output_shape") > 0


def check_model(
    source: onnx.ModelProto | Path | str,
    spec: BehaviorSpec | None = None,
    *,
    deterministic: bool = False,
) -> list[Finding]:
    """Everything that Unity's loader would report for a model.

    Args:
        source: the model or its file.
        spec: the behavior that the model is to drive; without it, checks that compare the two are
            left out.
        deterministic: whether the agent's "Deterministic inference" box is ticked.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    model = _Model(load(source), spec, deterministic)
    # The loader ends at the first of these, so that nothing after it is reported.
    stop = _stopping_finding(model)
    if stop is not None:
        return [stop]
    findings = list(_version_findings(model))
    # The loader ends here, too: nothing else of such a model can be checked.
    if model.number("memory_size") == -1:
        return [*findings, warning("11", "memory_size is -1: the model was saved without it")]
    findings += _presence_findings(model)
    # The loader looks for unexpected inputs in models of version 3 only.
    if model.number("version_number") >= NEWEST_VERSION:
        findings += _unexpected_inputs(model)
    if spec is not None:
        findings += _spec_findings(model.inputs, model.constants, spec)
    return sorted(findings, key=_rule_order)


def _rule_order(finding: Finding) -> tuple[int, str]:
    return (int(finding.rule), "") if finding.rule.isdigit() else (100, finding.rule)


def _stopping_finding(model: _Model) -> Finding | None:
    """Rules 2 to 8: the first one that fails."""
    for rule, name in (("2", "version_number"), ("3", "memory_size")):
        if name not in model.constants:
            return warning(rule, f"required constant {name} is missing")
    if not any(name in model.outputs for name in _ACTION_OUTPUTS):
        return warning("4", f"no action output among {', '.join(_ACTION_OUTPUTS)}")
    # Without such outputs it is a model of package 1.x, with one output called `action`.
    kinds = [kind for kind in ("continuous", "discrete") if f"{kind}_actions" in model.outputs]
    if not kinds:
        for name in ("action_output_shape", "is_continuous_control"):
            if name not in model.constants:
                return warning("5", f"deprecated layout without the constant {name}")
    for kind in kinds:
        # The loader's list has one number for both faults of discrete actions.
        rule = "6" if kind == "continuous" else "8"
        if f"{kind}_action_output_shape" not in model.constants:
            return warning(rule, f"required constant {kind}_action_output_shape is missing")
        if not model.has_actions(kind):
            expected = "deterministic" if model.deterministic else "sampled"
            rule = "7" if kind == "continuous" else "8"
            return warning(rule, f"the {expected} {kind} actions are missing or empty")
    return None


def _version_findings(model: _Model) -> Iterator[Finding]:
    """Rules 9 and 10."""
    version, memory = model.number("version_number"), model.number("memory_size")
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        age = "old; train it again" if version < OLDEST_VERSION else "new; update the package"
        message = f"version_number is {version}, which is too {age} (2 and 3 can be loaded)"
        yield error("9", message)
    if version == OLDEST_VERSION and memory > 0:
        message = f"a version 2 model with memory_size {memory} cannot be loaded; train it again"
        yield error("10", message)


def _presence_findings(model: _Model) -> Iterator[Finding]:
    """Rules 13, 14 and 20: what memory and discrete actions need."""
    if model.number("memory_size") > 0:
        if "recurrent_in" not in model.inputs:
            yield warning("13", "memory_size is above 0, but there is no input recurrent_in")
        if "recurrent_out" not in model.outputs:
            yield warning("20", "memory_size is above 0, but there is no output recurrent_out")
    if model.has_actions("discrete") and "action_masks" not in model.inputs:
        yield warning("14", "there are discrete actions, but no input action_masks")


def _unexpected_inputs(model: _Model) -> Iterator[Finding]:
    """Rule 15."""
    count = None if model.spec is None else len(model.spec.observation_specs)
    for name in model.inputs:
        # No leading zeros, and few digits: names come out of a file and become numbers.
        number = re.fullmatch(r"obs_(0|[1-9][0-9]{0,5})", name)
        is_sensor = number is not None and (count is None or int(number[1]) < count)
        if not is_sensor and name not in _KNOWN_INPUTS:
            yield warning("15", f"unexpected input {name}: no sensor of the behavior fills it")


def _spec_findings(
    inputs: Mapping[str, TensorInfo], constants: Mapping[str, AnyArray], spec: BehaviorSpec
) -> Iterator[Finding]:
    """Rules 12 and 16 to 19, or their v2 forms."""
    if int(constants["version_number"].flat[0]) >= NEWEST_VERSION:
        yield from _v3_observations(inputs, spec)
    else:
        yield from _v2_vectors(inputs, spec)
        yield from _v2_images(inputs, spec)
        yield from _v2_entities(inputs, spec)
    yield from _actions(inputs, constants, spec)


def _v3_observations(inputs: Mapping[str, TensorInfo], spec: BehaviorSpec) -> Iterator[Finding]:
    for index, obs in enumerate(spec.observation_specs):
        name = f"obs_{index}"
        if name not in inputs:
            yield warning("12", f"there is no input {name} for sensor {index} {list(obs.shape)}")
        else:
            yield from _shape("16", name, inputs, obs.shape)


def _v2_vectors(inputs: Mapping[str, TensorInfo], spec: BehaviorSpec) -> Iterator[Finding]:
    """Rule v2-a: all vectors arrive in one tensor."""
    size = sum(o.shape[0] for o in spec.observation_specs if len(o.shape) == _VECTOR)
    if "vector_observation" in inputs:
        yield from _shape("v2-a", "vector_observation", inputs, (size,))
    elif size:
        yield warning("v2-a", f"there is no input vector_observation for {size} numbers")


def _v2_images(inputs: Mapping[str, TensorInfo], spec: BehaviorSpec) -> Iterator[Finding]:
    """Rule v2-b."""
    shapes = [o.shape for o in spec.observation_specs if len(o.shape) == _VISUAL]
    for index, shape in enumerate(shapes):
        name = f"visual_observation_{index}"
        if name in inputs:
            yield from _shape("v2-b", name, inputs, shape)
        else:
            yield warning("v2-b", f"there is no input {name} for an image of {list(shape)}")
    n_inputs = sum(name.startswith("visual_observation_") for name in inputs)
    if n_inputs > len(shapes):
        yield warning("v2-b", f"{n_inputs} visual inputs for {len(shapes)} visual sensors")


def _v2_entities(inputs: Mapping[str, TensorInfo], spec: BehaviorSpec) -> Iterator[Finding]:
    """Rule v2-c."""
    for index, obs in enumerate(spec.observation_specs):
        if len(obs.shape) == _ENTITIES and f"obs_{index}" not in inputs:
            yield warning(
                "v2-c", f"there is no input obs_{index} for variable-length sensor {index}"
            )


def _shape(
    rule: str, name: str, inputs: Mapping[str, TensorInfo], shape: tuple[int, ...]
) -> Iterator[Finding]:
    # Without the batch axis.
    declared = inputs[name].shape[1:]
    if declared != shape:
        yield warning(rule, f"input {name} has shape {list(declared)}, the sensor {list(shape)}")


def _actions(
    inputs: Mapping[str, TensorInfo], constants: Mapping[str, AnyArray], spec: BehaviorSpec
) -> Iterator[Finding]:
    """Rules 17 to 19 and v2-d."""
    action = spec.action_spec
    previous = inputs["prev_action"].shape[-1:] if "prev_action" in inputs else ()
    if "prev_action" in inputs and previous != (action.discrete_size,):
        shape = list(previous)
        yield warning("17", f"prev_action has {shape} values for {action.discrete_size} branches")
    is_legacy = "continuous_action_output_shape" not in constants and (
        "discrete_action_output_shape" not in constants
    )
    if is_legacy:
        yield from _legacy_actions(constants, spec)
        return
    continuous = sum(_sizes(constants, "continuous_action_output_shape"))
    if continuous != action.continuous_size:
        yield warning(
            "18",
            f"the model gives {continuous} continuous actions, the behavior takes "
            f"{action.continuous_size}",
        )
    branches = _sizes(constants, "discrete_action_output_shape")
    is_v3 = int(constants["version_number"].flat[0]) >= NEWEST_VERSION
    # Only version 3 writes the size of each branch; version 2 has their sum.
    if is_v3 and branches != action.discrete_branches:
        yield _branches("19", list(branches), list(action.discrete_branches))
    if not is_v3 and sum(branches) != sum(action.discrete_branches):
        yield _branches("v2-d", sum(branches), sum(action.discrete_branches))


def _legacy_actions(constants: Mapping[str, AnyArray], spec: BehaviorSpec) -> Iterator[Finding]:
    """Rules 18 and v2-d for models with one kind of action and the constants of that age."""
    size = sum(_sizes(constants, "action_output_shape"))
    is_continuous = sum(_sizes(constants, "is_continuous_control")) > 0
    action = spec.action_spec
    expected = action.continuous_size if is_continuous else sum(action.discrete_branches)
    if size != expected:
        yield warning(
            "18" if is_continuous else "v2-d",
            f"action_output_shape is {size}, the behavior has {expected}",
        )


def _branches(rule: str, declared: object, expected: object) -> Finding:
    return warning(rule, f"discrete_action_output_shape is {declared}, the behavior has {expected}")


def _sizes(constants: Mapping[str, AnyArray], name: str) -> tuple[int, ...]:
    """A shape constant without the zeros that mean "none"."""
    value = constants.get(name)
    return () if value is None else tuple(int(n) for n in value.reshape(-1) if n)
