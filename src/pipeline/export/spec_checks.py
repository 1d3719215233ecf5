"""The loader's checks that compare a model with the behavior it is to drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.export.findings import warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.arrays import AnyArray
    from pipeline.export.findings import Finding
    from pipeline.export.layout import TensorInfo
    from pipeline.protocol.specs import BehaviorSpec

_V3 = 3
_VECTOR, _ENTITIES, _VISUAL = 1, 2, 3


def spec_findings(
    inputs: Mapping[str, TensorInfo], constants: Mapping[str, AnyArray], spec: BehaviorSpec
) -> Iterator[Finding]:
    """Rules 12 and 16 to 19, or their v2 forms."""
    if int(constants["version_number"].flat[0]) >= _V3:
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
    found = sum(name.startswith("visual_observation_") for name in inputs)
    if found > len(shapes):
        yield warning("v2-b", f"{found} visual inputs for {len(shapes)} visual sensors")


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
    found = inputs[name].shape[1:]
    if found != shape:
        yield warning(rule, f"input {name} has shape {list(found)}, the sensor {list(shape)}")


def _actions(
    inputs: Mapping[str, TensorInfo], constants: Mapping[str, AnyArray], spec: BehaviorSpec
) -> Iterator[Finding]:
    """Rules 17 to 19 and v2-d."""
    action = spec.action_spec
    previous = inputs["prev_action"].shape[-1:] if "prev_action" in inputs else ()
    if "prev_action" in inputs and previous != (action.discrete_size,):
        found = list(previous)
        yield warning("17", f"prev_action has {found} values for {action.discrete_size} branches")
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
    is_v3 = int(constants["version_number"].flat[0]) >= _V3
    if is_v3 and branches != action.discrete_branches:
        yield _branches("19", list(branches), list(action.discrete_branches))
    if not is_v3 and sum(branches) != sum(action.discrete_branches):
        yield _branches("v2-d", sum(branches), sum(action.discrete_branches))


def _legacy_actions(constants: Mapping[str, AnyArray], spec: BehaviorSpec) -> Iterator[Finding]:
    """Rules 18 and v2-d for models with one kind of action and the constants of that age."""
    size = sum(_sizes(constants, "action_output_shape"))
    is_continuous = sum(_sizes(constants, "is_continuous_control")) > 0
    action = spec.action_spec
    wanted = action.continuous_size if is_continuous else sum(action.discrete_branches)
    if size != wanted:
        yield warning(
            "18" if is_continuous else "v2-d",
            f"action_output_shape is {size}, the behavior has {wanted}",
        )


def _branches(rule: str, found: object, wanted: object) -> Finding:
    return warning(rule, f"discrete_action_output_shape is {found}, the behavior has {wanted}")


def _sizes(constants: Mapping[str, AnyArray], name: str) -> tuple[int, ...]:
    """A shape constant without the zeros that mean "none"."""
    value = constants.get(name)
    return () if value is None else tuple(int(n) for n in value.reshape(-1) if n)
