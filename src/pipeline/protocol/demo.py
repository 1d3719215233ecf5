"""Demonstrations (`.demo` files) as arrays.

The action of a row is the one recorded beside its observation. Recorders of packages from about
0.14 on record the action of the step before there; see `DemoWriter` for what we write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import DemonstrationError, UnityActionException, UnityException
from pipeline.protocol.decoding import (
    behavior_spec_from,
    decode_actions,
    decode_infos,
    decode_masks,
)
from pipeline.protocol.demo_file import parse_demo
from pipeline.protocol.demo_writer import DemoWriter
from pipeline.protocol.generated.messages import UnityRLInputProto
from pipeline.protocol.specs import refuse_excess, row_bytes

if TYPE_CHECKING:
    from pipeline.arrays import BoolArray, FloatArray, IntArray
    from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec

__all__ = ["DemoWriter", "Demonstration", "DemonstrationMeta", "describe", "read_demo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationMeta:
    """The header of a demonstration file."""

    api_version: int
    name: str
    """Letters, digits, spaces and hyphens, at most 16."""
    n_steps: int
    """Pairs in the file, 0 where the recorder did not finish it."""
    n_episodes: int
    """Ended episodes plus one."""
    mean_reward: float
    """Reward of all pairs over `n_episodes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A demonstration as arrays, one row per recorded pair."""

    metadata: DemonstrationMeta
    behavior_name: str
    """As recorded, without a team."""
    spec: BehaviorSpec
    obs: list[FloatArray]
    """Per observation float32 [n, *shape], images channels first in 0..1."""
    continuous: FloatArray
    """float32 [n, a]."""
    discrete: IntArray
    """int32 [n, branches]."""
    reward: FloatArray
    """float32 [n], gained since the pair before."""
    done: BoolArray
    """[n], True on the last pair of an episode."""
    interrupted: BoolArray
    """[n], True where the episode was cut short rather than finished."""
    group_id: IntArray
    """int32 [n], 0 for agents without a group."""
    group_reward: FloatArray
    """float32 [n]."""
    action_mask: list[BoolArray] | None
    """Per branch bool [n, size], True = forbidden; None without discrete actions."""

    def __len__(self) -> int:
        return len(self.reward)


def read_demo(path: Path | str) -> Demonstration:
    """Read one `.demo` file, of any package version.

    Actions that a recorder left out (the last of an episode) are zeros.

    Raises:
        DemonstrationError: The file is not there, not a demonstration, cut off, or of an unknown
            version.
    """
    path = Path(path)
    try:
        meta, brain, infos, acted, n_bytes = parse_demo(path)
        if not infos:
            raise DemonstrationError(
                f"{path}: the demonstration holds no steps; did its recording end before it was "
                "closed?"
            )
        spec = behavior_spec_from(brain, infos[0])
        refuse_excess(len(infos) * row_bytes(spec), n_bytes, f"a recording of {len(infos)} steps")
        batch = decode_infos(infos, spec, brain.brain_name)
        entries = UnityRLInputProto.ListAgentActionProto(value=acted)
        actions = decode_actions(entries, spec.action_spec, absent_is_zero=True)
        _check_actions(actions, spec.action_spec)
    except (UnityException, ValueError) as error:
        raise DemonstrationError(f"{path}: {error}") from error
    return Demonstration(
        metadata=DemonstrationMeta(
            api_version=meta.api_version,
            name=meta.demonstration_name,
            n_steps=meta.number_steps,
            n_episodes=meta.number_episodes,
            mean_reward=meta.mean_reward,
        ),
        behavior_name=brain.brain_name,
        spec=spec,
        obs=batch.obs,
        continuous=actions.continuous,
        discrete=actions.discrete,
        reward=batch.reward,
        done=batch.done,
        interrupted=batch.done & batch.max_step_reached,
        group_id=batch.group_id,
        group_reward=batch.group_reward,
        action_mask=decode_masks(infos, spec.action_spec),
    )


def _check_actions(actions: ActionTuple, spec: ActionSpec) -> None:
    choices = actions.discrete
    wrong = ~np.isfinite(actions.continuous).all(axis=1)
    wrong |= ((choices < 0) | (choices >= np.array(spec.discrete_branches))).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise UnityActionException(
            f"the action of step {row + 1}, {actions.continuous[row]} and {choices[row]}, is none "
            f"of the behavior's ({spec}); record it again"
        )


def describe(demo: Demonstration) -> str:
    """What a demonstration holds, for a person."""
    ends = int(demo.done.sum())
    what = "per ended episode" if ends else "in all, no episode ended"
    counted = demo.reward[: np.flatnonzero(demo.done)[-1] + 1] if ends else demo.reward
    lines = [
        f"behavior      {demo.behavior_name}",
        f"name          {demo.metadata.name or '(none)'}",
        f"steps         {len(demo)}",
        f"episodes      {ends} ended ({int(demo.interrupted.sum())} of them cut short)",
        f"mean reward   {counted.sum() / max(1, ends):.4g} {what} "
        f"(the header says {demo.metadata.mean_reward:.4g})",
        f"actions       {demo.spec.action_spec}",
    ]
    for index, obs in enumerate(demo.spec.observation_specs):
        lines.append(f"observation {index} {obs.name or '(no name)'} {tuple(obs.shape)}")
    return "\n".join(lines)
