"""Policies in checkpoints: what is saved beside the weights, and how to get the policy back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError
from pipeline.protocol.specs import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)
from pipeline.settings import RunSettings, load_run_settings, to_mapping
from pipeline.trainer.checkpoints import load_checkpoint, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.algos.policy import Policy
    from pipeline.arrays import FloatArray
    from pipeline.settings import TrainerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPolicy:
    """One behavior's policy out of a checkpoint."""

    behavior: str
    spec: BehaviorSpec
    settings: TrainerSettings
    policy: Policy
    step: int
    recorded_obs: list[FloatArray]
    """[R, *shape] per observation, that the policy has met."""
    recorded_masks: FloatArray | None
    """[R, sum of branch sizes] that came with them, 1 = allowed; None without discrete actions."""


def description(name: str, spec: BehaviorSpec, settings: RunSettings) -> dict[str, Any]:
    """What a checkpoint says of its behavior, as plain values."""
    only = replace(settings, behaviors={name: settings.for_behavior(name)}, default_settings=None)
    return {
        "behavior": name,
        "settings": to_mapping(only)["behaviors"][name],
        "spec": spec_to_mapping(spec),
    }


def load_policy(path: Path) -> SavedPolicy:
    """The policy of a checkpoint, on the CPU.

    Raises:
        CheckpointError: The file cannot be read or used.
    """
    from pipeline.algos.policy import Policy

    state = load_checkpoint(path)
    try:
        name = str(state["behavior"])
        spec = spec_from_mapping(state["spec"])
        run = load_run_settings(None, overrides={"behaviors": {name: state["settings"]}})
        settings = run.for_behavior(name)
        squash = str(settings.trainer_type) == "sac"
        policy = Policy(spec, settings.network_settings, squash=squash)
        policy.load_state_dict(state["learner"]["algorithm"]["policy"])
        step = int(state["learner"]["step"])
        recorded = state["learner"]["recorded"]
        allowed = recorded["allowed"]
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: this checkpoint does not hold a whole policy: {reason_of(error)}"
        ) from error
    policy.eval()
    return SavedPolicy(
        behavior=name,
        spec=spec,
        settings=settings,
        policy=policy,
        step=step,
        recorded_obs=[values.numpy() for values in recorded["obs"]],
        recorded_masks=None if allowed is None else allowed.float().numpy(),
    )


def spec_to_mapping(spec: BehaviorSpec) -> dict[str, Any]:
    """A behavior's specification as plain values."""
    return {
        "observations": [
            {
                "shape": [int(size) for size in obs.shape],
                "dimension_property": [int(flag) for flag in obs.dimension_property],
                "observation_type": int(obs.observation_type),
                "name": obs.name,
            }
            for obs in spec.observation_specs
        ],
        "continuous_size": int(spec.action_spec.continuous_size),
        "discrete_branches": [int(size) for size in spec.action_spec.discrete_branches],
    }


def spec_from_mapping(values: Mapping[str, Any]) -> BehaviorSpec:
    """The specification that `spec_to_mapping` wrote."""
    return BehaviorSpec(
        [
            ObservationSpec(
                tuple(obs["shape"]),
                tuple(DimensionProperty(flag) for flag in obs["dimension_property"]),
                ObservationType(obs["observation_type"]),
                obs["name"],
            )
            for obs in values["observations"]
        ],
        ActionSpec(values["continuous_size"], tuple(values["discrete_branches"])),
    )
