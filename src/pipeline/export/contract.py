"""The checks that Unity makes when a model is assigned to an agent, as a list of findings.

The order and the rule numbers are those of the loader: some findings end the check, because what
comes after has no meaning without them. `export.rules` adds the stricter rules for publishing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.export.findings import Finding, error, warning
from pipeline.export.layout import inputs, load, outputs, read_constants
from pipeline.export.spec_checks import spec_findings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx

    from pipeline.arrays import AnyArray
    from pipeline.export.layout import TensorInfo
    from pipeline.protocol.specs import BehaviorSpec

OLDEST_VERSION, NEWEST_VERSION = 2, 3
_ACTION_OUTPUTS = (
    "action",
    "continuous_actions",
    "discrete_actions",
    "deterministic_continuous_actions",
    "deterministic_discrete_actions",
)
_KNOWN_INPUTS = {"action_masks", "recurrent_in", "prev_action", "epsilon", "sequence_length"}


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
        wanted = f"deterministic_{kind}_actions" if self.deterministic else f"{kind}_actions"
        return wanted in self.outputs and self.total(f"{kind}_action_output_shape") > 0


def check_model(
    source: onnx.ModelProto | Path | str | None,
    spec: BehaviorSpec | None = None,
    *,
    deterministic: bool = False,
) -> list[Finding]:
    """Everything that Unity's loader would report for a model.

    Args:
        source: the model or its file; None is an agent without a model.
        spec: the behavior that the model is to drive; without it, checks that compare the two are
            left out.
        deterministic: whether the agent's "Deterministic inference" box is ticked.

    Raises:
        ExportError: The file cannot be read as ONNX.
    """
    if source is None:
        message = "there is no model for this behavior; it can still train, but cannot do inference"
        return [Finding(severity="info", rule="1", message=message)]
    model = _Model(load(source), spec, deterministic)
    stop = _stopping_finding(model)
    if stop is not None:
        return [stop]
    findings = list(_version_findings(model))
    if model.number("memory_size") == -1:
        return [*findings, warning("11", "memory_size is -1: the model was saved without it")]
    findings += _presence_findings(model)
    if model.number("version_number") >= NEWEST_VERSION:
        findings += _unexpected_inputs(model)
    if spec is not None:
        findings += spec_findings(model.inputs, model.constants, spec)
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
    kinds = [kind for kind in ("continuous", "discrete") if f"{kind}_actions" in model.outputs]
    if not kinds:
        for name in ("action_output_shape", "is_continuous_control"):
            if name not in model.constants:
                return warning("5", f"deprecated layout without the constant {name}")
    for kind in kinds:
        rule = "6" if kind == "continuous" else "8"
        if f"{kind}_action_output_shape" not in model.constants:
            return warning(rule, f"required constant {kind}_action_output_shape is missing")
        if not model.has_actions(kind):
            wanted = "deterministic" if model.deterministic else "sampled"
            rule = "7" if kind == "continuous" else "8"
            return warning(rule, f"the {wanted} {kind} actions are missing or empty")
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
        number = re.fullmatch(r"obs_(0|[1-9][0-9]{0,5})", name)
        is_sensor = number is not None and (count is None or int(number[1]) < count)
        if not is_sensor and name not in _KNOWN_INPUTS:
            yield warning("15", f"unexpected input {name}: no sensor of the behavior fills it")
